"""What restarts cost, how long they wait, and whom they are charged to."""

from __future__ import annotations

import re
import signal
from itertools import pairwise

import pytest

from tests.counting import Counting, let_pass
from tests.further import further

pytestmark = pytest.mark.slow

NO_BACKOFF = "--restart-backoff=0"

LATER = {"COUNTS_FAILS_LATER": "1"}
"""Where it matters that all nodes are there before the first rank fails: `let_fail` begins it."""


@further("core/rounds/test_failures", "compat/test_defects::test_restarts_again_and_again")
def test_a_rank_that_dies_at_once_again_and_again(counting: Counting) -> None:
    """The first restart is immediate; then it waits 1, 2 and 4 s. The budget is the job's: four
    restarts in all, whichever of the two nodes the failing rank is on."""
    job = counting.start("2", max_restarts=4, env={"COUNTS_FAILING_RANKS": "0"})
    assert job.result().exit_codes == (1, 1)
    worlds = job.worlds()
    assert [world.restarts for world in worlds] == [0, 1, 2, 3, 4]
    waits = [after.began - before.ended for before, after in pairwise(worlds)]
    assert waits[1] >= 1.0
    assert waits[2] >= 2.0
    assert waits[3] >= 4.0
    # a node that is ready only after such a wait is not told of it: of all three on a machine that
    # does nothing else, of one at least on any
    told = set(re.findall(r"the next restart waits (\d+) s", job.output(1)))
    assert told, job.output(1)
    assert told <= {"1", "2", "4"}
    assert "the next restart waits 8 s" not in counting.said()


@further("core/rounds/test_failures")
def test_a_budget_that_is_a_rate(counting: Counting) -> None:
    """`--restart-window=15 --max-restarts=1`: two failures, the second more than 15 s after the
    first, are borne; two within 15 s, in which a restart fits on any machine, end the job."""
    job = counting.start("1", "--restart-window=15", NO_BACKOFF, max_restarts=1)
    counting.first(1)
    for count in range(1, 3):
        if count > 1:
            let_pass(15.2)  # longer than the window
        world = job.wait_for_world(1, since=job.kill_rank(0, signal.SIGSEGV))
        assert world.restarts == count
    job.kill_rank(0, signal.SIGSEGV)
    assert job.result().exit_codes == (1,)
    assert len(counting.check()) == 3


@further("core/scripts/poison_node_is_left_out.txt", "core/rounds/test_failures")
def test_a_node_whose_ranks_keep_dying_is_left_out(counting: Counting) -> None:
    """The same script works on the others: so it is the node, and the job goes on without it and
    says so."""
    job = counting.start("2:3", NO_BACKOFF, "--grow=now", nodes=1, max_restarts=10)
    job.add_node(env={"COUNTS_FAILS": "1", **LATER})
    job.add_node()
    counting.first(3)
    counting.let_fail()
    status = job.wait_for(
        lambda s: any("in backoff" in node.reason for node in s.nodes), world_size=2
    )
    (out,) = (node for node in status.nodes if "in backoff" in node.reason)
    assert out.node == "node1"
    without = job.wait_for_world(2, step=job.steps()[-1].step + 5)
    assert set(without.nodes.values()) == {0, 2}
    assert without.restarts <= 4
    job.wait_for_output(1, "in backoff: its ranks were the first to fail")
    job.wait_for_output(0, "node node1 is in backoff for")
    counting.finish()


@further("core/rounds/test_attribution", "sim/test_chaos")
@pytest.mark.parametrize(("ranks", "restarts"), [("0,1,2", 4), ("0", 6)], ids=["all", "rank 0"])
def test_a_script_that_keeps_dying_excludes_nobody(
    counting: Counting, ranks: str, restarts: int
) -> None:
    """It fails on every node in turn; or rank 0 does, on the first node, which is left out, and on
    the next one that gets that rank. So it is the script: the job ends when the budget is spent,
    and no further node is blamed."""
    job = counting.start(
        *("2:3", NO_BACKOFF, "--grow=now"),
        nodes=3,
        together=True,
        max_restarts=restarts,
        env={"COUNTS_FAILING_RANKS": ranks, **LATER},
    )
    counting.first(3)
    counting.let_fail()
    assert set(job.result().exit_codes) == {1}
    worlds = job.worlds()
    assert worlds[-1].restarts == restarts
    if ranks == "0":
        # a world that ends for the node that is let in again may have been without a word of rank 0
        assert len({world.nodes[0] for world in worlds if 0 in world.nodes}) <= 2
        assert counting.said().count("is in backoff for") <= 1, "what its master says once for each"
    else:
        assert worlds[-1].world_size == 3
        assert "in backoff" not in counting.said()
