"""What a node says of its probes, with real fork servers, real stores and real gloo."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest

from elasticrun.agent.boot import Reaper
from elasticrun.agent.workers.probes import Probing
from elasticrun.agent.workers.ranks import probe_environment
from elasticrun.agent.workers.spawner import Child, Spawner
from elasticrun.agent.workers.stores import Stores
from elasticrun.config import EXIT_USAGE
from elasticrun.core.events import AgentEvent, ProbeEnded, StoreReady
from elasticrun.host.system.processes import below
from elasticrun.wire import env
from elasticrun.wire.messages import Probe, Probed, ProbePhase
from elasticrun.wire.spawning import FromSpawner, ProbeSaid
from elasticrun.wire.types import Endpoint
from tests.agent.configs import Waiting, launched, node_context, reaping, spawners
from tests.further import further
from tests.harness import ELASTICRUN, LIMIT, SCRIPTS, Launched, World, warm_server


@pytest.fixture(autouse=True)
def _warm(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fork servers here come from the run's warm process."""
    if request.node.get_closest_marker("slow"):
        for name, value in warm_server().items():
            monkeypatch.setenv(name, value)


class NodeOfProbes(Waiting):
    """As much of an agent as probes need."""

    def __init__(self, reaper: Reaper, fault: str, nproc: int) -> None:
        super().__init__()
        planted = {env.NODE_FAULT: fault} if fault else {}
        self.launch = launched(nproc_per_node=nproc, set_omp_threads=True, accelerator="cpu")
        self.events: list[AgentEvent] = []
        self.said: list[ProbeSaid] = []
        self.lost: list[str] = []
        self.spawners = spawners(self.launch, reaper, self._lost)
        self.context = node_context(self.launch, deliver=self._deliver, variables=planted)
        self.stores = Stores(self.context, self.spawners, 0.0)
        self.probing = Probing(self.context, self.spawners)
        self._hear, self.probing.on_child_message = self.probing.on_child_message, self._heard

    def _deliver(self, event: AgentEvent) -> None:
        self.events.append(event)
        self.changed.set()

    def _heard(self, child: Child, message: FromSpawner) -> None:
        if isinstance(message, ProbeSaid):
            self.said.append(message)
        self._hear(child, message)
        self.changed.set()

    def _lost(self, reason: str) -> None:
        self.probing.call_off()
        self.lost.append(reason)
        self.changed.set()

    async def store(self) -> Endpoint:
        self.stores.prepare()
        ready = await self.until(lambda: [e for e in self.events if isinstance(e, StoreReady)])
        return ready[0].store

    async def result(self, count: int = 1) -> Probed:
        """Of the `count`-th probe; at that moment none of its processes is left."""
        found = await self.until(
            lambda: [e.result for e in self.events if isinstance(e, ProbeEnded)][count - 1 : count]
        )
        assert not self.spawner().children.keys() & {c.key for c in self.probing._children}
        return found[0]

    def overdue(self) -> None:
        """As at the limit of its probe: seconds may not suffice to get so far."""
        self.probing._on_limit(self.probing._current)

    async def enters(self, phase: str, ranks: int = 1) -> None:
        await self.until(lambda: len([m for m in self.said if m.phase == phase]) >= ranks)

    def spawner(self) -> Spawner:
        return self.spawners._current

    async def close(self) -> None:
        self.probing.close()
        await self.spawners.close(LIMIT)
        self.stores.close()


Nodes = list[NodeOfProbes]


@contextlib.asynccontextmanager
async def started(*faults: str, nproc: int) -> AsyncIterator[list[NodeOfProbes]]:
    async with reaping() as reaper:
        nodes = [NodeOfProbes(reaper, fault, nproc) for fault in faults]
        try:
            yield nodes
        finally:
            for node in nodes:
                await node.close()


def on(*faults: str, nproc: int = 1) -> pytest.MarkDecorator:
    """A test of nodes with these faults planted in them ("": none)."""
    context = started(*faults, nproc=nproc)
    return pytest.mark.parametrize("nodes", [context], ids=["-".join(faults)])


def order(store: Endpoint, **changes: Any) -> Probe:
    values: dict[str, Any] = {
        "check": "c1",
        "perf": False,
        "partners": "",
        "group_rank": 0,
        "group_world_size": 1,
        "first_rank": 0,
        "world_size": 1,
        "store": store,
        "limit": LIMIT,
        **changes,
    }
    return Probe(**values)


def pair(nodes: Nodes, store: Endpoint, **changes: Any) -> None:
    """Give both nodes the orders of one group."""
    nproc = nodes[0].launch.nproc_per_node
    for rank, node in enumerate(nodes):
        node.probing.run(
            order(
                store,
                partners=f"n{1 - rank}",
                group_rank=rank,
                group_world_size=2,
                first_rank=rank * nproc,
                world_size=2 * nproc,
                **changes,
            )
        )


@pytest.mark.slow
@on("", "", nproc=2)
async def test_two_nodes_of_two_ranks_measure_the_worst_of_theirs(nodes: Nodes) -> None:
    pair(nodes, await nodes[0].store())
    for node in nodes:
        probed = await node.result()
        assert (probed.ok, probed.phase, probed.reason) == (True, ProbePhase.DONE, "")
        assert probed.check == "c1"
        ends = [said for said in node.said if said.done]
        assert len(ends) == 2
        assert probed.compute == max(said.compute for said in ends)
        assert probed.flops == 2 * 512**3
        (transfer,) = probed.transfers
        assert transfer.size == 1024 * 1024
        assert transfer.seconds == max(said.transfers[0] for said in ends)
        assert 0 < probed.timed == max(said.timed for said in ends) < probed.seconds


@pytest.mark.slow
@on("", "")
async def test_a_perf_test_measures_links_alone(nodes: Nodes) -> None:
    pair(nodes, await nodes[0].store(), perf=True)
    for node in nodes:
        probed = await node.result()
        assert probed.ok, probed.reason
        assert (probed.compute, probed.flops) == (0.0, 0.0)
        assert [transfer.size for transfer in probed.transfers] == [2**20, 2**22, 2**24]


@pytest.mark.slow
@on("", "probe-fail")
async def test_a_failure_is_told_with_its_phase_its_figure_and_its_limit(nodes: Nodes) -> None:
    store = await nodes[0].store()
    pair(nodes, store)
    good, bad = [await node.result() for node in nodes]
    assert (bad.ok, bad.own, bad.excused, bad.phase) == (False, False, False, ProbePhase.COMM)
    assert bad.reason.startswith("after ")
    assert bad.reason.endswith(f"s, limit {LIMIT:g} s: a planted fault")
    assert good.reason.startswith("after ")
    assert (good.own, good.excused, good.phase) == (False, False, ProbePhase.COMM)
    # The same node by itself has nothing to fail with: a new check begins anew.
    nodes[1].probing.run(order(store, check="c2"))
    again = await nodes[1].result(2)
    assert again.ok, again.reason


@further("test_two_nodes_of_two_ranks_measure_the_worst_of_theirs")
@pytest.mark.slow
@on("", "probe-fail=wrong", nproc=2)
async def test_one_bad_local_rank_of_two_makes_it_the_node_s_own_failure(nodes: Nodes) -> None:
    pair(nodes, await nodes[0].store())
    good, bad = [await node.result() for node in nodes]
    assert (bad.own, bad.excused, bad.phase) == (True, False, ProbePhase.COMPUTE)
    assert bad.reason.startswith("local rank ")
    assert "wrong result" in bad.reason
    assert (good.own, good.excused, good.phase) == (False, True, ProbePhase.MEET)
    assert good.reason.startswith("n1 failed by itself: ")
    assert "wrong result" in good.reason


@pytest.mark.slow
@on("", "probe-hang")
async def test_a_hung_probe_is_ended_by_its_limit(nodes: Nodes) -> None:
    pair(nodes, await nodes[0].store())
    for node in nodes:
        await node.enters("comm")
    for node in nodes:
        node.overdue()
    for node in nodes:
        probed = await node.result()
        assert (probed.ok, probed.own, probed.phase) == (False, False, ProbePhase.COMM)
        assert probed.reason == f"hung: no end within its limit of {LIMIT:g} s"


@further("test_a_hung_probe_is_ended_by_its_limit")
@pytest.mark.slow
@on("probe-hang=compute")
async def test_who_hangs_in_its_own_part_has_failed_by_itself(nodes: Nodes) -> None:
    (node,) = nodes
    node.probing.run(order(await node.store()))
    await node.enters("compute")
    node.overdue()
    probed = await node.result()
    assert (probed.ok, probed.own, probed.phase) == (False, True, ProbePhase.COMPUTE)
    assert probed.reason == f"hung: no end within its limit of {LIMIT:g} s"


@further("test_a_lost_spawner_takes_its_probes_along_and_nothing_is_told")
@pytest.mark.slow
@on("probe-hang=compute")
async def test_a_probe_that_is_called_off_is_killed_and_not_told_of(nodes: Nodes) -> None:
    (node,) = nodes
    store = await node.store()
    node.probing.run(order(store))
    await node.enters("compute")
    node.probing.call_off()
    node.probing.call_off()
    await node.until(lambda: not node.probing._children)
    node.probing.run(order(store, check="c2"))  # a newer one takes the place of an older
    await node.enters("compute", 2)
    node.probing.run(order(store, check="c3", limit=3.0))
    probed = await node.result()
    assert probed.check == "c3"
    await node.until(lambda: not node.probing._children)
    ended = [event for event in node.events if isinstance(event, ProbeEnded)]
    assert len(ended) == 1


@pytest.mark.slow
@on("probe-hang=compute")
async def test_a_lost_spawner_takes_its_probes_along_and_nothing_is_told(nodes: Nodes) -> None:
    (node,) = nodes
    store = await node.store()
    node.probing.run(order(store))
    await node.enters("compute")
    server = node.spawner().process.pid
    assert len(below(server)) == 2  # the store and the probe
    os.kill(server, signal.SIGKILL)
    await node.until(lambda: node.lost)
    assert below(server) == set()
    assert not node.probing._children
    assert not [event for event in node.events if isinstance(event, ProbeEnded)]
    fresh = [e for e in node.events if isinstance(e, StoreReady)]
    node.stores.prepare()
    await node.until(
        lambda: len([e for e in node.events if isinstance(e, StoreReady)]) > len(fresh)
    )
    node.probing.run(order(store, check="c2", limit=3.0))
    assert (await node.result()).check == "c2"


def test_a_probe_sees_what_the_rank_in_its_place_sees() -> None:
    launch = launched(set_omp_threads=True, virtual_local_rank=True)
    node = node_context(launch, variables={"X": "1"})
    made = probe_environment(node, 1, {env.CUDA_VISIBLE_DEVICES: "4,5"})
    assert made == {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "5", "X": "1"}


@further("forkserver/test_probe::test_a_device_that_is_not_there_is_the_node_s_own_fault")
@pytest.mark.slow
@on("", nproc=2)
async def test_a_rank_without_a_device_of_its_own_is_a_failure_to_start(
    nodes: Nodes, monkeypatch
) -> None:
    monkeypatch.setenv(env.CUDA_VISIBLE_DEVICES, "4")
    (node,) = nodes
    launch = replace(node.launch, virtual_local_rank=True)
    probing = Probing(replace(node.context, launch=launch), node.spawners)
    probing.run(order(await node.store()))
    probed = await node.result()
    assert (probed.ok, probed.own, probed.phase) == (False, True, ProbePhase.START)
    assert "local rank 1 has no device of its own" in probed.reason


# ---------------------------------------------------------------- whole agents


def probing_agent(world: World, fault: str) -> Launched:
    """An agent of one node whose probe hangs in its own part."""
    return world.launch(
        ELASTICRUN,
        "--nproc-per-node=1",
        "--network-check",
        "--node-id=n0",
        str(SCRIPTS / "puppet.py"),
        env={"LOGLEVEL": "INFO", env.FAULT: fault},
    )


@further("health/test_network_check::test_a_bad_node")
@pytest.mark.slow
def test_faults_are_loud_and_a_killed_agent_leaves_no_probe(world: World) -> None:
    job = probing_agent(world, "probe-hang=compute@n0,slow=2x@n1")
    job.until_text("=probe-hang=compute@n0,slow=2x@n1 is set: faults are injected into this job")
    job.until_text("fault injected in this node (n0): probe-hang=compute")
    job.until_text("this machine is being probed")
    job.process.kill()
    world.nothing_left()


@further("compat/test_signals::test_a_signal_before_the_first_start")
@pytest.mark.slow
def test_a_signal_ends_an_agent_that_probes(world: World) -> None:
    job = probing_agent(world, "probe-hang=compute@*")
    job.until_text("this machine is being probed")
    job.process.terminate()
    assert job.wait() != 0
    world.nothing_left()


def test_faults_that_cannot_be_read_end_the_agent_at_once(world: World) -> None:
    job = probing_agent(world, "probe-fail")
    assert job.wait() == EXIT_USAGE
    job.until_text("ELASTICRUN_FAULT: 'probe-fail' names no node")
