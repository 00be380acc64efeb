"""The comparison finds what it must find: records with one planted difference each."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from tests.fidelity.compare import compare, torchruns
from tests.fidelity.runner import COMPARED, MODES, Case, Ran

CASE = Case(("train.py",), ranks=2)


def ran(mode: str) -> Ran:
    """A run in which all is well."""
    environ = {"RANK": "0", "MASTER_PORT": "1", "HOME": "/"}
    state = {"interpreter: modules": ["sys"], "library: environ": environ}
    records: dict[tuple[int, int], dict[str, Any]] = {
        (life, rank): {
            "state": {"imports": copy.deepcopy(state)},
            "generators": {"seeded: torch": "12"},
            "losses": {"ddp": ["0x1p0"]},
            "weights": {"ddp": "ab"},
            "said": {"vendored": True},
            "unique": {"uuid4": f"{life}{rank}"},
            "sharers": MODES[mode].sharers[0],
            "parked": mode == "parked" and life > 0,
        }
        for life in COMPARED
        for rank in range(2)
    }
    printed = {f"{n}/{r} {s}": "" for n, r in records for s in ("stdout", "stderr")}
    return Ran(0, records, printed, "")


def test_ranks_that_were_no_standbys_prove_nothing_about_them() -> None:
    ours = ran("parked")
    ours.records[2, 1]["parked"] = False
    (line,) = compare(CASE, "parked", ran("torchrun"), ours)
    assert "ranks were no standbys" in line


def test_runs_that_are_alike_are_alike() -> None:
    assert torchruns(CASE, ran("torchrun")) == []
    for mode in MODES:
        if mode != "torchrun":
            assert compare(CASE, mode, ran("torchrun"), ran(mode)) == []


@pytest.mark.parametrize(
    ("part", "key", "value"),
    [
        ("weights", "ddp", "ac"),
        ("losses", "ddp", ["0x1p1"]),
        ("generators", "seeded: torch", "13"),
        ("said", "vendored", False),
        ("said", "more", 1),
        ("unique", "uuid4", "00"),
    ],
)
def test_a_difference_is_found(part: str, key: str, value: object) -> None:
    ours = ran("fork")
    ours.records[2, 1][part][key] = value
    (line,) = compare(CASE, "fork", ran("torchrun"), ours)
    assert f"{part}" in line
    assert key in line


def test_a_difference_of_the_state_is_found_unless_it_is_meant() -> None:
    ours = ran("fork")
    environ = ours.records[2, 1]["state"]["imports"]["library: environ"]
    environ |= {"MASTER_PORT": "2", "ELASTICRUN_NODE_ID": "a"}
    assert compare(CASE, "fork", ran("torchrun"), ours) == []
    environ["HOME"] = "/root"
    (line,) = compare(CASE, "fork", ran("torchrun"), ours)
    assert "library: environ/HOME" in line
    assert "2/1 imports" in line


def test_what_did_not_run_as_it_should_is_found() -> None:
    ours = ran("fork")
    ours.code = 1
    del ours.records[2, 0]
    ours.records[2, 1]["sharers"] = 0  # executed
    ours.printed["0/0 stderr"] = "UserWarning"
    lines = compare(CASE, "fork", ran("torchrun"), ours)
    assert len(lines) == 4, lines
