from __future__ import annotations

import pytest

from elasticrun.core.failures import Bill, Window, cause_first, classify, root_cause
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
        (1, "torch.distributed.DistNetworkError: Failed to recv, got 0 bytes. Connection was "
            "likely closed. Did the remote server shutdown or crash?", False, False, "peer-lost"),
        (1, "recvValue failed on SocketImpl(fd=4)", False, False, "peer-lost"),
        (1, "wait timeout after 300000ms, keys: /default_pg/0//cpu//0/0",
         False, False, "peer-lost"),
        # these have nothing to do with peers
        (1, "torch.distributed.DistNetworkError: The server socket has failed to listen on any "
            "local network address. port: 29500, EADDRINUSE", False, False, "script"),
        (1, "torch.OutOfMemoryError: CUDA out of memory", False, False, "script"),
        (1, "RuntimeError: connection to the database is gone", False, False, "script"),
    ],
)  # fmt: skip
def test_table(code: int, message: str, stopping: bool, oom: bool, kind: str) -> None:
    assert classify(code, message, stopping=stopping, oom=oom) == kind


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
    assert window.verdict(membership="", restarts_left=0).bill is Bill.NOTHING
    assert window.add("a", [failure(0, FailureKind.PEER_LOST)], now=10.0)
    assert not window.add("a", [failure(0, FailureKind.PEER_LOST)], now=11.0), "heard before"
    doubt = window.verdict(membership="", restarts_left=0)
    assert (doubt.bill, doubt.until) == (Bill.DOUBT, 15.0)
    assert window.verdict(membership="", restarts_left=1).bill is Bill.CHARGE
    assert window.verdict(membership="node b is dead", restarts_left=0).bill is Bill.NOTHING
    window.add("b", [failure(1, FailureKind.SCRIPT)], now=12.0)
    assert window.verdict(membership="", restarts_left=0).bill is Bill.HOPELESS
    assert window.opened_at == 10.0
    assert window.failures[0].rank == 1


def test_an_excuse_holds_only_if_it_came_first() -> None:
    window = Window(doubt=5.0)
    window.excuse("new nodes join")
    window.add("a", [failure(0, FailureKind.SCRIPT)], now=1.0)
    assert window.verdict(membership="", restarts_left=0).bill is Bill.NOTHING
    window = Window(doubt=5.0)
    window.add("a", [failure(0, FailureKind.SCRIPT)], now=1.0)
    window.excuse("new nodes join")
    assert window.verdict(membership="", restarts_left=0).bill is Bill.HOPELESS


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
    assert window.verdict(membership="", restarts_left=0).bill is Bill.HOPELESS
