"""scripts/install.sh without uv, without an index, and without a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.further import further
from tests.harness import LIMIT

SCRIPT = Path(__file__).parent.parent / "scripts/install.sh"


def _wheel(folder: Path, name: str, version: str) -> None:
    """A wheel with one empty module."""
    info = f"{name}-{version}.dist-info"
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"{name}.py", "")
        wheel.writestr(
            f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        )
        wheel.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr(f"{info}/RECORD", "")


def _install(python: Path, wheels: Path, *requirements: str) -> subprocess.CompletedProcess[str]:
    """Only the folder `wheels` is at hand: no index answers."""
    environ = {**os.environ, "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(wheels), "UV_OFFLINE": "1"}
    for name in ("PIP_CONFIG_FILE", "PIP_CONSTRAINT"):
        environ[name] = os.devnull
    return subprocess.run(
        ["bash", str(SCRIPT), str(python), *requirements],
        env=environ, capture_output=True, text=True, timeout=LIMIT, check=False,
    )  # fmt: skip


@pytest.mark.slow
@further(why="each run of CI installs by this script")
def test_each_fallback_says_so_and_installs(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-m", "venv", str(tmp_path / "venv")], check=True)
    python = tmp_path / "venv/bin/python"
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    _wheel(wheels, "plain", "1.0")

    done = _install(python, wheels, "plain==1.0")
    assert done.returncode == 0, done.stderr
    assert "uv cannot be installed" in done.stderr
    assert "using pip" in done.stderr

    uv = python.with_name("uv")  # there, but it fails: as behind a proxy that it does not trust
    certificates = "$UV_SYSTEM_CERTS $UV_NATIVE_TLS"  # of the system; uv has changed the name
    uv.write_text(f'#!/bin/sh\necho "{certificates}, no route: $*" >&2\nexit 2\n')
    uv.chmod(0o755)
    _wheel(wheels, "uv", "1.0")  # so that pip finds it installed or installs it
    _wheel(wheels, "torchless", "1.0")
    done = _install(python, wheels, "torchless==1.0")
    assert done.returncode == 0, done.stderr
    assert "true true, no route: pip install" in done.stderr
    assert "uv failed (see above); using pip" in done.stderr

    done = _install(python, wheels, "torch==99.0")
    assert done.returncode != 0
    if not Path("/proc/driver/nvidia/version").exists():
        assert "index of CPU builds cannot be used" in done.stderr
