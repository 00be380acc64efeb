"""Ports, clock and packet size: real ports here, and what follows from a master's answers."""

from __future__ import annotations

import socket
import threading
from pathlib import Path

import pytest
from msgspec.structs import replace

from elasticrun.host.doctor import reach
from elasticrun.host.doctor.reach import Answer
from elasticrun.host.system.network import mtu_to
from elasticrun.wire.messages import Reached
from elasticrun.wire.types import Level

HERE = "127.0.0.1"
ELSEWHERE = "198.51.100.9"
SECOND = 1_000_000
REACHED = Reached(True, "", HERE, mtu_to(HERE), 0, "far")


def answer(
    *, ok: bool = True, reason: str = "", sent: int = 0, took: int = 0, **more: object
) -> Answer:
    reached = replace(REACHED, ok=ok, reason=reason, **more)  # type: ignore[arg-type]
    return Answer(40_000, reached, sent, sent + took)


def test_an_open_port_shows_its_nonce_to_everyone_and_closes() -> None:
    with reach.open_port() as asked:
        name = f"elasticrun-port-{asked.port}"
        (thread,) = [thread for thread in threading.enumerate() if thread.name == name]
        for host in (HERE, "localhost"):
            with socket.create_connection((host, asked.port), timeout=240) as visitor:
                assert visitor.makefile("rb").read() == asked.nonce
    with pytest.raises(OSError):
        socket.create_connection((HERE, asked.port), timeout=240)
    thread.join(240)
    assert not thread.is_alive()


def test_every_port_has_a_nonce_of_its_own() -> None:
    with reach.open_port() as one, reach.open_port() as two:
        assert one.port != two.port
        assert one.nonce != two.nonce


def test_ports_that_were_dialled(tmp_path: Path) -> None:
    folder = tmp_path / "proc/sys/net/ipv4"
    folder.mkdir(parents=True)
    (folder / "ip_local_port_range").write_text("32768\t60999\n")
    (only,) = reach.examine_ports([answer(), answer()], HERE, tmp_path)
    assert only.state is Level.OK
    assert "far has connected to ports 40000 and 40000 (of 32768 to 60999)" in only.seen
    assert reach.examine_ports([], HERE, tmp_path) == []


def test_a_port_that_was_not(tmp_path: Path) -> None:
    reason = "no answer within 2 s"
    (only,) = reach.examine_ports([answer(), answer(ok=False, reason=reason)], HERE, tmp_path)
    assert only.state is Level.FAILED
    assert only.seen.endswith(f"cannot connect to port 40000 of this host at {HERE}: {reason}")
    assert "firewall" in only.todo


@pytest.mark.parametrize("seen_as", [HERE, ELSEWHERE, ""], ids=["door", "nat", "socket"])
def test_behind_a_door_or_nat_nothing_is_claimed(seen_as: str) -> None:
    """A master behind a job's door sees its own loopback, and dials itself."""
    said = answer(ok=False, reason="connection refused", address=seen_as, mtu=1)
    (only,) = reach.examine_ports([said], ELSEWHERE)
    assert only.state is Level.OK
    assert "its ports cannot be checked" in only.seen
    (size,) = reach.examine_mtu(said.reached, ELSEWHERE)
    assert size.state is Level.OK


@pytest.mark.parametrize(
    ("ahead", "took", "state", "said"),
    [
        (0.2, 0.01, Level.OK, "200.0 ms ahead of"),
        (0.00003, 0.01, Level.OK, "0.0 ms ahead of"),
        (1.5, 0.01, Level.WARNING, "1.5 s ahead of"),
        (-86400.0, 0.01, Level.WARNING, "86400.0 s behind"),
        (1.5, 4.0, Level.OK, "1.5 s ahead of"),  # half of those four seconds is doubt
    ],
)
def test_clocks(ahead: float, took: float, state: Level, said: str) -> None:
    sent = 500_000 * SECOND
    clock_us = round(sent + (took / 2 - ahead) * SECOND)
    (only,) = reach.examine_clock([answer(sent=sent, took=round(took * SECOND), clock_us=clock_us)])
    assert only.state is state, only
    assert f"clock is {said} that of the master's host far (to within " in only.seen


def test_the_quickest_answer_tells_the_time() -> None:
    slow = answer(sent=0, took=8 * SECOND, clock_us=0)
    quick = answer(sent=10 * SECOND, took=2, clock_us=10 * SECOND + 1)
    (only,) = reach.examine_clock([slow, quick])
    assert only.state is Level.OK
    assert "is 0.0 ms" in only.seen
    assert reach.examine_clock([]) == []


@pytest.mark.parametrize(("theirs", "state"), [(0, Level.OK), (1, Level.WARNING)])
def test_packet_sizes(theirs: int, state: Level) -> None:
    said = replace(REACHED, mtu=mtu_to(HERE) + theirs)
    (only,) = reach.examine_mtu(said, HERE)
    assert only.state is state
    assert str(mtu_to(HERE)) in only.seen
