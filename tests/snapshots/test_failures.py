"""What is lost when: the rows of the table in docs/snapshots.md, with real jobs."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest

from elasticrun.training.checkpointing.checkpointer import PERSIST_LIMIT
from tests.further import cases, further
from tests.snapshots.conftest import (
    NOTICED,
    STEPS,
    Training,
    ends,
    fork_server,
    told,
    watermark,
)

pytestmark = pytest.mark.slow

MEMORY = r"resume from step 7 in memory"


DEATHS = {
    # what it is: (--die of train.py, the steps that rank 1 went on from, what else)
    "one is killed": (("1:7:kill",), (0, 7), {}),
    "one raises": (("1:7:raise",), (0, 7), {"mode": "fsdp2"}),
    "both at once": (("0:7:kill", "1:7:kill"), (0, 7), {"mode": "fsdp2"}),
    # what was restored and went on is no poison
    "twice after progress": (("1:4:kill", "0:8:kill"), (0, 4, 8), {"max_restarts": 2}),
    # the others' collective ends it, as torch's watchdog would
    "one hangs": (("1:7:stop",), (0, 7), {"silence": NOTICED, "options": ["--restart-grace=1"]}),
}


@further(
    "test_saved_at_the_breakpoint",
    "snapshots/test_random_kills::test_killed_at_random_moments",
    "core/scripts/snapshots_suspect_after_two_failures.txt",
)
@pytest.mark.parametrize("name", DEATHS)
def test_ranks_die(training: Training, name: str) -> None:
    """Between two snapshots: nothing is lost, and the end is the same to the bit."""
    dies, starts, more = DEATHS[name]
    args = [word for one in dies for word in ("--die", one)]
    if name == "one hangs":  # longer than a rank that does not hang may stand still
        args += ["--timeout", "40"]
    training.start(*args, **{"max_restarts": 1, **more})
    training.ends_as_if_undisturbed(*starts)
    if name in ("one is killed", "one raises"):
        assert training.said(MEMORY)


@further(
    "snapshots/test_random_kills::test_killed_at_random_moments",
    "agent/test_deaths::test_kill_9_of_the_fork_server_restarts_the_job",
)
def test_the_fork_server_dies(training: Training) -> None:
    """With ranks and saver; the snapshots are the agent's."""
    job = training.start(mode="fsdp2", gated=True, max_restarts=1)
    training.comes_to(7)
    fork_server(job).kill()
    training.go_on()
    training.ends_as_if_undisturbed(0, 7, ranks=[0])


@further(
    "agent/snapshots/test_segments::test_the_next_agent_of_the_node_adopts_what_a_killed_one_had",
    "sim/test_restore::test_killed_at_every_moment",
    "agent/snapshots/test_taken_over",
)
def test_the_master_dies_and_then_a_rank(training: Training) -> None:
    """The next master is told anew what the nodes hold."""
    job = training.start(gated=True, max_restarts=1, nodes=2, nproc=1, nnodes="2")
    training.comes_to(5)
    job.kill_master()
    training.comes_to(7)
    job.wait_for(lambda status: all(node.pids for node in status.nodes) and len(status.nodes) == 2)
    job.kill_rank(1)
    training.go_on()
    training.ends_as_if_undisturbed(0, 7, ranks=[0])


@further(
    "agent/snapshots/test_segments::test_the_next_agent_of_the_node_adopts_what_a_killed_one_had",
    "sim/test_restore::test_killed_at_every_moment",
)
def test_no_master_answers_for_three_snapshots(training: Training) -> None:
    """Nobody says what is whole, so the newest step that is known to be is kept, and the one above
    it: there is no slot for others. A rank dies; the ranks go on from what there is."""
    args = ("--busy", "skip", "--print-at", "5")
    job = training.start(*args, gated=True, max_restarts=1, nodes=2, nproc=1, nnodes="2")
    training.comes_to(2)
    training.until(lambda: [watermark(p) for p in training.segments()] == [2, 2], "step 2, whole")
    victim = job.rank_pid(1)
    job.freeze_master()
    training.open_gate(5)

    def skipped() -> list[int]:
        last = [told(training.out, rank)[-1] for rank in (0, 1)]
        return [line["skipped"] for line in last if "at" in line]

    training.until(lambda: skipped() == [2, 2], "step 5 without two snapshots")
    os.kill(victim, signal.SIGKILL)
    job.thaw_master()
    training.go_on()
    training.ends_as_if_undisturbed(0, 3)


@further(
    "agent/snapshots/test_segments::test_the_next_agent_of_the_node_adopts_what_a_killed_one_had",
    "core/scripts/agent_killed_and_back.txt",
)
def test_an_agent_dies_and_comes_back(training: Training) -> None:
    """Its segments are adopted by the next agent of the node: even what is sharded is there."""
    # without a restart to spend, a job that is below its least number of nodes ends at once
    job = training.start(mode="fsdp2", gated=True, max_restarts=1, nodes=2, nproc=1, nnodes="2")
    world = training.comes_to(7)
    victim = world.nodes[1]
    job.kill_agent(victim)
    job.restart_node(victim)
    training.go_on()
    training.ends_as_if_undisturbed(0, 7, ranks=[1])


@further(
    "snapshots/test_random_kills::test_killed_at_random_moments",
    "agent/snapshots/test_segments::test_the_next_agent_of_the_node_adopts_what_a_killed_one_had",
)
def test_all_processes_of_the_only_node_are_killed(training: Training) -> None:
    """With the master, whose record goes too: the next one is told by the agent what was there."""
    job = training.start(mode="fsdp2", gated=True, options=["--save-at-breakpoint"])
    training.comes_to(7)
    job.nodes[0].kill(masters=True)
    training.open_gate()
    job.restart_node(0)
    training.ends_as_if_undisturbed(0, 7)
    assert training.said(f"{MEMORY}, left by earlier agents")
    assert training.checkpoints() == [7]


@further("snapshots/test_replicas::test_a_spare_takes_over_what_the_lost_node_had")
def test_a_node_is_lost_and_all_have_the_same_state(training: Training) -> None:
    """DDP: the others go on from memory, with fewer ranks."""
    job = training.start(gated=True, nodes=2, nproc=1, nnodes="1:2", silence=NOTICED)
    world = training.comes_to(7)
    job.kill_node(world.nodes[1])
    training.go_on()
    training.finish()
    assert training.starts(0) == [0, 7]
    assert len(ends(training.out, 0)) == 1


@further("snapshots/test_replicas::test_a_spare_takes_over_what_the_lost_node_had")
def test_a_spare_takes_the_place_and_the_state(training: Training) -> None:
    """DDP: a node that has never trained fetches the state from one that has."""
    # with a restart to spend: see above; the spare may be late
    job = training.start(
        gated=True,
        max_restarts=1,
        nodes=3,
        nproc=1,
        nnodes="2:2",
        together=True,
        silence=NOTICED,
    )
    training.world = 2
    world = training.comes_to(7)
    job.kill_node(world.nodes[1])
    training.go_on()
    training.ends_as_if_undisturbed(0, 7)


@further("core/snapshots/test_choice", "snapshots/test_random_kills::test_killed_at_random_moments")
def test_a_node_with_the_only_copy_is_lost(training: Training) -> None:
    """FSDP without replicas: everybody goes back to the newest checkpoint, and it is said why."""
    args = ("--persist-every", "4")
    job = training.start(
        *args, mode="fsdp2", gated=True, max_restarts=1, nodes=2, nproc=1, nnodes="2"
    )
    world = training.comes_to(7)
    job.wait_for(lambda status: "4" in status.snapshot and training.checkpoints() == [4])
    victim = world.nodes[1]
    job.kill_node(victim)
    training.lose_memory()
    job.restart_node(victim)
    training.go_on()
    training.ends_as_if_undisturbed(0, 4)
    assert training.said("only copy")


@further("agent/snapshots/test_taken_over", "core/snapshots/test_past")
def test_a_node_that_was_lost_comes_back_with_what_it_held(training: Training) -> None:
    """Its memory is of an older round than the others are in: nobody goes on from that."""
    job = training.start(
        gated=True, nodes=2, nproc=1, nnodes="1:2", silence=NOTICED, options=["--grow=now"]
    )
    world = training.comes_to(7)
    victim = world.nodes[1]
    at = job.freeze_node(victim)
    training.open_gate(9)  # its ranks hang in step 8, until they are ended
    job.wait_for_world(1, since=at, step=9)
    job.thaw_node(victim)
    job.wait_for(world_size=2)
    training.open_gate()
    training.finish()
    assert training.starts(0) == [0, 7, 9]
    assert training.starts(1) == [0, 9]


@further(
    "core/scripts/snapshots_suspect_after_two_failures.txt",
    "training/checkpointing/test_restore_choice::test_what_is_suspect_comes_last_and_never_after_nothing",
)
def test_a_state_that_kills_comes_last(training: Training) -> None:
    """Twice ranks train on from it and fail at once: then the older slot."""
    args = ("--every", "3", "--die", "1:7:kill", "--poison", "6")
    training.start(*args, max_restarts=4)
    training.ends_as_if_undisturbed(0, 6, 6, 3, ranks=[0])
    assert training.said("step 6 is suspect: ranks have failed 2 times within 10 steps of it")


@further("core/scripts/snapshots_early_failures_are_not_its_fault.txt")
def test_early_failures_cost_no_state(training: Training) -> None:
    """Six lives end before they have put anything back, by themselves and by a signal in turn:
    training goes on where it was."""
    args = ("--persist-every", "3", "--die", "1:8:kill", "--early", "6")
    training.start(*args, max_restarts=9, options=["--restart-backoff=0"])
    training.ends_as_if_undisturbed(0, 8)
    assert not training.said("suspect|are used last")


@further(
    "core/snapshots/test_checkpoints", "snapshots/test_random_kills::test_killed_at_random_moments"
)
def test_what_is_wanted_in_storage_comes_there(training: Training) -> None:
    """Periodic checkpoints, the last of them ordered just before the end; old ones are removed (the
    job's end does not wait for that of the last one)."""
    training.start("--persist-every", "3", "--keep", "2")
    training.finish()
    assert training.checkpoints()[-1] == STEPS
    assert 3 not in training.checkpoints()
    assert not list(training.ckpt.glob("**/*.tmp"))


@pytest.mark.parametrize("mode", cases(["counter", "fsdp2"], kept=["counter"]))
def test_saved_at_the_breakpoint(training: Training, mode: str) -> None:
    """A rank dies between two snapshots: nothing is lost, and the end is the same to the bit. With
    --save-at-breakpoint what memory gave is written out in the background, without a wait."""
    training.start(
        *("--die", "1:7:kill"), mode=mode, max_restarts=1, options=["--save-at-breakpoint"]
    )
    training.ends_as_if_undisturbed(0, 7)
    assert training.said(MEMORY)
    assert 7 in training.checkpoints()


@further("core/snapshots/test_checkpoints", "test_saved_at_the_breakpoint")
def test_saved_before_the_job_ends(training: Training) -> None:
    """No restart is left: the newest step is written before the job is over."""
    training.start("--die", "1:7:kill", mode="fsdp2", options=["--save-at-breakpoint"])
    training.finish(1)
    assert training.checkpoints() == [7]
    assert training.said("saved before the job ends")


@further(
    "containers/test_surroundings::test_a_small_dev_shm",
    "agent/snapshots/test_segments::test_a_folder_without_room_is_done_without",
)
def test_shared_memory_that_is_too_small(training: Training) -> None:
    """Training goes on without snapshots, and a sentence says so."""
    training.start(env={"ELASTICRUN_SHM_DIR": "/proc"}, steps=4)
    training.finish()
    assert len(ends(training.out, 0)) == 1
    assert training.said(re.escape("/proc"))


@further(
    "agent/snapshots/test_snapshots::test_a_step_that_one_rank_could_not_save_is_told_without_it",
    "core/scripts/snapshots_a_rank_cannot_save.txt",
)
@pytest.mark.parametrize(("mode", "code", "written"), [("ddp", 0, 12), ("fsdp2", 1, 4)])
def test_one_rank_cannot_save(training: Training, mode: str, code: int, written: int) -> None:
    """From step 6 on. No other waits for it; where the others hold the same state the step counts,
    else the job ends as one whose last checkpoint is missing, for that reason."""
    words = ("--cannot", "1:6", "--every", "2", "--persist-every", "4", "--busy", "skip")
    training.start(*words, mode=mode, gated=True)
    training.comes_to(4)
    for step in range(4, written + 1, 4):
        training.open_gate(step)
        training.until(lambda step=step: step in training.checkpoints(), f"checkpoint {step}")
    training.open_gate()
    training.finish(code)
    assert training.checkpoints()[-1] == written
    assert training.said("rank 1 could not save step 6: no memory for the state")
    missing = "step 12 was not written to storage: rank 1 could not save it: no memory for"
    assert training.said(missing) is (code != 0)
    stalls = [told(training.out, rank)[-1]["stall"] for rank in range(2)]
    assert max(stalls) < PERSIST_LIMIT, "nobody has waited for a slot until the limit"


# ---------------------------------------------------------------- training that is taken back


OWN = Path(__file__).with_name("own.py")


@further(
    "training/checkpointing/test_restore_choice::test_what_is_suspect_comes_last_and_never_after_nothing"
)
def test_what_is_suspect_comes_last_in_storage_too(training: Training) -> None:
    """Step 8 is in memory and in storage, and kills whoever goes on from it: training goes on from
    neither."""
    args = ("--every", "4", "--persist-every", "4", "--keep", "1", "--poison", "8")
    job = training.start(*args, gated=True, max_restarts=4)
    training.comes_to(8)
    training.until(lambda: 8 in training.checkpoints(), "checkpoint of step 8")
    job.kill_rank(1)
    job.wait_for(round=2, phase="running")
    training.open_gate(STEPS)
    training.until(lambda: training.checkpoints() == [STEPS], "the last checkpoint alone")
    training.open_gate()
    training.ends_as_if_undisturbed(0, 8, 8, 4, ranks=[0])
    assert training.said("step 8 and later ones are used last")


@further(
    "training/checkpointing/test_restore_choice::test_a_step_that_is_not_there_is_refused_in_a_sentence"
)
def test_a_step_that_is_asked_for(training: Training) -> None:
    """A second start goes on from an older checkpoint, and leaves the newer ones; a third asks for
    one that is not there."""
    args = ("--every", "4", "--persist-every", "4")
    training.start(*args)
    training.finish()
    assert {4, 12} <= set(training.checkpoints()), "that of 8 may give way to that of 12"
    training.start(*args, options=["--restore-step=4"])
    training.finish()
    assert training.starts(0) == [0, 4]
    assert training.said("ranks resume from step 4 in storage: --restore-step")
    assert len(ends(training.out, 0)) == 2
    assert len(set(ends(training.out, 0))) == 1
    training.start(*args, options=["--restore-step=5"])
    training.finish(1)
    assert training.said("--restore-step=5: step 5 is not complete in memory, and .* has no valid")


@further("core/snapshots/test_choice")
def test_a_living_rank_is_given_back_what_it_has_alone(training: Training) -> None:
    """Equal weights, a node a rank: rank 1 dies before it holds step 5, which rank 0 alone could
    give. All resume from step 4, or rank 1's own state would be lost."""
    training.start("--steps", "8", script=OWN, nodes=2, nproc=1, nnodes="2", max_restarts=1)
    training.finish()
    for rank in (0, 1):
        assert [(line["start"], line["number"]) for line in told(training.out, rank)] == [
            (0, 0),
            (4, 4),
        ]
    assert training.said(
        "step 4 is restored instead of step 5, which lacks the own state of rank 1"
    )
