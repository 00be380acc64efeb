"""The messages between an agent and its spawner, and between a launcher and a warm process; and the
command line of the fork server.

The spawner is the fork server, or a caller of elastic_launch. Agent and spawner exchange frames
(`wire.frames`) over a private socketpair; an invalid one ends the connection with a sentence. A
*key* identifies one process that the spawner was ordered to start; the agent never reuses a key.

The code that starts the fork server is here because the agent writes the server's command line and
the server reads it, and neither package imports the other.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import ClassVar, Final

from elasticrun.wire import debugger
from elasticrun.wire.types import EntryKind, Entrypoint

CANNOT_LOAD: Final = "cannotLoad"
"""Key in `extraInfo` of a rank's error file: Python cannot load the program or a module that it
imports, so the program would fail in the same way again."""

# ---------------------------------------------------------------- to the spawner


@dataclass(frozen=True, slots=True)
class Configure:
    """First message: how to prepare. `launch` is auto, fork or exec."""

    launch: str
    preload: tuple[str, ...]  # modules to import in addition to torch
    entry: Entrypoint  # read once, to find out whether its text forbids forking
    start_method: str  # spawn, fork, forkserver: for function and run-path entries
    numa: bool  # ranks will be bound to cores


@dataclass(frozen=True, slots=True)
class SpawnRank:
    """Start one rank in its own session."""

    key: int
    local_rank: int
    entry: Entrypoint  # args with `${local_rank}` filled in
    env: dict[str, str]  # added to the spawner's first environment
    unset: tuple[str, ...]  # removed from it
    stdout: str  # file to write (truncated), "" to inherit, "/dev/null" to discard
    stderr: str
    error_file: str  # file for an uncaught exception, "" for none
    numa: str = ""  # mode of --numa-binding, "" for the spawner's first mask
    numa_may_fail: bool = False  # run unbound if torch finds no cores
    monitor: str = ""  # socket on which a forked rank answers (wire.progress); "": none


@dataclass(frozen=True, slots=True)
class SpawnStandby:
    """Start the next life of a rank ahead of time, in place of an earlier standby of this local
    rank: it runs until its first effect and becomes the rank at a SpawnRank that differs from
    `rank` in nothing but the key. Answer: StandbyIs, at each change."""

    key: int
    rank: SpawnRank
    stdout: str  # where the file `rank.stdout` is until then, if it is a file
    stderr: str
    idle: bool = True  # it only uses cores that are idle


@dataclass(frozen=True, slots=True)
class DropStandby:
    """End a standby, unless it is a rank already."""

    key: int


def command(entry: Entrypoint, python: str = "") -> list[str]:
    """The command line that runs the program as a new process."""
    words = [entry.target, *entry.args]
    if entry.kind is EntryKind.COMMAND:
        return words
    flags = ["-u", "-m"] if entry.kind is EntryKind.MODULE else ["-u"]
    if entry.kind is EntryKind.RUN_PATH:
        flags += ["-c", _RUN_PATH]
    return [python or sys.executable, *flags, *words]


_RUN_PATH = (
    "import sys,runpy;sys.flags.safe_path or sys.path.pop(0);sys.argv.pop(0);"
    "runpy.run_path(sys.argv[0],run_name='__main__')"
)


@dataclass(frozen=True, slots=True)
class SpawnStore:
    """Start a c10d store host listening on `port`, which the agent keeps bound (SO_REUSEPORT)."""

    key: int
    port: int


@dataclass(frozen=True, slots=True)
class ProbePlan:
    """What one probe process does: a timed matmul, then a timed all_reduce with its group.

    The group meets at `store_host:store_port` under the prefix `check`. Before any collective,
    ranks report there whether their own part succeeded, so that a failed one does not leave the
    others hanging."""

    check: str
    rank: int  # in the group
    world_size: int
    store_host: str
    store_port: int
    device: str  # torch's name: cpu, cuda, npu
    device_index: int
    backend: str  # gloo, nccl, hccl
    matrix: int  # edge of the square matrices, 0: no matmul
    dtype: str  # torch's name of their type
    matmuls: int  # number of timed ones, after `warmup`
    sizes: tuple[int, ...]  # bytes of each timed all_reduce
    transfers: int  # number of timed all_reduces of each size, after `warmup`
    warmup: int
    limit: float  # seconds; also the process group's own
    fault: str = ""  # injected, see wire/env.py; "" for none


@dataclass(frozen=True, slots=True)
class SpawnProbe:
    """Start one probe. It reports its phases and its result (ProbeSaid), then exits (Exited)."""

    key: int
    plan: ProbePlan
    env: dict[str, str]
    unset: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class SpawnSaver:
    """Start the saver, one per node. It connects to `place`, an abstract socket of the agent, and
    uses `wire.snapshots` there; it exits when that connection ends (Exited)."""

    key: int
    place: str
    host: str  # address where it serves other nodes, "" for nowhere
    secret: str  # hex; another node's saver must prove it, "" for none
    env: dict[str, str]
    unset: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class SendSignal:
    """Send a signal to the process group of a rank (or to a store host). `alone`: only to that
    process."""

    key: int
    signal: int
    alone: bool = False


@dataclass(frozen=True, slots=True)
class SweepOrder:
    """These ranks have exited: end the processes that they left behind. Their process groups get
    SIGKILL at once; descendants in other sessions get SIGTERM, and SIGKILL after `grace` seconds.
    Answer: Swept.

    With `linger`, all descendants may continue for that many seconds, and then all get SIGTERM; if
    there are any to report, a Lingering precedes the Swept."""

    on_wire: ClassVar = "Sweep"
    keys: tuple[int, ...]
    grace: float
    linger: float = 0.0


@dataclass(frozen=True, slots=True)
class CloseStore:
    """End a store host whose round is over."""

    key: int


@dataclass(frozen=True, slots=True)
class Quit:
    """Kill and reap every descendant, then exit with 0."""


@dataclass(frozen=True, slots=True)
class Keepalive:
    """The agent's loop is alive. If no Keepalive follows within `limit` seconds, the spawner kills
    every rank: a stopped agent must not leave ranks of an old round running, because the next round
    may write the same checkpoints."""

    on_wire: ClassVar = "Pet"
    limit: float


@dataclass(frozen=True, slots=True)
class Ping:
    """Answer with a Pong of this number once all earlier orders have been carried out."""

    number: int


Spawn = SpawnRank | SpawnStandby | SpawnStore | SpawnProbe | SpawnSaver
"""Orders that start a process."""

ToSpawner = (
    Configure | Spawn | DropStandby | SendSignal | SweepOrder | CloseStore | Quit | Keepalive | Ping
)


# ---------------------------------------------------------------- from the spawner


@dataclass(frozen=True, slots=True)
class SpawnerReady:
    """The spawner can start ranks now. `mode` is fork or exec; `reason` says why it is exec
    although fork was requested (otherwise empty)."""

    pid: int
    mode: str
    reason: str
    torch: str  # version, "" if torch was not imported
    import_seconds: float


@dataclass(frozen=True, slots=True)
class Spawned:
    """The process of `key` runs. `forked`: it runs our code first; False if it was exec'd."""

    key: int
    pid: int
    forked: bool


@dataclass(frozen=True, slots=True)
class SpawnFailed:
    """The process of `key` could not be started; `reason` is one sentence for the user. `lasting`:
    another try would fail alike."""

    key: int
    reason: str
    lasting: bool = False


@dataclass(frozen=True, slots=True)
class Exited:
    """The process of `key` was reaped. `code` is negative for a signal."""

    key: int
    pid: int
    code: int
    time_us: int


@dataclass(frozen=True, slots=True)
class StoreListening:
    """The store host of `key` accepts connections."""

    key: int
    pid: int
    port: int


@dataclass(frozen=True, slots=True)
class ProbeSaid:
    """A message of a probe: that it enters `phase`, or, with `done`, its result.

    Texts and numbers mean the same as in messages.Probed; `transfers` has seconds for each measured
    size of the plan."""

    key: int
    phase: str
    done: bool
    ok: bool = False
    own: bool = False
    excused: bool = False
    reason: str = ""
    compute: float = 0.0
    transfers: tuple[float, ...] = ()
    timed: float = 0.0


@dataclass(frozen=True, slots=True)
class Swept:
    """Every descendant of these ranks has been reaped, except `stuck` (pids that the kernel
    keeps)."""

    keys: tuple[int, ...]
    stuck: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Lingering:
    """Descendants of these ranks that still run, with the command of each. `ending`: their time is
    over, and they have been sent SIGTERM."""

    keys: tuple[int, ...]
    pids: tuple[int, ...]
    commands: tuple[str, ...]
    ending: bool


@dataclass(frozen=True, slots=True)
class Execed:
    """A forked rank has called exec (same process): it runs none of our code any more."""

    key: int


class StandbyState(StrEnum):
    """What a standby is; the last ones say why there is none any more."""

    REHEARSING = "rehearsing"  # it runs; `detail` is empty
    READY = "ready"  # it waits; `detail`: the call at which it is parked
    ACTIVE = "active"  # it has become the rank
    REFUSED = "refused"  # the system does not allow to trace processes; `detail`: its error
    EXECED = "execed"  # ranks are not forked
    DIFFERENT = "different"  # the rank is started otherwise than was expected
    CHANGED = "changed"  # a file that it has read has changed; `detail`: its path
    MEMORY = "memory"  # it, or all of them, would need too much memory
    READS = "reads"  # it reads too many files
    LIMIT = "limit"  # the deadline of a wait cannot be moved; `detail`: the system call
    ENDED = "ended"  # it was killed, or ended by itself
    NO_ANSWER = "no answer"  # the tracer has ended, or does not answer


@dataclass(frozen=True, slots=True)
class StandbyIs:
    """The state of a standby. Once it is none of the first three, its key is forgotten."""

    key: int
    state: StandbyState
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Notice:
    """One sentence for the operator: a fallback, a refused preload."""

    text: str


@dataclass(frozen=True, slots=True)
class Stale:
    """A file that this spawner has imported has changed: a new spawner is needed. Until there is
    one, ranks are exec'd, so that they run what is on disk now."""

    reason: str


@dataclass(frozen=True, slots=True)
class Pong:
    """The answer to a Ping."""

    number: int


FromChild = Spawned | Execed | SpawnFailed | Exited | StoreListening | ProbeSaid | StandbyIs
"""Messages about one process, identified by its key."""

FromSpawner = FromChild | SpawnerReady | Swept | Lingering | Notice | Stale | Pong


# ---------------------------------------------------------------- a launcher and a warm process

DESCRIPTORS: Final = 5
"""Number of descriptors sent once an Ask is granted: the agent's connection, three standard
streams, working directory."""

NAMESPACES: Final = ("cgroup", "ipc", "mnt", "net", "pid", "time", "user", "uts")
"""The namespaces that a fork shares with its parent; each must be the launcher's."""


@dataclass(frozen=True, slots=True)
class Ask:
    """Fork a fork server with these variables, signal dispositions and signal mask. The
    descriptors follow, with one byte, only after Granted: a warm process that is stopped
    (SIGSTOP) would keep them open."""

    env: dict[str, str]
    ignored: tuple[int, ...]
    blocked: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Describe:
    """Request a Description."""


@dataclass(frozen=True, slots=True)
class Leave:
    """Exit; fork servers forked from it continue."""


@dataclass(frozen=True, slots=True)
class Granted:
    """Send the descriptors."""


@dataclass(frozen=True, slots=True)
class Forked:
    """The fork server runs. From now on its guard, which is its parent process, sends the
    messages."""

    pid: int


@dataclass(frozen=True, slots=True)
class Over:
    """The fork server has exited, and no process below it is left. `code` is negative for a
    signal."""

    code: int


@dataclass(frozen=True, slots=True)
class Declined:
    """This launcher cannot be served; `reason` completes "it is not used: "."""

    on_wire: ClassVar = "Refused"
    reason: str


@dataclass(frozen=True, slots=True)
class Description:
    """The state of a warm process. `modules`: number of imported modules; `served`: of fork
    servers; `left`: seconds until it exits if unused."""

    pid: int
    torch: str
    modules: int
    served: int
    left: float


ToWarm = Ask | Describe | Leave
FromWarm = Granted | Forked | Over | Declined | Description


# ---------------------------------------------------------------- how the server is started

SERVER_FILE = Path(__file__).resolve().parent.parent / "forkserver" / "server.py"
"""Started by its path, so that no folder of the user can shadow our package."""

SHIELDED = (
    signal.SIGINT,
    signal.SIGTERM,
    signal.SIGHUP,
    signal.SIGQUIT,
    signal.SIGUSR1,
    signal.SIGUSR2,
)
"""Signals that schedulers and terminals send to every process at once; our helpers ignore them and
obey their socket, so that the script's own handler can finish.
"""

ARGV_PAD = 1024
"""Blank bytes at the end of the server's command line: where the kernel does not allow a child to
move its command line, the rank's overwrites the server's and must fit in.
"""


def ignored_signals() -> tuple[int, ...]:
    """The signals that were ignored when this process started (nohup, a shell's `&`).

    Call it before any handler is installed. SIGPIPE and SIGXFSZ are left out: Python itself ignores
    them at startup, and subprocess resets them in a child, as for torchrun's ranks.
    """
    mine = {signal.SIGPIPE, signal.SIGXFSZ}
    return tuple(
        int(s)
        for s in sorted(signal.valid_signals() - mine)
        if signal.getsignal(s) is signal.SIG_IGN
    )


def is_kept_ignored(number: int) -> bool:
    """Whether a launcher leaves this termination signal ignored: it was started by nohup, which
    keeps it and its ranks alive when the terminal closes. Other signals that were ignored at the
    start are caught, as in torchrun: a shell's background jobs ignore SIGINT."""
    return number == signal.SIGHUP and signal.getsignal(number) is signal.SIG_IGN


def server_argv(
    fd: int, *, parent: int, ignored: Iterable[int], blocked: Iterable[int]
) -> list[str]:
    """The server's `sys.argv`. `fd`: its end of the socketpair; `ignored` and `blocked`: the
    initial signal dispositions and mask of ranks."""
    return [
        str(SERVER_FILE),
        f"--fd={fd}",
        f"--parent={parent}",
        f"--ignored-signals={','.join(map(str, ignored))}",
        f"--blocked-signals={','.join(str(int(s)) for s in blocked)}",
        " " * ARGV_PAD,
    ]


def warm_command(place: Path, *, idle: float, fd: int) -> list[str]:
    """The command line of a warm process, which is that of a fork server without an agent. `place`:
    path of its socket; `idle`: seconds without use until it exits; `fd`: descriptor on which it
    reports that it is ready."""
    return [
        *(sys.executable, "-u", str(SERVER_FILE), f"--warm={place}", f"--idle={idle!r}"),
        *(f"--tells={fd}", " " * ARGV_PAD),
    ]


def start_server(
    *, ignored: Iterable[int], env: Mapping[str, str] | None = None
) -> tuple[subprocess.Popen[bytes], socket.socket]:
    """Start a fork server in its own session; return it and our end of the connection.

    Call it from the main thread (the server's parent-death signal depends on the thread). `ignored`
    is the result of `ignored_signals()` at our start; `env` is the environment that ranks build on.
    The shielded signals are blocked during the start, so that none can kill the server before its
    first instruction, and none meant for us is lost.
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, SHIELDED)
    words = server_argv(theirs.fileno(), parent=os.getpid(), ignored=ignored, blocked=blocked)
    try:
        with debugger.without_debugger():
            process = subprocess.Popen(
                [sys.executable, "-u", *words],
                env=env,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
            )
    except BaseException:
        ours.close()
        raise
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        theirs.close()
    return process, ours
