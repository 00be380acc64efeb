"""A disk that is full: a real one, a small tmpfs in a namespace of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests import needs

SCRIPT = Path(__file__).parent / "scripts" / "full_disk.py"


def test_a_full_disk_is_said_and_nothing_is_left_on_it(tmp_path: Path) -> None:
    done = subprocess.run(
        [*needs.tmpfs(tmp_path, "8m"), sys.executable, str(SCRIPT), str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    first, early, late, left = done.stdout.splitlines()
    assert first == "written"
    for line in (early, late):
        assert "data was not written: there is no room (0.0" in line
        assert line.endswith("make room, or choose another folder")
    assert left == "{} {} [1]"
