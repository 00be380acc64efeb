"""Ranks that agree, by each of torch's store servers: who waits already is woken."""

from __future__ import annotations

import threading
from datetime import timedelta

import pytest
from torch.distributed import TCPStore

from elasticrun.checkpointing.choosing import Board

SECONDS = timedelta(seconds=20)


@pytest.mark.parametrize("libuv", [True, False])
@pytest.mark.parametrize("objection", ["", "spoiled by 1"])
def test_who_waits_hears_what_the_last_one_says(libuv: bool, objection: str) -> None:
    """The older server runs where the libuv one cannot take a socket over, as until torch 2.6."""
    served = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, use_libuv=libuv)
    boards = [Board("life", rank, 2) for rank in range(2)]
    for board in boards:
        board._store = TCPStore("127.0.0.1", served.port, is_master=False, timeout=SECONDS)
    heard: list[str] = []
    waiting = threading.Thread(target=lambda: heard.append(boards[0].agreed("whole")))
    waiting.start()
    while not served.check(["life/whole/ranks"]):
        waiting.join(0.01)
    waiting.join(0.2)  # its wait has reached the server
    said = boards[1].object("whole", objection) if objection else boards[1].agreed("whole")
    waiting.join(SECONDS.total_seconds())
    assert [said] == heard == [objection]
