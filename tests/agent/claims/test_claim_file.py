"""Claims of a file: threads with views of their own stand for hosts; the folder is their server."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from elasticrun.agent.claims.claim_file import (
    STALE_READS,
    Claim,
    ClaimError,
    ClaimFile,
    ClaimRenewer,
    Renewals,
    SharedFiles,
    new_claim,
)

HOSTS = 12


class Late(SharedFiles):
    """A host whose file system shows what others have done only after `late` looks at a name, as
    attribute and name caches of NFS do; a change of its own to the folder ends that."""

    def __init__(self, late: int) -> None:
        self._late = late
        self._seen: dict[str, tuple[Any, int]] = {}

    def read(self, path: str) -> tuple[bytes, os.stat_result]:
        found, left = self._seen.get(path, (None, 0))
        if left == 0:
            try:
                found = super().read(path)
            except FileNotFoundError as error:
                found = error
            left = self._late + 1
        self._seen[path] = (found, left - 1)
        if isinstance(found, OSError):
            raise found
        return found

    def create(self, path: str, mode: int) -> int:
        self._seen.clear()
        return super().create(path, mode)

    def link(self, path: str, name: str) -> None:
        self._seen.clear()
        super().link(path, name)


def at_once(work: Callable[[int], Any]) -> list[Any]:
    """What `work(n)` returns on every host, begun at one moment."""
    gate, results = threading.Barrier(HOSTS), [None] * HOSTS

    def body(number: int) -> None:
        gate.wait()
        results[number] = work(number)

    threads = [threading.Thread(target=body, args=(n,)) for n in range(HOSTS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def only(folder: Path, name: str = "a") -> None:
    assert [path.name for path in folder.iterdir()] == [name], "nothing is left beside it"


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "a")


@pytest.mark.parametrize("over", [False, True], ids=["claim", "take over"])
@pytest.mark.parametrize("late", [0, 3])
def test_of_all_who_take_it_at_once_one_can_and_all_see_whom(
    path: str, late: int, over: bool, tmp_path: Path
) -> None:
    dead = ClaimFile(path)
    assert not over or dead.take(new_claim({"host": "dead"}))
    files = [ClaimFile(path, files=Late(late)) for _ in range(HOSTS)]
    took = at_once(lambda n: files[n].take(new_claim({"host": n}), dead.mine))
    assert took.count(True) == 1
    winner = files[took.index(True)].mine
    for file in files:
        seen = [file.read() for _ in range(late + 1)][-1]
        assert seen.words["host"] == took.index(True) == winner.words["host"]
    only(tmp_path)
    assert os.stat(path).st_mode & 0o777 == 0o600


def test_who_judges_by_an_old_view_takes_nothing(path: str, tmp_path: Path) -> None:
    """It saw the claim of a host that was succeeded since."""
    dead, next_one = ClaimFile(path), ClaimFile(path)
    assert dead.take(new_claim({}))
    old = dead.mine
    slow = ClaimFile(path, files=Late(100))
    assert slow.read() == old
    assert next_one.take(new_claim({}), old)
    assert not slow.take(new_claim({}), old)
    current = ClaimFile(path).read()
    assert current.holder == next_one.mine.holder
    only(tmp_path)


def test_one_that_died_while_it_took_over_is_succeeded_itself(path: str, tmp_path: Path) -> None:
    """It had linked its claim and not renamed it: all who read the old one read it."""

    class Dies(SharedFiles):
        def rename(self, path: str, name: str) -> None:
            raise OSError(errno.EIO, "died")

    first, dying, third = ClaimFile(path), ClaimFile(path, files=Dies()), ClaimFile(path)
    assert first.take(new_claim({"n": 1}))
    with pytest.raises(ClaimError, match="cannot be taken over"):
        dying.take(new_claim({"n": 2}), first.mine)
    between = third.read()
    assert between.words["n"] == 2
    assert third.take(new_claim({"n": 3}), between)
    found = ClaimFile(path).read()
    assert found.words["n"] == 3
    third.remove()
    assert list(tmp_path.iterdir()) == []


def test_a_link_whose_answer_was_lost_counts(path: str) -> None:
    """NFS asks again, and is told that the name is there: it is ours."""

    class Twice(SharedFiles):
        def link(self, path: str, name: str) -> None:
            super().link(path, name)
            raise FileExistsError(errno.EEXIST, "there is one")

    assert ClaimFile(path, files=Twice()).take(new_claim({}))
    assert not ClaimFile(path).take(new_claim({}))


def test_a_holder_that_was_succeeded_is_told_and_writes_into_nothing(path: str) -> None:
    first, second = ClaimFile(path), ClaimFile(path)
    assert first.take(new_claim({"n": 1}))
    assert first.renew() is None
    seen = second.read()
    assert seen.count == 1
    assert second.take(new_claim({"n": 2}), seen)
    told = first.renew()
    assert told.words["n"] == 2
    first.leave()
    first.remove()
    current = second.read()
    assert not current.left
    assert current.words["n"] == 2


def test_a_claim_that_somebody_removed_is_made_again(path: str) -> None:
    file = ClaimFile(path)
    assert file.take(new_claim({"n": 1}))
    os.unlink(path)
    assert file.renew() is None
    found = ClaimFile(path).read()
    assert (found.holder, found.words["n"]) == (file.mine.holder if file.mine else "", 1)
    file.remove()
    assert not os.path.exists(path)


def test_a_claim_that_was_left_says_so(path: str) -> None:
    file = ClaimFile(path)
    assert file.take(new_claim({}))
    looks, seen = Renewals(), file.read()
    assert seen is not None
    assert not looks.is_stale(seen)
    file.leave()
    assert file.mine is None
    seen = file.read()
    assert seen is not None
    assert looks.is_stale(seen)


def test_only_looks_that_the_file_system_answered_make_a_claim_stale() -> None:
    looks = Renewals()
    claim = Claim("0" * 16, {}, 5)
    for _ in range(100):
        looks.observe(claim, took=60.0)  # it stood still, and so may the holder's
    assert not looks.is_stale(claim)
    for _ in range(STALE_READS - 1):
        looks.observe(claim, took=0.0)
    looks.observe(Claim("0" * 16, {}, 6), took=0.0)  # renewed
    assert looks.same == 0
    later = Claim("0" * 16, {}, 6)
    for _ in range(STALE_READS):
        assert not looks.is_stale(later)
        looks.observe(later, took=0.0)
    assert looks.is_stale(later)


def test_a_keeper_renews_and_tells_whoever_attaches_later(path: str, monkeypatch) -> None:
    monkeypatch.setattr("elasticrun.agent.claims.claim_file.RENEW_EVERY", 0.01)
    first, second = ClaimFile(path), ClaimFile(path)
    assert first.take(new_claim({"n": 1}))
    renewer = ClaimRenewer(first)
    assert second.take(new_claim({"n": 2}), second.read())
    lost, told = threading.Event(), []

    def hear(claim: Claim) -> None:
        told.append(claim)
        lost.set()

    renewer.attach(hear, lambda sentence: None)
    assert lost.wait(60)
    renewer.close()
    assert told[0].words["n"] == 2


@pytest.mark.parametrize(
    ("text", "mode", "sentence"),
    [
        ("{}", 0o600, "is not an elasticrun claim"),
        ("", 0o600, "is not an elasticrun claim"),
        ("x" * 100, 0o600, "is not an elasticrun claim"),
        ('{"holder": "0000000000000000", "words": {}}\nrenewed 000000000000 kept\n', 0o644,
         "can be read or written by others"),
    ],
)  # fmt: skip
def test_files_that_are_not_believed(path: str, text: str, mode: int, sentence: str) -> None:
    Path(path).write_text(text)
    os.chmod(path, mode)
    with pytest.raises(ClaimError, match=sentence):
        ClaimFile(path).read()


def test_a_file_of_another_user_is_not_believed(path: str) -> None:
    """Whoever wrote it could have this node join a job of theirs."""
    if os.geteuid() != 0:
        pytest.skip("only root can give a file away")
    assert ClaimFile(path).take(new_claim({}))
    os.chown(path, 12345, 12345)
    with pytest.raises(ClaimError, match="belongs to another user"):
        ClaimFile(path).read()


def test_a_file_system_without_hard_links_says_so(path: str, tmp_path: Path) -> None:
    class Bucket(SharedFiles):
        def link(self, path: str, name: str) -> None:
            raise OSError(errno.EPERM, "Operation not permitted")

    with pytest.raises(ClaimError, match="does not support hard links"):
        ClaimFile(path, files=Bucket()).take(new_claim({}))
    assert list(tmp_path.iterdir()) == []


def test_the_token_stands_in_no_repr(path: str) -> None:
    assert "s3cret" not in repr(new_claim({"token": "s3cret"}))


def test_a_folder_that_is_not_there_is_not_made(tmp_path: Path) -> None:
    """A machine whose mount is missing would begin a second job in a folder of its own."""
    file = ClaimFile(str(tmp_path / "jobs" / "a"))
    with pytest.raises(ClaimError, match=r"there is no folder .*/jobs here: create or mount it"):
        file.take(new_claim({}))
    assert list(tmp_path.iterdir()) == []
