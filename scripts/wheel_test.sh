#!/usr/bin/env bash
# Builds the wheel, installs it into an empty environment and runs its commands there. torch and the
# other dependencies are borrowed from the development environment by a .pth file, so that nothing
# is downloaded twice; elasticrun itself can only come from the wheel.
set -euo pipefail
cd "$(dirname "$0")/.."
work=$(mktemp -d); trap 'rm -rf "$work"' EXIT
"$PYTHON" -m pip --disable-pip-version-check -q wheel --no-deps -w "$work/dist" .
"$PYTHON" -m venv "$work/venv"
bin="$work/venv/bin"
"$bin/python" -m pip --disable-pip-version-check -q install --no-deps "$work"/dist/*.whl
"$PYTHON" -c 'import site; print(site.getsitepackages()[0])' > "$work/borrowed"
target=$("$bin/python" -c 'import site; print(site.getsitepackages()[0])')
# appended after the wheel's own folder; the development install's .pth files are not followed
cp "$work/borrowed" "$target/borrowed.pth"
cat > "$work/ok.py" <<'PY'
import os
import elasticrun
assert "borrowed" not in elasticrun.__file__ and "/venv/lib" in elasticrun.__file__, elasticrun.__file__
import torch.distributed as dist, torch
dist.init_process_group("gloo")
t = torch.ones(1)
dist.all_reduce(t)
assert t.item() == 2
print(f"rank {dist.get_rank()} ok")
dist.destroy_process_group()
PY
"$PYTHON" - "$work"/dist/*.whl <<'PY'
import re, sys, zipfile
wheel = zipfile.ZipFile(sys.argv[1])
strange = [n for n in wheel.namelist() if not re.match(r"elasticrun(-[^/]*\.dist-info)?/", n)]
assert not strange, f"files that do not ship: {strange}"
text = wheel.read(next(n for n in wheel.namelist() if n.endswith("METADATA"))).decode()
broken = re.findall(r"\]\((?!https?://)[^)]*\)", text)
assert "](https://" in text and not broken, f"links that lead nowhere on a package index: {broken}"
PY
cd "$work"
"$bin/elasticrun" --version
"$bin/elasticrun" --help > /dev/null
ELASTICRUN_TRACE_DIR="$work/traces" "$bin/elasticrun" --nproc-per-node=2 ok.py
"$bin/elasticrun" replay "$work"/traces/* > "$work/replayed"
grep -q "the replay matches the recording" "$work/replayed"
"$bin/python" -m elasticrun --standalone --nproc-per-node=2 ok.py
echo "wheel: the installed commands work"
