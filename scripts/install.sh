#!/usr/bin/env bash
# install.sh PYTHON WHAT...: into that Python's environment, by uv in seconds; where uv cannot be
# had, or fails, by pip in minutes.
set -euo pipefail
python=$1; shift
pip=("$python" -m pip --disable-pip-version-check -q install)
if "${pip[@]}" uv 2>/dev/null &&
  UV_FIND_LINKS="${PIP_FIND_LINKS:-}" "$(dirname "$python")/uv" pip install -q --compile-bytecode \
    --python "$python" "$@"; then
  exit 0
fi
exec "${pip[@]}" "$@"
