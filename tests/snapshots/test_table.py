"""The table in this folder's docstring names tests that there are."""

from __future__ import annotations

import re
from pathlib import Path

import tests.snapshots

TESTS = Path(__file__).parent.parent


def test_every_row_has_tests_that_exist() -> None:
    here = "".join(path.read_text() for path in Path(__file__).parent.glob("test_*.py"))
    text = tests.snapshots.__doc__ or ""
    rows = [line for line in text.splitlines() if line.startswith("| ")]
    assert len(rows) > 40
    for row in rows:
        if row in ("| row | tests |", "| defect | tests |"):
            continue
        named = re.findall(r"(?:([\w/]+\.py)::)?\b(test_\w+)\b(?!\.py)", row)
        scripts = re.findall(r"\b(?:snapshots|departing)_\w+", row)
        assert named or scripts, f"no test stands for this row: {row}"
        for script in scripts:
            assert (TESTS / "core/scripts" / f"{script}.txt").exists(), f"no script {script}"
        for file, name in named:
            source = (TESTS / file).read_text() if file else here
            assert f"def {name}(" in source, f"{file or 'this folder'} has no {name}"
