"""Which step ranks go on from: the newest, what is suspect last, and the one that is asked for;
and how they agree, by each of torch's store servers."""

from __future__ import annotations

import threading
from datetime import timedelta
from pathlib import Path

import pytest
from torch.distributed import TCPStore

from elasticrun.snapshots.storage.folder import MARKER, Folder
from elasticrun.training.checkpointing.restore_choice import (
    RankExchange,
    RankOptions,
    RestoreChoice,
    StepNotAvailable,
)
from elasticrun.wire.types import Skip

ALL, NO_OTHER = (60, 80, 100), ()
SECONDS = timedelta(seconds=20)


def choice(
    folder: Path,
    stored: tuple[int, ...],
    memory: int = -1,
    rewound_from: int = -1,
    suspect: bool = False,
    restore_step: int = -1,
) -> tuple[RestoreChoice, list[str]]:
    place, told = Folder(str(folder)), []
    for step in stored:
        place.make_folder(step)
        place.put(step, MARKER, b"there")
    setting = RankOptions(place, 0, 1, slots=2, keep_last=3, keep_every=0, verify=True)
    skip = Skip(rewound_from, suspect, restore_step)
    return RestoreChoice(setting, RankExchange("x", 1), told.append, memory, skip), told


@pytest.mark.parametrize(
    ("stored", "how", "expected", "again"),
    [
        (ALL, {}, ("storage", 100), False),
        (ALL, {"memory": 90}, ("storage", 100), False),
        (ALL, {"memory": 100}, ("memory", 100), False),
        (ALL, {"memory": 90, "rewound_from": 100}, ("memory", 90), False),
        (ALL, {"rewound_from": 100}, ("storage", 80), False),
        (ALL, {"memory": 100, "rewound_from": 100, "suspect": True}, ("storage", 80), False),
        ((100,), {"rewound_from": 100}, ("storage", 100), True),
        ((100,), {"memory": 90, "rewound_from": 80, "suspect": True}, ("storage", 100), True),
        ((80,), {"memory": 90, "rewound_from": 80, "suspect": True}, ("memory", 90), True),
        (NO_OTHER, {"memory": 90, "rewound_from": 90, "suspect": True}, ("memory", 90), True),
        (NO_OTHER, {"rewound_from": 90}, ("nothing", 0), False),
        (NO_OTHER, {}, ("nothing", 0), False),
        (ALL, {"memory": 110, "restore_step": 80, "rewound_from": 81}, ("storage", 80), False),
        (ALL, {"memory": 110, "restore_step": 110, "rewound_from": 111}, ("memory", 110), False),
    ],
)
def test_what_is_suspect_comes_last_and_never_after_nothing(
    tmp_path: Path,
    stored: tuple[int, ...],
    how: dict[str, int],
    expected: tuple[str, int],
    again: bool,
) -> None:
    chooser, told = choice(tmp_path, stored, **how)
    assert chooser._choose() == expected
    assert any("is tried again, although" in text for text in told) is again


def test_a_step_that_is_not_there_is_refused_in_a_sentence(tmp_path: Path) -> None:
    chooser, _ = choice(tmp_path, ALL, memory=110, restore_step=70)
    Folder(str(tmp_path)).condemn(80, "for this test")
    with pytest.raises(StepNotAvailable) as error:
        chooser._choose()
    assert str(error.value) == (
        "--restore-step=70: step 70 is not complete in memory, and "
        f"{tmp_path} has no valid checkpoint of it (it has: 60, 100)"
    )


@pytest.mark.parametrize("libuv", [True, False])
@pytest.mark.parametrize("objection", ["", "spoiled by 1"])
def test_who_waits_hears_what_the_last_one_says(libuv: bool, objection: str) -> None:
    """Who waits already is woken. The older server runs where the libuv one cannot take a socket
    over, as until torch 2.6."""
    served = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, use_libuv=libuv)
    boards = [RankExchange("life", 2) for _ in range(2)]
    for board in boards:
        board._store = TCPStore("127.0.0.1", served.port, is_master=False, timeout=SECONDS)
    heard: list[str] = []
    waiting = threading.Thread(target=lambda: heard.append(boards[0].wait_for_agreement("whole")))
    waiting.start()
    while not served.check(["life/whole/ranks"]):
        waiting.join(0.01)
    waiting.join(0.2)  # its wait has reached the server
    said = (
        boards[1].abort_agreement("whole", objection)
        if objection
        else boards[1].wait_for_agreement("whole")
    )
    waiting.join(SECONDS.total_seconds())
    assert [said] == heard == [objection]
