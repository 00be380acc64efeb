"""What an installation brings along, and what of it a launcher imports (docs/decisions/047)."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.harness import LIMIT, clean_environment

ROOT = Path(__file__).resolve().parent.parent
RECORD = ROOT / "docs/decisions/047-one-set-of-dependencies.md"

MODULES = {
    "torch": "torch", "grpcio": "grpc", "msgspec": "msgspec", "protobuf": "google",
    "nvidia-ml-py": "pynvml", "rich": "rich", "prometheus-client": "prometheus_client",
    "uvicorn": "uvicorn", "xxhash": "xxhash", "fsspec": "fsspec", "psutil": "psutil",
}  # fmt: skip
"""The top module of each dependency."""


def test_each_dependency_was_measured() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    names = {re.split(r"[<>=]", one)[0] for one in project["dependencies"]}
    assert names == set(MODULES)
    assert set(re.findall(r"^\| ([a-z-]+) .*\|", RECORD.read_text(), re.M)) == names | {"package"}


@pytest.mark.slow
def test_an_agent_imports_three(tmp_path: Path) -> None:
    """The whole life of one, with a rank."""
    script = tmp_path / "script.py"
    script.write_text("print('here')\n")
    words = ("-X", "importtime", "-m", "elasticrun", "--launch=exec", str(script))
    done = subprocess.run(
        (sys.executable, *words), env=clean_environment(), capture_output=True, text=True,
        timeout=LIMIT,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "here" in done.stdout
    found = set(re.findall(r"^import time:.*\| +(\w+)(?:\.\w+)*$", done.stderr, re.M))
    assert found & set(MODULES.values()) == {"grpc", "google", "msgspec"}
