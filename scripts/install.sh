#!/usr/bin/env bash
# install.sh PYTHON REQUIREMENT...: install into that Python's environment, with uv (seconds) or, where
# uv does not work, with pip (minutes). Both use the system's certificates, so that a proxy with its own
# certificate authority works. Without an NVIDIA GPU, torch comes from PyTorch's index of CPU builds
# (200 MB) where that index can be reached; PyPI's build brings 5 GB of CUDA libraries.
set -euo pipefail
python=$1; shift
say() { echo "install.sh: $*" >&2; }
pip=("$python" -m pip --disable-pip-version-check -q install)
uv=("$(dirname "$python")/uv" pip install -q --compile-bytecode --python "$python")
export UV_SYSTEM_CERTS=true UV_NATIVE_TLS=true UV_FIND_LINKS="${PIP_FIND_LINKS:-}"
CPU_INDEX=https://download.pytorch.org/whl/cpu

wants_cpu_torch() {  # $1 is torch itself, it is not installed yet, and there is no NVIDIA driver here
  [[ "$1" == torch* && ! -e /proc/driver/nvidia/version && ! -e /dev/nvidiactl ]] &&
    ! "$python" -c 'import importlib.util as u, sys; sys.exit(u.find_spec("torch") is None)'
}

has_wheel() {  # a build of this torch is in a local folder of wheels: no index is needed
  local folder
  for folder in $UV_FIND_LINKS; do
    [ ! -d "$folder" ] || [ -z "$(find "$folder" -name "${1/==/-}*.whl" -print -quit)" ] || return 0
  done
  return 1
}

if ! why=$("${pip[@]}" uv 2>&1); then
  say "uv cannot be installed (${why##*$'\n'}); using pip, which takes minutes"
elif wants_cpu_torch "$1" && ! has_wheel "$1"; then
  # one retry: an index that a firewall blocks must not cost minutes
  if UV_HTTP_RETRIES=1 "${uv[@]}" --torch-backend=cpu "$@" 2>/dev/null; then
    exit 0
  fi
  say "PyTorch's index of CPU builds cannot be used; installing PyPI's build of $1 (several GB)"
fi
if [ -x "${uv[0]}" ]; then
  "${uv[@]}" "$@" && exit 0
  say "uv failed (see above); using pip, which takes minutes"
fi
if wants_cpu_torch "$1" && ! has_wheel "$1"; then
  pip+=(--retries 1 --extra-index-url "$CPU_INDEX")  # pip takes the newest: 2.13.0+cpu > 2.13.0
fi
exec "${pip[@]}" "$@"
