"""Where a job is that has no endpoint: what a node finds in the file. Whether a master answers is
said by the test; `tests/partitions/test_rendezvous_file.py` has real ones."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from elasticrun.agent.boot import SignalInbox
from elasticrun.agent.claims import claim_file
from elasticrun.agent.rendezvous import shared_file
from elasticrun.agent.rendezvous.finding import FoundJob, find_job
from elasticrun.agent.rendezvous.place import MOST_PORTS, HostError, free_port
from elasticrun.agent.rendezvous.registry import Leader, Lease, NoRegistry
from elasticrun.agent.rendezvous.shared_file import SharedFile
from elasticrun.config import Identity, Place
from tests.agent.configs import launched

There = dict[str, bool]


@pytest.fixture(autouse=True)
def there(monkeypatch) -> There:
    """Whether the master answers; and this host is 127.0.0.1, so that no network matters."""
    state = {"answers": True}

    async def answers(registry: SharedFile, claim: claim_file.Claim) -> bool:
        return state["answers"]

    monkeypatch.setattr(SharedFile, "_master_answers", answers)
    monkeypatch.setattr(shared_file, "READ_EVERY", 0.01)
    monkeypatch.setattr(claim_file, "has_died_here", lambda claim: False)
    return state


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "a"


Look = Callable[[Place, Identity], FoundJob]
LAUNCH = launched({"min_nodes": 1, "max_nodes": 4, "join_timeout": 5.0}, local_addr="127.0.0.1")
MINE, OTHER = Identity("mine"), Identity("other")


@pytest.fixture
def look() -> Iterator[Look]:
    """What it finds is let go of at the end."""
    with contextlib.ExitStack() as ends:

        def found(place: Place, identity: Identity) -> FoundJob:
            one = asyncio.run(find_job(LAUNCH, place, identity, SignalInbox([])))
            ends.callback(one.close)
            return one

        yield found


def refusal(found: FoundJob) -> str:
    assert isinstance(found.registry, NoRegistry)
    return found.registry.why_no_leader()


def at(path: Path, **where: object) -> Place:
    return Place("file", port=29400, path=str(path), **where)


def test_the_second_has_the_place_name_and_token_of_the_first(file: Path, look: Look) -> None:
    first = look(at(file), MINE)
    assert isinstance(first.seen, Lease)
    assert (first.identity.job_id, len(first.identity.token)) == ("mine", 64)
    second = look(at(file), OTHER)
    assert isinstance(second.seen, Leader)
    assert (second.identity.job_id, second.identity.token) == ("mine", first.identity.token)
    assert second.place == first.place
    assert first.place.host == "127.0.0.1"
    said = json.loads(file.read_text().splitlines()[0])["words"]
    assert (said["address"], said["port"]) == ("127.0.0.1", first.place.port)


def test_another_name_than_the_running_jobs_is_refused(file: Path, look: Look) -> None:
    look(at(file), MINE)
    refused = refusal(look(at(file), Identity("asked", named=True)))
    assert "is of job mine, which runs at 127.0.0.1:" in refused
    assert "--rdzv-id=asked asks for another" in refused


def test_a_token_of_the_users_stands_in_no_file(file: Path, look: Look) -> None:
    given = Identity("mine", token="the user's own")
    look(at(file), given)
    assert "the user's own" not in file.read_text()
    refused = refusal(look(at(file), MINE))
    assert "has a token that is not in the file: set ELASTICRUN_TOKEN" in refused
    joined = look(at(file), given)
    assert joined.identity.token == "the user's own"


def test_what_nobody_renews_and_nobody_answers_for_is_taken_over_with_name_and_token(
    there: There, file: Path, look: Look
) -> None:
    first = look(at(file), MINE)
    first.registry._renewer.close()
    there["answers"] = False
    second = look(at(file), OTHER)
    assert isinstance(second.seen, Lease)
    assert (second.identity.job_id, second.identity.token) == ("mine", first.identity.token)


@pytest.mark.slow
def test_a_file_that_is_renewed_is_not_taken_over(
    there: There, monkeypatch, file: Path, look: Look
) -> None:
    """A network that has split: the folder is there for both."""
    monkeypatch.setattr(claim_file, "RENEW_EVERY", 0.005)
    # ten checks without a renewal take 2 s, in which a busy machine renews, and fit in the limit
    monkeypatch.setattr(shared_file, "READ_EVERY", 0.2)
    look(at(file), MINE)
    there["answers"] = False
    refused = look(at(file), MINE).registry
    with pytest.raises(HostError, match=r"which does not answer this node.*, for 5 s"):
        asyncio.run(refused.read(served=False))


def test_a_file_that_nobody_named_is_done_without(monkeypatch, file: Path, look: Look) -> None:
    def no_links(self: claim_file.SharedFiles, path: str, name: str) -> None:
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(claim_file.SharedFiles, "link", no_links)
    begun = look(at(file, found="this folder is on FUSE"), MINE)
    assert begun.place.kind == "open"
    assert begun.registry is None
    assert "does not support hard links" in refusal(look(at(file), MINE))


@pytest.mark.slow
def test_a_death_signal_ends_the_search_and_is_heard_again(tmp_path: Path) -> None:
    inbox = SignalInbox(["SIGTERM"])
    inbox.install()
    try:

        async def run() -> FoundJob:
            place = at(tmp_path / "a", is_host=False)
            searching = asyncio.create_task(find_job(LAUNCH, place, MINE, inbox))
            os.kill(os.getpid(), 15)
            return await searching

        assert refusal(asyncio.run(run())) == ""
        heard: list[tuple[int, bool]] = []
        inbox.attach(lambda number, death: heard.append((number, death)), lambda: None)
        assert heard == [(15, True)]
    finally:
        inbox.restore()


def test_the_first_free_port() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert port < free_port("127.0.0.1", port) < port + MOST_PORTS
