"""Whose a folder of checkpoints is: claims of several nodes, in one process."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from elasticrun.agent.claims import claim_file, folder_claim
from elasticrun.agent.claims.folder_claim import NAME, FolderClaim, NotOurs


@pytest.fixture(autouse=True)
def quick(monkeypatch) -> None:
    """A look takes what it takes; only the waits between looks and renewals are short."""
    monkeypatch.setattr(claim_file, "RENEW_EVERY", 0.02)
    # ten looks take 3 s, in which a holder renews its claim on a busy machine
    monkeypatch.setattr(folder_claim, "READ_EVERY", 0.3)
    # the others are elsewhere
    monkeypatch.setattr(claim_file, "has_died_here", lambda claim: False)


def claim(job: str = "one", term: Callable[[], int] = lambda: 1) -> FolderClaim:
    return FolderClaim(job, term)


def test_another_job_is_refused_and_told_by_whom_until_the_first_has_ended(tmp_path: Path) -> None:
    folder = str(tmp_path / "ckpt")

    async def run() -> None:
        one, two = claim("one"), claim("two")
        await one.verify(folder)
        with pytest.raises(NotOurs) as refused:
            await two.verify(folder)
        assert str(refused.value) == (
            f"{folder} is claimed by job one on {os.uname().nodename}, which renews its claim: end "
            "that job, or use another folder"
        )
        await one.verify(folder)
        await one.close()
        assert os.listdir(folder) == [], "left clean"
        await two.verify(folder)
        await two.close()

    asyncio.run(run())


async def test_the_claim_of_a_killed_job_is_taken_by_one_of_another_name(tmp_path: Path) -> None:
    killed, resumed = claim("killed"), claim("resumed")
    await killed.verify(str(tmp_path))
    killed._renewer.close()
    await resumed.verify(str(tmp_path))
    await resumed.close()


async def test_the_same_run_is_not_locked_out(tmp_path: Path) -> None:
    """By another node, by a new master, and by the same node after both."""
    term = 1
    one, two = claim(term=lambda: term), claim(term=lambda: term)
    for one_term in (1, 2):
        one.follow(one_term, has_rank_0=True)
        two.follow(one_term, has_rank_0=True)
    for node in (one, two, one):
        await node.verify(str(tmp_path))
    term = 2
    for node in (two, one):
        await node.verify(str(tmp_path))
    await two.close()
    assert os.listdir(tmp_path) == [NAME], "the other one's"
    await one.close()
    assert os.listdir(tmp_path) == []


async def test_a_second_start_does_not_take_what_the_first_one_uses(tmp_path: Path) -> None:
    """Two commands with one --rdzv-id; once the first one has ended, the second one writes."""
    first, second = claim(term=lambda: 1), claim(term=lambda: 2)
    await first.verify(str(tmp_path))
    with pytest.raises(NotOurs, match=r"by another start of job one on .*: end one of the two, or"):
        await second.verify(str(tmp_path))
    await first.verify(str(tmp_path))
    await first.close()
    await second.verify(str(tmp_path))
    await second.close()


async def test_a_new_node_that_gets_rank_0_takes_the_claim(tmp_path: Path) -> None:
    """It knows no earlier term, so the node that had rank 0 gives its claim back."""
    term = 1
    old, new = claim(term=lambda: term), claim(term=lambda: term)
    old.follow(1, has_rank_0=True)
    old.start(str(tmp_path))
    await old.verify(str(tmp_path))
    term = 2
    new.follow(2, has_rank_0=True)
    old.follow(2, has_rank_0=False)
    await new.verify(str(tmp_path))
    await new.close()
    await old.close()
    assert os.listdir(tmp_path) == []


async def test_a_node_that_gets_rank_0_back_at_once_keeps_its_claim(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file of the claim that it gave back is removed late."""
    one, taken = claim(), threading.Event()
    take, remove = claim_file.ClaimFile.take, claim_file.ClaimFile.remove

    def take_and_tell(file: claim_file.ClaimFile, *words: Any) -> bool:
        done = take(file, *words)
        taken.set()
        return done

    def remove_late(file: claim_file.ClaimFile) -> None:
        taken.wait(1.0)  # in vain if the next check waits
        remove(file)

    await one.verify(str(tmp_path))
    monkeypatch.setattr(claim_file.ClaimFile, "take", take_and_tell)
    monkeypatch.setattr(claim_file.ClaimFile, "remove", remove_late)
    one.follow(1, has_rank_0=False)
    one.follow(1, has_rank_0=True)
    await one.verify(str(tmp_path))
    assert os.listdir(tmp_path) == [NAME]
    await one.close()
    assert os.listdir(tmp_path) == []


async def test_after_a_split_the_half_of_the_older_master_writes_nothing(tmp_path: Path) -> None:
    """The order of masters is that in which they took the folder; no clock is asked, so the terms,
    which are of clocks, may be in any order."""
    terms = {"left": 7, "right": 3}
    left = claim(term=lambda: terms["left"])
    right = claim(term=lambda: terms["right"])
    for half in (left, right):
        half.follow(7, has_rank_0=half is left)
    await left.verify(str(tmp_path))
    await right.verify(str(tmp_path))
    for _ in range(2):
        with pytest.raises(NotOurs, match="another master of this job"):
            await left.verify(str(tmp_path))
    await right.verify(str(tmp_path))
    terms["left"] = 3  # it has found the other master
    await left.verify(str(tmp_path))
    await right.close()
    await left.close()


async def test_what_is_in_the_way_is_said_before_a_checkpoint(tmp_path: Path, monkeypatch) -> None:
    said: asyncio.Queue[str] = asyncio.Queue()
    monkeypatch.setattr(
        folder_claim.logger, "log", lambda _, form, *args: said.put_nowait(form % args)
    )
    one, two = claim("one"), claim("two")
    await one.verify(str(tmp_path))
    two.start(str(tmp_path))
    sentence = await said.get()
    assert "no checkpoint is written" in sentence
    assert "claimed by job one" in sentence
    await one.close()
    assert two._watch is not None
    await two._watch
    await two.close()


@pytest.mark.parametrize("url", ["s3://bucket/a", "memory://a"])
def test_what_is_no_folder_is_claimed_by_nobody(url: str) -> None:
    asyncio.run(claim().verify(url))


def test_a_folder_that_cannot_be_claimed_is_written_to(tmp_path: Path, monkeypatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(folder_claim.logger, "log", lambda _, form, *args: said.append(form % args))
    (tmp_path / NAME).write_text("somebody's")
    asyncio.run(claim().verify(str(tmp_path)))
    (one,) = said
    assert one.startswith("checkpoints are written without a claim of their folder: ")


def test_a_folder_that_cannot_be_written_to_is_told_once_and_with_what_follows(
    tmp_path: Path, monkeypatch
) -> None:
    said: list[tuple[int, str]] = []
    monkeypatch.setattr(
        folder_claim.logger, "log", lambda at, form, *args: said.append((at, form % args))
    )
    (tmp_path / "file").touch()
    told = {
        str(tmp_path / "file"): "{} cannot be created: File exists",
        str(tmp_path / "file/ckpt"): "{} cannot be created: Not a directory",
        "/proc/nope": "{} cannot be created: No such file or directory",
        str(tmp_path): "{} cannot be written to: Read-only file system",
    }
    create = claim_file.SharedFiles.create

    def refused(files: claim_file.SharedFiles, path: str, mode: int) -> int:
        if Path(path).parent == tmp_path:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))
        return create(files, path, mode)

    monkeypatch.setattr(claim_file.SharedFiles, "create", refused)

    async def looks(folder: str) -> None:
        mine = claim()
        mine.start(folder)
        await mine.verify(folder)
        await mine.verify(folder)
        await mine.close()

    for folder, why in told.items():
        said.clear()
        asyncio.run(looks(folder))
        ((level, sentence),) = said
        assert level == logging.WARNING
        assert sentence.startswith(f"no checkpoint can be written: {why.format(folder)}")
        assert sentence.endswith("; use a folder that this node can write to")
