"""Probes with the real fork server and real gloo: what they measure, and every way to fail."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest

from elasticrun.config import PROBE_LOAD_CPU
from elasticrun.forkserver.helpers import probe
from elasticrun.wire import spawning as sp
from elasticrun.wire.messages import ProbePhase
from tests.forkserver.driver import LIMIT, Driver, alive, gone, started
from tests.forkserver.test_server import held_port
from tests.further import further

pytestmark = pytest.mark.slow


def a_plan(check: str, store_port: int) -> sp.ProbePlan:
    """Of the first of two probes."""
    return sp.ProbePlan(
        check=check,
        rank=0,
        world_size=2,
        store_host="127.0.0.1",
        store_port=store_port,
        device="cpu",
        device_index=0,
        backend="gloo",
        matrix=PROBE_LOAD_CPU.matrix,
        dtype=PROBE_LOAD_CPU.dtype,
        matmuls=4,
        sizes=(64 * 1024,),
        transfers=3,
        warmup=1,
        limit=LIMIT,
    )


class Group:
    """A store, and probes that meet at it; each test is a check of its own."""

    def __init__(self, driver: Driver, port: int, check: str) -> None:
        self.driver, self.plan = driver, a_plan(check, port)

    def start(self, rank: int, fault: str = "", **changes: Any) -> int:
        env = changes.pop("env", {})
        plan = replace(self.plan, rank=rank, fault=fault, **changes)
        key = self.driver.new_key()
        self.driver.tell(sp.SpawnProbe(key, plan, env, ()))
        return key

    def pair(self, *faults: str, **changes: Any) -> list[int]:
        return [self.start(rank, fault, **changes) for rank, fault in enumerate(faults)]

    def result(self, key: int) -> sp.ProbeSaid:
        return self.driver.wait(sp.ProbeSaid, lambda said: said.key == key and said.done)

    def results(self, keys: list[int]) -> list[sp.ProbeSaid]:
        """Every result; each process has been reaped."""
        found = [self.result(key) for key in keys]
        for key in keys:
            self.driver.exited(key)
        return found

    def enters(self, key: int, phase: str) -> None:
        self.driver.wait(
            sp.ProbeSaid, lambda said: said.key == key and said.phase == phase and not said.done
        )

    def phases(self, key: int) -> list[str]:
        said = [m for m in self.driver.all_of(sp.ProbeSaid) if m.key == key]
        assert [m.done for m in said] == [False] * (len(said) - 1) + [True]
        return [m.phase for m in said]


@contextmanager
def store(driver: Driver) -> Iterator[int]:
    holder, port = held_port()
    with holder:
        key = driver.new_key()
        driver.tell(sp.SpawnStore(key, port))
        driver.wait(sp.StoreListening, lambda said: said.key == key)
        yield port
        driver.tell(sp.CloseStore(key))
        driver.exited(key)


@pytest.fixture
def group(server: Driver, request) -> Iterator[Group]:
    with store(server) as port:
        yield Group(server, port, request.node.name)


def test_the_phases_are_those_of_the_master() -> None:
    words = (probe.START, probe.COMPUTE, probe.MEET, probe.COMM, probe.DONE)
    assert words == tuple(ProbePhase)


# ---------------------------------------------------------------- what is measured


@pytest.mark.parametrize("world", [2, 3])
def test_probes_meet_and_measure(group: Group, world: int) -> None:
    keys = group.pair(*[""] * world, world_size=world, sizes=(64 * 1024, 1024 * 1024))
    for key, said in zip(keys, group.results(keys), strict=True):
        assert said.ok, said.reason
        assert (said.own, said.excused, said.reason) == (False, False, "")
        assert group.phases(key) == ["compute", "meet", "comm", "done"]
        assert 0 < said.compute < LIMIT
        assert len(said.transfers) == 2
        assert min(said.transfers) > 0
        counted = 4 * said.compute + 3 * sum(said.transfers)
        assert said.timed == pytest.approx(counted)


def test_a_world_of_one_has_no_links(group: Group) -> None:
    (said,) = group.results([group.start(0, world_size=1, store_port=1)])
    assert said.ok, said.reason
    assert said.transfers == ()
    assert said.timed == pytest.approx(4 * said.compute)


def test_without_a_matrix_there_are_only_links(group: Group) -> None:
    for said in group.results(group.pair("", "", matrix=0)):
        assert said.ok, said.reason
        assert said.compute == 0.0
        assert said.transfers[0] > 0


def test_a_slow_node_really_takes_its_time(group: Group) -> None:
    plain, slow = group.results(group.pair("", "slow=20x", matrix=256, matmuls=10))
    assert plain.ok
    assert slow.ok
    # What a plain one takes is the machine's affair, which may pause in the middle of it.
    assert slow.compute >= 19 * probe.SLOW_PIECE
    assert slow.transfers[0] >= 19 * probe.SLOW_PIECE


# ---------------------------------------------------------------- failing


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("probe-fail=compute", "a planted fault"),
        ("probe-fail=wrong", "the matmul computed a wrong result: it differs from the first one"),
    ],
)
def test_who_fails_alone_excuses_the_other(group: Group, fault: str, reason: str) -> None:
    good, bad = group.results(group.pair("", fault))
    assert (bad.ok, bad.own, bad.excused, bad.phase) == (False, True, False, "compute")
    assert bad.reason.startswith(reason)
    assert (good.ok, good.own, good.excused, good.phase) == (False, False, True, "meet")
    assert good.reason == f"failed by itself: {bad.reason}"
    assert good.compute > 0


@pytest.mark.parametrize("limit", [1.0, LIMIT])
def test_who_fails_alone_says_so_without_a_store_too(group: Group, limit: float) -> None:
    """That does not use up the limit: who waits for it would take it for one that hangs."""
    holder, nobody = held_port()
    began = time.monotonic()
    with holder:
        key = group.start(0, "probe-fail=compute", store_port=nobody, limit=limit)
        (bad,) = group.results([key])
    assert (bad.own, bad.reason) == (True, "a planted fault")
    assert time.monotonic() - began < LIMIT / 2


def test_a_failure_among_them_is_no_one_s_own(group: Group) -> None:
    good, bad = group.results(group.pair("", "probe-fail"))
    for said in (good, bad):
        assert (said.ok, said.own, said.excused, said.phase) == (False, False, False, "comm")
    assert bad.reason == "a planted fault"
    assert good.reason  # gloo's own words
    assert "\n" not in good.reason
    assert ".cc:" not in good.reason


@pytest.mark.parametrize("served", [True, False])
def test_who_meets_no_partner_or_no_store_fails_to_meet(group: Group, served: bool) -> None:
    holder, nobody = held_port()
    with holder:
        port = group.plan.store_port if served else nobody
        (said,) = group.results([group.start(0, store_port=port, limit=1.0)])
    assert (said.ok, said.own, said.excused, said.phase) == (False, False, False, "meet")
    assert "\n" not in said.reason
    assert 0 < len(said.reason) <= probe.MAX_REASON


def test_a_device_that_is_not_there_is_the_node_s_own_fault(group: Group) -> None:
    hidden = {"CUDA_VISIBLE_DEVICES": ""}
    (said,) = group.results([group.start(0, world_size=1, device="cuda", env=hidden)])
    assert (said.ok, said.own, said.phase) == (False, True, "compute")
    assert said.reason == "torch finds no cuda device"


@pytest.mark.parametrize("phase", ["compute", "meet", "comm"])
def test_a_hung_probe_stays_where_it_is_until_it_is_killed(group: Group, phase: str) -> None:
    keys = group.pair("", f"probe-hang={phase}")
    group.enters(keys[1], phase)
    for key in keys:
        group.driver.tell(sp.SendSignal(key, signal.SIGKILL))
    said = group.results(keys)[1]
    assert (said.ok, said.phase) == (False, phase)
    assert said.own == (phase == "compute")
    assert said.reason == "it was killed by SIGKILL"


# ---------------------------------------------------------------- living and dying


def test_a_probe_has_the_variables_of_its_order(group: Group) -> None:
    key = group.start(0, "probe-hang=compute", env={"PROBE_TEST": "there"})
    group.enters(key, "compute")
    pid = group.driver.spawned(key).pid
    with open(f"/proc/{pid}/comm") as comm:
        assert comm.read().strip() == "elasticrun-prob"
    assert os.getsid(pid) == pid
    group.driver.tell(sp.SendSignal(key, signal.SIGKILL))
    group.driver.exited(key)


def test_a_probe_ignores_what_is_sent_to_everybody(group: Group) -> None:
    key = group.start(0, "probe-hang=compute")
    group.enters(key, "compute")
    pid = group.driver.spawned(key).pid
    for signum in sp.SHIELDED:
        os.kill(pid, signum)
    other = group.start(0, world_size=1)  # the server has gone on meanwhile, and so has time
    group.results([other])
    assert alive(pid)
    group.driver.tell(sp.SendSignal(key, signal.SIGKILL))
    assert group.driver.exited(key).code == -signal.SIGKILL


def test_a_probe_that_crashes_has_a_result(group: Group) -> None:
    key = group.start(0, "probe-hang=compute")
    group.enters(key, "compute")
    os.kill(group.driver.spawned(key).pid, signal.SIGSEGV)
    (said,) = group.results([key])
    assert (said.ok, said.own, said.reason) == (False, True, "it was killed by SIGSEGV")


@further("test_an_executed_probe_that_cannot_import_torch_says_what_it_printed")
def test_where_forks_are_not_trusted_probes_are_executed() -> None:
    with started(launch="exec") as driver, store(driver) as port:
        group = Group(driver, port, "executed")
        keys = group.pair("", "")
        assert not any(driver.spawned(key).forked for key in keys)
        for said in group.results(keys):
            assert said.ok, said.reason
            assert said.transfers[0] > 0
        good, bad = group.results(group.pair("", "probe-fail=compute", check="again"))
        assert (good.excused, bad.own) == (True, True)


@pytest.mark.parametrize("launch", ["auto", "exec"])
def test_probes_do_not_outlive_a_killed_fork_server(launch: str) -> None:
    holder, port = held_port()
    with holder, started(launch=launch) as driver:
        group = Group(driver, port, "orphans")
        keys = group.pair("probe-hang=compute", "probe-hang=compute")
        for key in keys:
            group.enters(key, "compute")
        pids = [driver.spawned(key).pid for key in keys]
        driver.process.kill()
        assert gone(pids) == []
        with pytest.raises(EOFError):
            driver.wait(sp.Exited)


def test_probes_end_when_nothing_is_heard_of_the_agent() -> None:
    with started() as driver, store(driver) as port:
        group = Group(driver, port, "petted")
        key = group.start(0, "probe-hang=compute", world_size=1)
        group.enters(key, "compute")
        driver.tell(sp.Keepalive(0.1))
        assert driver.exited(key).code == -signal.SIGKILL


def test_an_executed_probe_that_cannot_import_torch_says_what_it_printed() -> None:
    broken = {"PYTHONPATH": "", "PYTHONHOME": "/nowhere"}
    with started(launch="exec") as driver, store(driver) as port:
        group = Group(driver, port, "broken")
        (said,) = group.results([group.start(0, env=broken)])
    assert (said.ok, said.own, said.phase) == (False, True, "start")
    assert said.reason.startswith("it exited with code 1: ")
    assert len(said.reason) <= probe.MAX_REASON
