#!/usr/bin/env bash
# wheel_test.sh [pip] [uv] [pipx]: installs the wheel into an empty environment with each of these
# (with pip if none is named) and runs its commands there. torch and the other dependencies are
# borrowed from the development environment, so that nothing is downloaded twice: a second wheel has
# a .pth file with the path of its packages, which is appended after the environment's own folder
# (and whose own .pth files are not followed). elasticrun itself can only come from the wheel.
# WHEEL: the wheel; without it, one is built.
set -euo pipefail
cd "$(dirname "$0")/.."
work=$(mktemp -d); trap 'rm -rf "$work"' EXIT
PYTHON=$("$PYTHON" -c 'import sys; print(sys.executable)')
pip=("$PYTHON" -m pip --disable-pip-version-check -q)
if [ -z "${WHEEL:-}" ]; then
  "${pip[@]}" wheel --no-deps -w "$work/dist" .
  WHEEL=$(echo "$work"/dist/*.whl)
fi
borrowed="$work/borrowed-1.0-py3-none-any.whl"
"$PYTHON" - "$borrowed" <<'PY'
import site, sys, zipfile
with zipfile.ZipFile(sys.argv[1], "w") as wheel:
    info = "borrowed-1.0.dist-info"
    wheel.writestr("borrowed.pth", site.getsitepackages()[0] + "\n")
    wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: borrowed\nVersion: 1.0\n")
    wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
    wheel.writestr(f"{info}/RECORD", "")
PY
cat > "$work/ok.py" <<'PY'
import os
import elasticrun
assert os.environ["INSTALLED"] in elasticrun.__file__, elasticrun.__file__
import torch.distributed as dist, torch
dist.init_process_group("gloo")
t = torch.ones(1)
dist.all_reduce(t)
assert t.item() == 2
print(f"rank {dist.get_rank()} ok")
dist.destroy_process_group()
PY
"$PYTHON" - "$WHEEL" <<'PY'
import re, sys, zipfile
wheel = zipfile.ZipFile(sys.argv[1])
strange = [n for n in wheel.namelist() if not re.match(r"elasticrun(-[^/]*\.dist-info)?/", n)]
assert not strange, f"files that do not ship: {strange}"
text = wheel.read(next(n for n in wheel.namelist() if n.endswith("METADATA"))).decode()
broken = re.findall(r"\]\((?!https?://)[^)]*\)", text)
assert "](https://" in text and not broken, f"links that lead nowhere on a package index: {broken}"
PY

install() {  # with $1, into $work/$1; sets bin, the folder of its python and its commands
  case $1 in
    pip)
      "$PYTHON" -m venv "$work/pip"
      "$work/pip/bin/python" -m pip --disable-pip-version-check -q install --no-deps \
        "$borrowed" "$WHEEL" ;;
    uv)
      "$PYTHON" -m uv venv -q --python "$PYTHON" "$work/uv"
      "$PYTHON" -m uv pip install -q --python "$work/uv/bin/python" --no-deps \
        "$borrowed" "$WHEEL" ;;
    pipx)
      PIPX_HOME="$work/pipx" PIPX_BIN_DIR="$work/bin" PIPX_MAN_DIR="$work/man" \
        "$PYTHON" -m pipx install -q --python "$PYTHON" --pip-args="--no-deps $borrowed" "$WHEEL" ;;
    *) echo "wheel_test.sh: no such installer: $1" >&2; exit 2 ;;
  esac
  bin="$work/$1/bin"
  [ "$1" != pipx ] || bin="$work/pipx/venvs/elasticrun/bin"
}

[ $# -gt 0 ] || set -- pip
first=$1
for installer in "$@"; do
  install "$installer"
  export INSTALLED="$work/$installer/"
  (
    cd "$work"
    "$bin/elasticrun" --version
    "$bin/elasticrun" --help > /dev/null
    traces="$work/$installer-traces"
    ELASTICRUN_TRACE_DIR="$traces" "$bin/elasticrun" --nproc-per-node=2 ok.py
    [ "$installer" = "$first" ] || exit 0
    "$bin/elasticrun" replay "$traces"/* > replayed
    grep -q "the replay matches the recording" replayed
    "$bin/python" -m elasticrun --standalone --nproc-per-node=2 ok.py
"$bin/elasticrun" shim -- "$bin/python" -m torch.distributed.run --nproc-per-node=2 ok.py
"$bin/elasticrun" demo --help > /dev/null
  )
  echo "wheel: the commands that $installer installed work"
done
