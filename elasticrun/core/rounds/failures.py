"""How a rank failed, and which of many failures is the cause.

When one rank fails, others fail because of it: their collectives break, or they are stopped. Only
the first is a cause; the rest are its echoes. `classify` distinguishes them by exit code, signal
and error text, the most specific sign first. `CONTRACT` assigns an exit code, for schedulers, to
each way in which a launcher ends.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from msgspec import structs

from elasticrun.config import (
    EXIT_BAD_NODE,
    EXIT_FAILED,
    EXIT_FINAL,
    EXIT_OK,
    EXIT_SAVED,
    EXIT_USAGE,
)
from elasticrun.core.reasons import RankFailed
from elasticrun.wire.messages import MAX_FAILURES, Failure, FailureKind
from elasticrun.wire.types import write_ranges

SIGABRT = 6
SIGKILL = 9
SIGTERM = 15
SIGNALS = {
    1: "SIGHUP",
    2: "SIGINT",
    3: "SIGQUIT",
    4: "SIGILL",
    5: "SIGTRAP",
    6: "SIGABRT",
    7: "SIGBUS",
    8: "SIGFPE",
    9: "SIGKILL",
    10: "SIGUSR1",
    11: "SIGSEGV",
    12: "SIGUSR2",
    13: "SIGPIPE",
    14: "SIGALRM",
    15: "SIGTERM",
    24: "SIGXCPU",
    25: "SIGXFSZ",
    31: "SIGSYS",
}
"""Linux's names; no other platform is supported."""

NO_TRACEBACK = "To enable traceback see: https://pytorch.org/docs/stable/elastic/errors.html"
"""torchrun's text for a rank that exited by itself and left no error file."""

MAX_QUOTED = 200
"""Maximum characters of a rank's error in a sentence; the final summary has all of it."""

STOP_SIGNALS = frozenset({1, 2, 3, 9, 10, 12, 15})
"""HUP, INT, QUIT, KILL, USR1, USR2, TERM: signals with which agents, schedulers and people stop
ranks."""

_PEER_LOST = re.compile(
    "|".join(
        (
            # gloo: a pair's socket
            r"connection closed by peer",
            r"connection reset by peer",
            r"application timeout caused pair closure",
            r"timed out waiting \d+ms for (?:send|recv) operation",
            r"gloo.*(?:broken pipe|connection refused|socket closed)",
            # NCCL
            r"ncclremoteerror",
            r"remote process exited or there was a network error",
            r"ncclsystemerror",
            r"nccl.*unhandled system error",
            r"nccl.*(?:communicator was aborted|connection closed)",
            r"socketpollconnect|socketprogress",
            r"watchdog caught collective operation timeout",
            r"nccl.* timed out|timed out in blocking wait",
            # a group that was closed while calls waited for ranks that had exited, or after that
            r"work timed out during finalize|workq finalize returned in progress",
            r"processgroupnccl (?:not initialized|already finalized|has been finalized)",
            # the TCPStore, after its host process or machine is lost
            r"did the remote server shutdown or crash",
            r"failed to recv, got 0 bytes",
            r"recvvalue failed",
            r"sendbytes failed",
            r"wait timeout after \d+ms, keys",
        )
    ),
    re.IGNORECASE | re.DOTALL,
)

OWN_SIGNALS = frozenset({4, 5, 6, 7, 8, 11, 31})
"""ILL, TRAP, ABRT, BUS, FPE, SEGV, SYS: signals caused by what the process itself did."""

_TRANSIENT = re.compile(
    "|".join(
        (
            r"no space left on device|disk quota exceeded",
            r"input/output error|stale file handle|transport endpoint is not connected",
            r"cannot allocate memory|resource temporarily unavailable",
            r"network is unreachable|no route to host|connection (?:refused|timed out)",
            r"name or service not known|temporary failure in name resolution",
            r"no cuda-capable device|devices? (?:is|are) busy or unavailable|uncorrectable ecc",
        )
    ),
    re.IGNORECASE,
)
"""Temporary conditions, or conditions of this machine only: a retry may succeed."""

_SIGBUS_EXIT = -7
"""The exit code of SIGBUS, which a full /dev/shm also causes; a retry may find it empty."""

ECHOES = frozenset({FailureKind.PEER_LOST, FailureKind.STOPPED})
"""Kinds that are never the cause if another kind is present."""


def signal_of(exitcode: int) -> int:
    """The signal that ended a process: from a negative exit code, or from one above 128, because a
    shell reports 128 plus the signal. 0 or less: none."""
    return -exitcode if exitcode < 0 else exitcode - 128


def classify(exitcode: int, message: str, *, stopping: bool, oom: bool) -> FailureKind:
    """The kind of a rank's end. `exitcode` as in subprocess (negative: a signal). `message`: what
    is known of its error. `stopping`: its agent was stopping it or had just received a signal.
    `oom`: the kernel or the cgroup counted an out-of-memory kill."""
    signum = signal_of(exitcode)
    if oom and signum == SIGKILL:
        return FailureKind.OOM
    if stopping and (exitcode == 0 or signum in STOP_SIGNALS):
        return FailureKind.STOPPED
    if exitcode == EXIT_FINAL and not stopping:
        return FailureKind.FINAL
    peer_lost = _PEER_LOST.search(message) is not None
    by_watchdog = peer_lost and signum == SIGABRT  # NCCL aborts if its peer is lost
    if exitcode < 0 and not by_watchdog:
        return FailureKind.SIGNAL
    return FailureKind.PEER_LOST if peer_lost else FailureKind.SCRIPT


def is_self_inflicted(failure: Failure) -> bool:
    """Whether the rank's own action ended it, not a signal from outside, an out-of-memory kill, or
    our own processes."""
    if failure.kind not in (FailureKind.SCRIPT, FailureKind.FINAL, FailureKind.SIGNAL):
        return False
    signum = signal_of(failure.exitcode)
    return signum not in STOP_SIGNALS and (failure.exitcode >= 0 or signum in OWN_SIGNALS)


def root_cause(failures: Sequence[Failure]) -> Failure | None:
    """The first failure that is not an echo; else the first peer loss; else the first failure; None
    if there is none."""
    for rejected in (ECHOES, frozenset({FailureKind.STOPPED}), frozenset[FailureKind]()):
        for failure in failures:
            if failure.kind not in rejected:
                return failure
    return None


def cause_first(failures: Sequence[Failure]) -> tuple[Failure, ...]:
    """The root cause, then the others in their order; at most MAX_FAILURES."""
    cause = root_cause(failures)
    if cause is None:
        return ()
    return (cause, *(f for f in failures if f is not cause))[:MAX_FAILURES]


def reason_of(failure: Failure, node: str = "") -> RankFailed:
    """A failure as a reason: `rank 3 on node b: ValueError: bad luck`. `node` is "" if there is
    only one."""
    hung = failure.kind is FailureKind.HUNG
    return RankFailed(failure.rank, node, what_happened(failure), hung)


def ended_before(failure: Failure) -> str:
    """The ranks that had exited with 0 before this one lost its connection: `ranks 0-2`; "" if
    none."""
    ranks = failure.ended_before
    return f"rank{'' if ranks.isdecimal() else 's'} {ranks}" if ranks else ""


def also_ended(failure: Failure, others: Iterable[int]) -> Failure:
    """Add ranks of other nodes that had exited with 0 before this peer loss; only as many as fit in
    a sentence."""
    own = failure.ended_before
    ranks = write_ranges(others)
    if len(ranks) > MAX_QUOTED:
        ranks = ranks[:MAX_QUOTED].rpartition(",")[0]
    return structs.replace(failure, ended_before=f"{own},{ranks}" if own else ranks)


def what_happened(failure: Failure) -> str:
    """What happened to the rank, as a clause that can follow its name."""
    code, kind, message = failure.exitcode, failure.kind, failure.message
    if kind is FailureKind.HUNG:
        return message  # a sentence by the master, of limited length
    lost = kind is FailureKind.STOPPED and _PEER_LOST.search(message)  # before it was stopped
    if kind is FailureKind.PEER_LOST or lost:
        who = ended_before(failure)
        return f"lost its connection to another rank{who and f'; {who} had exited with 0'}"
    if kind in (FailureKind.SPAWN, FailureKind.SPAWNER):
        return cut(message) or "could not be started"
    if code < 0:
        verb = "stopped" if kind is FailureKind.STOPPED else "killed"
        oom = ": the kernel was out of memory" if kind is FailureKind.OOM else ""
        return f"{verb} by {SIGNALS.get(-code, f'signal {-code}')}{oom}"
    known = message and not message.startswith(NO_TRACEBACK)
    return cut(message) if known else f"exit code {code}"


def is_alike(failure: Failure, other: Failure) -> bool:
    """Whether `failure` has the message of `other`, an exception with a traceback; also if one of
    the ranks was being stopped by then."""
    return bool(other.traceback) and failure.message == other.message


def cut(text: str) -> str:
    """The rank's own text, truncated to fit into a sentence."""
    return text if len(text) <= MAX_QUOTED else f"{text[: MAX_QUOTED - 1]}…"


def is_script_fault(failure: Failure) -> bool:
    """Whether the script failed by itself and would do so again: the cause is not a lack of
    resources, a signal from outside, or peer loss."""
    passing = failure.exitcode == _SIGBUS_EXIT or _TRANSIENT.search(failure.message)
    return is_self_inflicted(failure) and not passing


class Ending(StrEnum):
    """Why a node's launcher ends."""

    DONE = "done"
    USAGE = "usage"  # the command line
    RANK = "rank"  # a rank failed, and no restart was left
    SPENT = "spent"  # the same, by the script's own fault, with --exit-codes=scheduler
    FINAL = "final"  # a rank failed, and its script said that a retry cannot help
    BELOW_FLOOR = "below the floor"  # the nodes together missed --comm-perf-threshold
    TOO_FEW = "too few"  # nodes: a lost one was not replaced, or too few joined in time
    LEFT = "left"  # stopped by a signal or an operator, and nothing was saved
    SAVED = "saved"  # the same, but the state of the ranks then, or later, is in storage
    UNSAVED = "unsaved"  # every rank exited with 0, but the last checkpoint is not in storage
    REFUSED = "refused"  # by the master: another version, another job, a node id in use
    NO_MASTER = "no master"  # ranks had failed or could not finish, and no master answered
    STUCK = "stuck"  # a process of this node survives SIGKILL
    EXCLUDED = "excluded"  # from the job: by the network check, or because it is too slow
    UNFIT = "unfit"  # --precheck found something on this machine


@dataclass(frozen=True, slots=True)
class Clause:
    """A line of the contract: the exit code of an ending, and why."""

    code: int
    why: str


CONTRACT: Mapping[Ending, Clause] = {
    Ending.DONE: Clause(EXIT_OK, "there is nothing left to do"),
    Ending.USAGE: Clause(EXIT_USAGE, "the same command fails on every node and at every try"),
    Ending.RANK: Clause(EXIT_FAILED, "only the script could tell whether a retry helps"),
    Ending.SPENT: Clause(EXIT_FINAL, "the same script would fail in the same way again"),
    Ending.FINAL: Clause(EXIT_FINAL, "the script has said so"),
    Ending.BELOW_FLOOR: Clause(EXIT_FAILED, "other nodes may be faster"),
    Ending.TOO_FEW: Clause(EXIT_FAILED, "the nodes may be available later"),
    Ending.LEFT: Clause(EXIT_FAILED, "a person ended it, and torchrun exits the same way"),
    Ending.SAVED: Clause(EXIT_SAVED, "another run resumes there, and nothing is lost"),
    Ending.UNSAVED: Clause(EXIT_FAILED, "another run resumes from the previous checkpoint"),
    # one node with an old image must not end the whole job
    Ending.REFUSED: Clause(EXIT_FAILED, "the cause may be fixed by then"),
    Ending.NO_MASTER: Clause(EXIT_FAILED, "the master may be available later"),
    Ending.STUCK: Clause(EXIT_BAD_NODE, "its devices stay in use until the machine reboots"),
    Ending.EXCLUDED: Clause(EXIT_BAD_NODE, "the others continue; a retry here would be excluded"),
    Ending.UNFIT: Clause(EXIT_BAD_NODE, "no rank was started, and none would start here"),
}
"""What a scheduler is told of each ending. The code says only what the scheduler should do."""


def code_of(ending: Ending) -> int:
    """The exit code of a launcher with this ending."""
    return CONTRACT[ending].code


def code_for(failures: Iterable[Failure], otherwise: Ending = Ending.RANK) -> int:
    """The exit code for these failures: FINAL's if one of them is final, else that of
    `otherwise`."""
    final = any(failure.kind is FailureKind.FINAL for failure in failures)
    return code_of(Ending.FINAL if final else otherwise)
