"""The network check with real probes: one bad node of 2, 3 and 4, a hung probe, a wrong result, the
test over all nodes; and that nothing of it runs where nobody asked for it. Every number of nodes is
in tests/core/health/test_netcheck.py."""

from __future__ import annotations

import re

import pytest

from tests.counting import times
from tests.further import cases, further
from tests.harness import clean_environment, ran
from tests.health.conftest import CHECK, Health

pytestmark = pytest.mark.slow

PAIR = re.compile("(node0 and node1|node1 and node0) failed together")
HELP = re.compile(f"{PAIR.pattern} .*comm.* a third node would")


@further(
    "test_a_bad_node",
    "health/test_slow_nodes::test_a_straggler_is_swapped_for_a_spare",
)
def test_good_nodes_train_together(health: Health) -> None:
    """Nobody is excluded, one round is formed, and the page says what was measured."""
    job = health.start("4", CHECK)
    world = health.world_of(0, 1, 2, 3)
    status = job.status()
    assert "4 nodes" in status.check
    assert status.excluded == ()
    assert status.round is not None
    assert status.round.number == 1
    for node in status.nodes:
        assert re.search(r"per matmul.*all_reduce of 1 MiB .* with node\d", node.health), node
    health.goes_on(world)
    health.finish(0, 0, 0, 0)


BAD = {
    # name: nodes, the fault of the last one, what its verdict says
    "cannot talk": (3, "probe-fail=comm", r"with node\d.*comm"),
    "cannot talk, of four": (4, "probe-fail=comm", r"with node\d.*comm"),
    "cannot compute, of two": (2, "probe-fail=compute", "compute"),  # its own probe tells
    "cannot compute": (3, "probe-fail=compute", "compute"),
    "computes wrong": (2, "probe-fail=wrong", "wrong result"),  # not what it was the first time
    "hangs in compute": (3, "probe-hang=compute", r"in compute\b.*hung.*15 s"),
    "hangs in comm": (3, "probe-hang=comm", r"in comm\b.*hung.*15 s"),
}


@pytest.mark.parametrize("name", cases(BAD, kept=["cannot talk"]))
def test_a_bad_node(health: Health, name: str) -> None:
    """It is found by its partners or by its own probe, ends with a code of its own and a sentence;
    the others train, and no rank was ever started on it. A probe that hangs is ended by its limit,
    which is long enough for all others on a busy machine."""
    nodes, fault, words = BAD[name]
    bad = nodes - 1
    conf = times(probe_timeout=15) if "hang" in fault else times()
    health.start(f"{bad}:{nodes}", CHECK, conf, fault=f"{fault}@node{bad}")
    why = health.excluded(bad)
    assert re.search(rf"node{bad}\b.*{words}", why), why
    health.world_of(*range(bad))
    listed = health.listed()
    assert (listed.node, listed.kind) == (f"node{bad}", "failed")
    # a node that came late was checked afterwards, and `status` shows the newest check
    health.told(rf"network check of \d nodes .*: node{bad} failed")
    health.finish(*[0] * bad, 75)
    assert health.trained() == set(range(bad))


@further("core/health/test_netcheck")
def test_of_two_nodes_the_pair_is_named_until_a_third_tells(health: Health) -> None:
    """Nothing tells which of two is at fault when both are well alone: neither is excluded, none
    trains, and both say what would help. Then that comes."""
    job = health.start("2:3", CHECK, nodes=2, fault="probe-fail=comm@node1")
    for number in (0, 1):
        job.wait_for_output(number, HELP)
    assert job.status().excluded == ()
    job.add_node()
    why = health.excluded(1)
    assert re.search(r"node1\b.* with node0 .*node2|node1\b.* with node2", why), why
    health.world_of(0, 2)
    health.finish(0, 75, 0)
    assert health.trained() == {0, 2}


@further("core/health/test_netcheck")
def test_two_nodes_that_nobody_joins(health: Health) -> None:
    """They end as any job below min does, with the pair in the reason."""
    job = health.start("2", CHECK, times(join_timeout=60), fault="probe-fail=comm@node1")
    result = job.result()
    assert result.exit_codes == (1, 1), health.said()
    assert PAIR.search(health.said(0)), health.said(0)
    assert health.trained() == set()


@further("core/scripts/netcheck_single_node.txt", "test_a_bad_node")
def test_a_job_of_one_bad_node(health: Health) -> None:
    """It ends with the same code and the same kind of sentence; no rank was started."""
    health.start("1", CHECK, fault="probe-fail=compute@node0")
    assert re.search(r"node0\b.*compute", health.excluded(0))
    assert health.trained() == set()


# ---------------------------------------------------------------- --comm-perf-test


@further("agent/workers/test_probing::test_a_perf_test_measures_links_alone")
def test_the_test_over_all_nodes_prints_a_table(health: Health) -> None:
    """A line a size, algorithm and bus bandwidth; the job goes on."""
    job = health.start("3", CHECK, "--comm-perf-test")
    health.world_of(0, 1, 2)
    for size in (1, 4, 16):
        health.told(rf"\b{size} MiB\b.* GB/s.* GB/s")
    assert "GB/s" in job.status().check
    health.finish(0, 0, 0)


@further("core/health/test_netcheck")
@pytest.mark.parametrize(("wanted", "code"), [("100000", 1), ("0.000001", 0)])
def test_a_bandwidth_that_is_wanted(health: Health, wanted: str, code: int) -> None:
    """What is below ends the job with the figure and what was wanted, before any rank started."""
    job = health.start("2", "--comm-perf-test", f"--comm-perf-threshold={wanted}")
    if not code:
        health.world_of(0, 1)
        health.finish(0, 0)
        return
    assert job.result().exit_codes == (1, 1), health.said()
    assert re.search(r"GB/s.*100000|1e\+05", health.said(0)), health.said(0)
    assert health.trained() == set()


# ---------------------------------------------------------------- what is not asked for


@further("test_a_bad_node")
def test_planted_faults_are_loud(health: Health) -> None:
    """Each agent says that faults are planted, and which of them are its own. Without the flags
    nobody is probed: every probe would fail here, and none does."""
    job = health.start("2", fault="slow=2x@node1,probe-fail=compute@*,probe-fail@node9")
    health.world_of(0, 1)
    for number in (0, 1):
        assert "ELASTICRUN_FAULT" in job.output(number)
    assert "slow=2x" in job.output(1)
    status = job.status()
    assert status.check == ""
    assert status.excluded == ()
    assert {node.health for node in status.nodes} == {""}
    health.finish(0, 0)


def test_a_fault_that_nobody_understands() -> None:
    """One sentence and the code of a wrong command line."""
    planted = {**clean_environment(), "ELASTICRUN_FAULT": "probe-fails@node1"}
    done = ran("--nnodes=1", __file__, env=planted)
    assert done.returncode == 2, done.stderr
    assert "probe-fails" in done.stderr
    assert "Traceback" not in done.stderr
