"""What a rank died of, what that costs, and how many restarts are left."""

from __future__ import annotations

import pytest

from elasticrun.core.reasons import Joined, NodeLost, Said, Silent, text
from elasticrun.core.rounds.attribution import Attribution
from elasticrun.core.rounds.budget import Budget, Cost, Window
from elasticrun.core.rounds.failures import (
    CONTRACT,
    Ending,
    cause_first,
    classify,
    code_for,
    code_of,
    is_script_fault,
    root_cause,
)
from elasticrun.wire.messages import MAX_FAILURES, Failure, FailureKind


def failure(rank: int, kind: FailureKind, code: int = 1) -> Failure:
    return Failure("host", rank, rank, 100 + rank, code, 0, kind, "", "", "")


@pytest.mark.parametrize(
    ("code", "message", "stopping", "oom", "kind"),
    [
        (1, "ValueError: boom", False, False, "script"),
        (7, "", False, False, "script"),
        (-11, "", False, False, "signal"),
        (-9, "", False, False, "signal"),
        (-9, "", False, True, "oom"),
        (137, "", False, True, "oom"),
        (-9, "", True, True, "oom"),
        (-9, "", True, False, "stopped"),
        (-15, "", True, False, "stopped"),
        (-15, "", False, False, "signal"),
        (143, "", True, False, "stopped"),
        (0, "", True, False, "stopped"),
        (1, "KeyError: 'x'", True, False, "script"),
        (93, "", False, False, "final"),
        (93, "Connection closed by peer", False, False, "final"),
        (93, "", True, False, "script"),  # while it is stopped it has no say
        (-6, "", False, False, "signal"),
        # what torch 2.13 prints
        (1, "RuntimeError: [/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:547] "
            "Connection closed by peer [127.0.0.1]:40011", False, False, "peer-lost"),
        (1, "Read error [127.0.0.1]:5: Connection reset by peer", False, False, "peer-lost"),
        (1, "Application timeout caused pair closure", False, False, "peer-lost"),
        (1, "Timed out waiting 1800000ms for recv operation to complete",
         False, False, "peer-lost"),
        (1, "DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:2098, remote process exited "
            "or there was a network error, NCCL version 2.21.5\nncclRemoteError: A call failed "
            "possibly due to a network error", False, False, "peer-lost"),
        (1, "NCCL error: unhandled system error (run with NCCL_DEBUG=INFO)",
         False, False, "peer-lost"),
        (-6, "[Rank 1] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=1)",
         False, False, "peer-lost"),
        (1, "torch.distributed.DistBackendError: Work WorkNCCL(SeqNum=7, OpType=ALLREDUCE) timed "
            "out in blocking wait.", False, False, "peer-lost"),
        # nccl2, which "nccl" is since torch 2.15
        (1, "NCCL Async Error: remote process exited or there was a network error \nNCCL Last "
            "Error: ", False, False, "peer-lost"),
        (1, "RuntimeError: NCCL operation timed out", False, False, "peer-lost"),
        (-6, "Watchdog caught collective operation timeout: NCCL operation timed out",
         False, False, "peer-lost"),
        (1, "RuntimeError: NCCL communicator was aborted after a previous error",
         False, False, "peer-lost"),
        (1, "RuntimeError: Work timed out during finalize", False, False, "peer-lost"),
        (1, "RuntimeError: WorkQ finalize returned in progress or not started state",
         False, False, "peer-lost"),
        (1, "RuntimeError: ProcessGroupNCCL not initialized", False, False, "peer-lost"),
        (1, "torch.distributed.DistNetworkError: Failed to recv, got 0 bytes. Connection was "
            "likely closed. Did the remote server shutdown or crash?", False, False, "peer-lost"),
        (1, "recvValue failed on SocketImpl(fd=4)", False, False, "peer-lost"),
        (1, "wait timeout after 300000ms, keys: /default_pg/0//cpu//0/0",
         False, False, "peer-lost"),
        # these have nothing to do with peers
        (1, "torch.distributed.DistNetworkError: The server socket has failed to listen on any "
            "local network address. port: 29500, EADDRINUSE", False, False, "script"),
        (1, "torch.OutOfMemoryError: CUDA out of memory", False, False, "script"),
        # of NCCL, and a rank's own
        (1, "RuntimeError: ProcessGroupNCCL requires CUDA tensors/devices", False, False, "script"),
        (1, "ValueError: ProcessGroupNCCL is only supported with GPUs, no GPUs found!",
         False, False, "script"),
        (1, "RuntimeError: Tensor list sizes must equal comm_size for all_to_all",
         False, False, "script"),
        (1, "RuntimeError: ProcessGroupNCCL has not been initialized. Call reconfigure() before "
            "issuing operations when enable_reconfigure=True.", False, False, "script"),
        (1, "DistBackendError: NCCL error in: NCCLUtils.cpp:94, invalid usage (run with "
            "NCCL_DEBUG=WARN for details)", False, False, "script"),
        (1, "RuntimeError: connection to the database is gone", False, False, "script"),
    ],
)  # fmt: skip
def test_table(code: int, message: str, stopping: bool, oom: bool, kind: str) -> None:
    assert classify(code, message, stopping=stopping, oom=oom) == kind


@pytest.mark.parametrize(
    ("ending", "code"),
    [
        ("done", 0),
        ("rank", 1),
        ("below the floor", 1),
        ("too few", 1),
        ("left", 1),
        ("refused", 1),
        ("no master", 1),
        ("usage", 2),
        ("stuck", 75),
        ("excluded", 75),
        ("unfit", 75),
        ("final", 93),
        ("spent", 93),
        ("saved", 99),
    ],
)
def test_the_contract(ending: str, code: int) -> None:
    """What schedulers act on: docs/exit-codes.md. A code is never given another meaning."""
    assert code_of(Ending(ending)) == code
    assert CONTRACT[Ending(ending)].why


@pytest.mark.parametrize(
    ("code", "message", "own"),
    [
        (1, "ValueError: boom", True),
        (1, "ModuleNotFoundError: No module named 'apex'", True),
        (2, "", True),  # python: can't open file; argparse of the script
        (1, "torch.OutOfMemoryError: CUDA out of memory", True),
        (-11, "", True),
        (-6, "", True),
        (-9, "", False),
        (-15, "", False),
        (-7, "", False),  # SIGBUS: what a full /dev/shm gives
        (1, "OSError: [Errno 28] No space left on device: '/ckpt/a'", False),
        (1, "OSError: [Errno 122] Disk quota exceeded", False),
        (1, "OSError: [Errno 116] Stale file handle", False),
        (1, "RuntimeError: No CUDA-capable device is detected", False),
        (1, "RuntimeError: Connection reset by peer", False),
    ],
)
def test_the_scripts_own_failures(code: int, message: str, own: bool) -> None:
    """Those after which another try would fail in the same way."""
    kind = classify(code, message, stopping=False, oom=False)
    told = Failure("host", 0, 0, 1, code, 0, kind, message, "", "")
    assert is_script_fault(told) is own


@pytest.mark.parametrize("kind", ["oom", "peer-lost", "stopped"])
def test_other_kinds_are_not_the_scripts(kind: FailureKind) -> None:
    assert not is_script_fault(failure(0, FailureKind(kind), -9))


def test_the_contract_is_whole() -> None:
    assert set(CONTRACT) == set(Ending)
    assert {clause.code for clause in CONTRACT.values()} == {0, 1, 2, 75, 93, 99}


def test_the_code_of_failed_ranks() -> None:
    first, final = failure(0, FailureKind.SCRIPT), failure(1, FailureKind.FINAL, 93)
    assert code_for([first]) == code_for([]) == 1
    assert code_for([first, final]) == 93
    assert code_for([], Ending.SAVED) == 99
    assert code_for([final], Ending.SAVED) == 93


@pytest.mark.parametrize("restarts", [0, 3])
@pytest.mark.parametrize("excuse", [None, Said("the round was closed")])
def test_a_final_word_ends_the_job_whatever_else_failed(restarts: int, excuse: Said | None) -> None:
    window = Window(doubt=5.0)
    window.excuse(excuse)
    window.add("a", [failure(0, FailureKind.PEER_LOST)], 10.0)
    window.add("b", [failure(1, FailureKind.FINAL, 93)], 11.0)
    for membership in (None, NodeLost("c", Silent())):
        verdict = window.verdict(membership=membership, restarts_left=restarts)
        assert verdict.cost is Cost.FINAL
        assert "rank 1 on node b: exit code 93" in text(verdict.reason)


def test_root_cause_is_the_first_that_is_no_echo() -> None:
    echo, stopped = failure(0, FailureKind.PEER_LOST), failure(1, FailureKind.STOPPED)
    cause, later = failure(2, FailureKind.SCRIPT), failure(3, FailureKind.SIGNAL)
    assert root_cause([stopped, echo, cause, later]) is cause
    assert root_cause([stopped, echo]) is echo
    assert root_cause([stopped]) is stopped
    assert root_cause([]) is None
    assert cause_first([echo, cause]) == (cause, echo)


def test_lists_are_bounded_and_keep_the_cause() -> None:
    many = [failure(rank, FailureKind.PEER_LOST) for rank in range(5000)]
    cause = failure(5000, FailureKind.SCRIPT)
    short = cause_first([*many, cause])
    assert short[0] is cause
    assert len(short) == MAX_FAILURES


def test_window_bills() -> None:
    window = Window(doubt=5.0)
    assert window.verdict(membership=None, restarts_left=0).cost is Cost.NOTHING
    assert window.add("a", [failure(0, FailureKind.PEER_LOST)], now=10.0)
    assert not window.add("a", [failure(0, FailureKind.PEER_LOST)], now=11.0), "heard before"
    doubt = window.verdict(membership=None, restarts_left=0)
    assert (doubt.cost, doubt.until) == (Cost.DOUBT, 15.0)
    assert window.verdict(membership=None, restarts_left=1).cost is Cost.CHARGE
    assert window.verdict(membership=NodeLost("b", Silent()), restarts_left=0).cost is Cost.NOTHING
    window.add("b", [failure(1, FailureKind.SCRIPT)], now=12.0)
    assert window.verdict(membership=None, restarts_left=0).cost is Cost.HOPELESS
    assert window.opened_at == 10.0
    assert window.failures[0].rank == 1


def test_an_excuse_holds_only_if_it_came_first() -> None:
    window = Window(doubt=5.0)
    window.excuse(Joined(("new",)))
    window.add("a", [failure(0, FailureKind.SCRIPT)], now=1.0)
    assert window.verdict(membership=None, restarts_left=0).cost is Cost.NOTHING
    window = Window(doubt=5.0)
    window.add("a", [failure(0, FailureKind.SCRIPT)], now=1.0)
    window.excuse(Joined(("new",)))
    assert window.verdict(membership=None, restarts_left=0).cost is Cost.HOPELESS


@pytest.mark.parametrize("innocent", [True, False])
def test_a_hang_is_charged_and_blamed_on_a_node_only_where_it_is_the_nodes(innocent: bool) -> None:
    said = "rank 2 (node b) is in uninterruptible sleep for 300 s; 3 ranks wait for it"
    hung = Failure("host-b", 2, 0, 7, 1, 0, FailureKind.HUNG, said, "", "")
    window = Window(doubt=5.0)
    assert window.add("b", [hung], 1.0, innocent=innocent)
    verdict = window.verdict(membership=None, restarts_left=1)
    assert (verdict.cost, text(verdict.reason)) == (Cost.CHARGE, said)
    assert window.cause is not None
    assert window.cause.innocent == innocent
    told = Attribution().in_words(window.cause, 2)
    assert told == "", "that ranks failed by themselves on both nodes, say"
    assert not window.failed_by_itself


def test_a_second_witness_is_another_node() -> None:
    window = Window(doubt=5.0)
    window.add("a", [failure(0, FailureKind.PEER_LOST)], now=1.0)
    assert not window.reported_by_another("a")
    assert window.reported_by_another("b")


def test_a_cause_that_comes_after_a_flood_of_echoes_is_not_lost() -> None:
    window = Window(doubt=5.0)
    echoes = [failure(rank, FailureKind.PEER_LOST) for rank in range(3000)]
    assert window.add("a", echoes, now=1.0)
    assert not window.add("b", [failure(4000, FailureKind.PEER_LOST)], now=2.0), "full"
    assert window.add("b", [failure(5000, FailureKind.SCRIPT)], now=2.0)
    assert window.failures[0].rank == 5000
    assert window.verdict(membership=None, restarts_left=0).cost is Cost.HOPELESS


# ---------------------------------------------------------------- restarts


def test_first_restart_is_immediate_then_one_two_four_up_to_the_longest() -> None:
    budget = Budget(max_restarts=9, window=0.0, backoff=5.0)
    delays = []
    for _ in range(6):
        delays.append(budget.delay(uptime=0.1))
        budget.charge(0.0, uptime=0.1)
    assert delays == [0.0, 1.0, 2.0, 4.0, 5.0, 5.0]
    assert budget.delay(uptime=31.0) == 0.0, "it was healthy"
    budget.charge(100.0, uptime=31.0)
    assert budget.delay(uptime=0.1) == 1.0
    assert budget.count == 7
    assert budget.remaining(100.0) == 2


def test_no_backoff_never_waits() -> None:
    budget = Budget(max_restarts=500, window=0.0, backoff=0.0)
    for _ in range(200):
        assert budget.delay(uptime=0.01) == 0.0
        budget.charge(0.0, uptime=0.01)
    assert budget.remaining(0.0) == 300


def test_a_window_makes_the_budget_a_rate() -> None:
    budget = Budget(max_restarts=2, window=60.0, backoff=0.0)
    budget.charge(0.0, uptime=100.0)
    budget.charge(10.0, uptime=100.0)
    assert budget.remaining(59.0) == 0
    assert budget.remaining(60.0) == 1
    assert budget.remaining(70.0) == 2
    assert budget.count == 2


def test_an_adopted_count_is_spent_once() -> None:
    budget = Budget(max_restarts=3, window=0.0, backoff=0.0)
    budget.adopt(2)
    budget.adopt(2)
    budget.adopt(1)
    assert (budget.count, budget.remaining(0.0)) == (2, 1)
    budget.charge(0.0, uptime=1.0)
    assert (budget.count, budget.remaining(0.0)) == (3, 0)
