"""What a test may do to a job on one host, each with a real one."""

from __future__ import annotations

import signal
from typing import Any

import pytest

from elasticrun.host.system.processes import state
from elasticrun.testing import processes
from elasticrun.testing.job import ElasticJob, JobError
from tests.further import further
from tests.harness import SCRIPTS

SUMS = str(SCRIPTS / "sums.py")
LONG = (100_000, 0.02)
"""Arguments of SUMS: more steps than any test waits for."""

Factory = Any

QUICK = "--rdzv-conf=last_call_timeout=2,heartbeat_timeout=8"
"""An agent that stands still with the machine for seconds is not given up."""


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ({"script": "nowhere.py"}, "there is no script 'nowhere.py'"),
        ({"nnodes": "two"}, "nnodes='two': give a number of nodes, or MIN:MAX"),
        ({"nnodes": "2:x"}, "nnodes='2:x': give a number of nodes, or MIN:MAX"),
        ({"nnodes": "4:2"}, "nnodes='4:2': MIN is above MAX"),
        ({"options": "--grow=now"}, "options='--grow=now': give a list of flags"),
        ({"nodes": 0}, "nodes=0: start at least one node, or give master=True"),
    ],
)
def test_bad_use_is_a_sentence(elastic_job: Factory, words: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError) as wrong:
        elastic_job(words.pop("script", SUMS), **words)
    assert str(wrong.value) == sentence


def test_a_job_that_does_not_start_says_why(elastic_job: Factory) -> None:
    with pytest.raises(JobError, match="node0 failed with exit code 2") as wrong:
        elastic_job(SUMS, options=["--no-such-flag"])
    assert "--no-such-flag" in str(wrong.value)


@further(
    "faults/test_in_a_row::test_one_job_of_three_bears_one_harm_after_another",
    "test_a_master_by_hand_a_signal_and_the_end",
)
@pytest.mark.slow
def test_everything_that_can_befall_nodes_on_one_host(elastic_job: Factory) -> None:
    """One job, one thing after another: a rank, a node, the master, a freeze, a return, a newcomer.
    The script is not elasticrun's: it writes the step log by itself."""
    job: ElasticJob = elastic_job(
        SUMS, *LONG, nnodes="2:3", nodes=2, max_restarts=3, options=["--grow=now", QUICK]
    )
    status = job.wait_for(world_size=2)
    assert sorted(node.node for node in status.nodes) == ["node0", "node1"]
    job.wait_for(step=3, world_size=2)
    _misuse(job)

    at = job.kill_rank(1)
    assert job.wait_for(step=1, world_size=2, since=at).time > at
    assert job.wait_for(round=2).restart_count == 1

    at = job.steps()[-1].time
    assert job.add_node().name == "node2"
    job.wait_for(step=1, world_size=3, since=at)

    at = job.kill_node(2)
    assert job.nodes[2].pids() == []
    job.wait_for(step=1, world_size=2, since=at)
    job.restart_node(2)
    job.wait_for(step=1, world_size=3, since=at)
    assert job.status().restart_count == 1, "membership costs no restart"

    newest = max(record.round for record in job.steps())
    job.kill_master()
    job.wait_for(lambda status: len(status.nodes) == 3, world_size=3)
    assert max(record.round for record in job.steps()) == newest, "the ranks do not notice"

    at = job.freeze_node(1)
    job.wait_for(step=1, world_size=2, since=at)
    frozen = job.nodes[1].pids(masters=False)  # the next master may have been started there
    assert {state(pid) for pid in frozen} == {"T"}
    at = job.thaw_node(1)
    job.wait_for(step=1, world_size=3, since=at)

    job.one_world()
    assert "round 1 begins" in job.output(0)
    assert all(node.exit_code is None for node in job.nodes)


def _misuse(job: ElasticJob) -> None:
    for call, sentence in (
        (lambda: job.cut(0), "nodes on one host have no cables: start the job with hosts=True"),
        (lambda: job.kill_node(7), "there is no node 7: 2 were started, from 0"),
        (lambda: job.restart_node(0), "node 0 still runs: kill it before it is started again"),
        (lambda: job.wait_for(step=1, phase="x"), "wait for a step or for a state of the job"),
        (lambda: job.wait_for(world_size=1, since=1.0), "since= needs step="),
        (lambda: job.output("master"), "no master was started by hand: start the job with"),
    ):
        with pytest.raises(ValueError) as wrong:
            call()
        assert sentence in str(wrong.value)
    with pytest.raises(JobError, match="no rank 9 runs; the job is running"):
        job.kill_rank(9)
    with pytest.raises(
        JobError, match=r"did not come within 0\.1 s .*; the last status: JobStatus"
    ):
        job.wait_for(world_size=9, timeout=0.1)
    with pytest.raises(JobError, match=r"a world of 9 ranks all of which completed step 4, but"):
        job.wait_for_world(9, step=4, timeout=0.1)
    with pytest.raises(JobError, match="waited for node1 to print 'no such word', but"):
        job.wait_for_output(1, "no such word", timeout=0.1)


@pytest.mark.slow
def test_a_master_by_hand_a_signal_and_the_end(elastic_job: Factory) -> None:
    """SIGTERM to one agent: its node leaves; the result says who ended how."""
    job: ElasticJob = elastic_job(SUMS, *LONG, nnodes="1:2", nodes=2, master=True)
    job.wait_for(step=2, world_size=2)
    assert "serving job" in job.output("master")
    with pytest.raises(JobError, match=r"waited for the end of node0, node1, but"):
        job.result(timeout=0.1)
    job.kill_agent(1)
    with pytest.raises(JobError, match=r"'hello', but it ended .*; its last words:"):
        job.wait_for_output(1, "hello")
    left = processes.await_end(job.nodes[1].pids(), 60)
    assert not left, "nothing outlives its agent"
    job.wait_for(world_size=1)
    job.signal(0, signal.SIGTERM)
    result = job.result()
    assert result.outcomes[1] == "killed by the test"
    assert result.exit_codes == (1, -9)
    assert not result.ok
    assert job.output(1)


@further(
    "testing/test_hosts::test_a_host_goes_and_comes_back_at_another_address",
    "partitions/test_partitions::test_one_of_three_lost_by_a_cut_cable_and_by_a_kill",
)
def test_a_host_without_power(elastic_job: Any) -> None:
    """Nobody hears a word of its end; when it has power again the node is back on its cable."""
    job = elastic_job(
        *(SCRIPTS / "sums.py", 100_000, 0.02),
        nnodes="1:2",
        nodes=2,
        hosts=True,
        options=["--grow=now", "--rdzv-conf=heartbeat_timeout=2,last_call_timeout=1"],
    )
    job.wait_for(step=1, world_size=2)
    at = job.power_off(1)
    job.wait_for(step=1, world_size=1, since=at)
    at = job.restart_node(1) and at
    job.wait_for(step=1, world_size=2, since=at)


@further("testing/test_hosts::test_a_slow_link")
def test_a_slow_cable(elastic_job: Any) -> None:
    """1 Mbit of every step passes a cable of 8 Mbit/s in 1/8 s at best. The words of its node pass
    beside it: nobody is given up, though a node is after 8 s without."""
    job = elastic_job(
        *(SUMS, 100_000, 0, 1_000_000 // 32),
        nnodes=2,
        hosts=True,
        options=["--rdzv-conf=heartbeat_timeout=8"],
    )
    quick = job.wait_for(step=1, world_size=2).step
    at = job.slow(1, 8)
    last = max(record.step for record in job.steps())
    slow = job.wait_for(step=max(quick, last) + 85, world_size=2)
    # The step that was under way at that moment aside.
    assert slow.time - at > 84 / 8
    assert {record.round for record in job.steps()} == {1}
    assert {node.state for node in job.status().nodes} == {"alive"}
