"""The messages between an agent and its spawner, those of a launcher and a warm process, and how
the fork server is started.

The spawner is the fork server, or a caller of elastic_launch. They speak over a private socketpair
in frames (`wire.frames`), and one that is not understood ends the conversation with a sentence. A
*key* names one process the spawner was told to start; the agent never uses a key twice.

The fork server's command line and a Popen that keeps signals off it stand here because the agent
writes that command line and the fork server reads it, and neither room knows the other.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Final

from elasticrun.wire import debugger
from elasticrun.wire.types import EntryKind, Entrypoint

# ---------------------------------------------------------------- to the spawner


@dataclass(frozen=True, slots=True)
class Configure:
    """First message: how to get ready. `launch` is auto, fork or exec."""

    launch: str
    preload: tuple[str, ...]  # modules to import beside torch
    entry: Entrypoint  # read once, to see whether its text forbids forking
    start_method: str  # spawn, fork, forkserver: for function and run-path entries
    numa: bool  # ranks will be bound to cores


@dataclass(frozen=True, slots=True)
class SpawnRank:
    """Start one rank in a session of its own."""

    key: int
    local_rank: int
    entry: Entrypoint  # args with `${local_rank}` filled in
    env: dict[str, str]  # set over the spawner's own first environment
    unset: tuple[str, ...]  # removed from it
    stdout: str  # file to write (truncated), "" to inherit, "/dev/null" to drop
    stderr: str
    error_file: str  # where an uncaught exception is described, "" for nowhere
    numa: str = ""  # torch's word of --numa-binding, "" for the spawner's first mask
    numa_may_fail: bool = False  # it runs unbound where torch finds no cores
    monitor: str = ""  # where a forked rank answers questions (wire.progress); "" nowhere


def command(entry: Entrypoint, python: str = "") -> list[str]:
    """The command line of the program when it is exec'd."""
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
    """Start a c10d store host listening on `port`, which the agent holds bound (SO_REUSEPORT)."""

    key: int
    port: int


@dataclass(frozen=True, slots=True)
class ProbePlan:
    """What one probe process does: a timed matmul, then a timed all_reduce with its group.

    The group meets at `store` under the prefix `check`; ranks say there whether their own part
    went well before any collective, so that one that failed does not leave the others hanging."""

    check: str
    rank: int  # in the group
    world_size: int
    store_host: str
    store_port: int
    device: str  # torch's word: cpu, cuda, npu
    device_index: int
    backend: str  # gloo, nccl, hccl
    matrix: int  # edge of the square matrices, 0: no matmul
    dtype: str  # torch's name of their type
    matmuls: int  # that are timed, after `warmup`
    sizes: tuple[int, ...]  # bytes of each all_reduce that is timed
    transfers: int  # all_reduces of each size that are timed, after `warmup`
    warmup: int
    limit: float  # seconds; also the process group's own
    fault: str = ""  # planted, see wire/env.py; "" is none


@dataclass(frozen=True, slots=True)
class SpawnProbe:
    """Start one probe. It says its phases and its result (ProbeSaid), then ends (Exited)."""

    key: int
    plan: ProbePlan
    env: dict[str, str]
    unset: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class SpawnSaver:
    """Start the saver, one a node. It dials `place`, an abstract socket of the agent, and speaks
    `wire.snapshots` there from then on; it ends with that conversation (Exited)."""

    key: int
    place: str
    host: str  # address where it serves other nodes, "" for nowhere
    secret: str  # hex; what another node's saver must prove to know, "" for nothing
    env: dict[str, str]
    unset: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class SendSignal:
    """Send a signal to the process group of a rank (or to a store host). `alone`: to that process
    and to no other of its group."""

    key: int
    signal: int
    alone: bool = False


@dataclass(frozen=True, slots=True)
class SweepOrder:
    """These ranks have exited: remove what they left. SIGKILL to their groups at once; SIGTERM to
    descendants with a session of their own, SIGKILL after `grace` seconds. Answer: Swept.

    With `linger`, all descendants may go on for so many seconds, and all get SIGTERM then; where
    that is to be told, a Lingering comes before the Swept."""

    on_wire: ClassVar = "Sweep"
    keys: tuple[int, ...]
    grace: float
    linger: float = 0.0


@dataclass(frozen=True, slots=True)
class CloseStore:
    """End a store host; nobody needs its round any more."""

    key: int


@dataclass(frozen=True, slots=True)
class Quit:
    """Kill and reap every descendant, then end with 0."""


@dataclass(frozen=True, slots=True)
class Keepalive:
    """The agent's loop is alive. From the first one on, `limit` seconds without another end every
    rank: a stopped agent must not leave ranks of an old round at work, since a next one may write
    the same checkpoints."""

    on_wire: ClassVar = "Pet"
    limit: float


@dataclass(frozen=True, slots=True)
class Ping:
    """Say Pong with this number when all orders before it have been carried out."""

    number: int


Spawn = SpawnRank | SpawnStore | SpawnProbe | SpawnSaver
"""Orders that make a process."""

ToSpawner = Configure | Spawn | SendSignal | SweepOrder | CloseStore | Quit | Keepalive | Ping


# ---------------------------------------------------------------- from the spawner


@dataclass(frozen=True, slots=True)
class SpawnerReady:
    """The spawner can start ranks now. `mode` is fork or exec, `reason` says why it is exec
    although a fork was wanted (empty otherwise)."""

    pid: int
    mode: str
    reason: str
    torch: str  # version, "" if torch was not imported
    import_seconds: float


@dataclass(frozen=True, slots=True)
class Spawned:
    """The rank or store host runs. `forked`: our own code runs first in it; false where it was
    exec'd."""

    key: int
    pid: int
    forked: bool


@dataclass(frozen=True, slots=True)
class SpawnFailed:
    """It could not be started; one sentence for the user."""

    key: int
    reason: str


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
    """A word from a probe: that it enters `phase`, or, with `done`, what it found.

    The texts and numbers mean what they mean in messages.Probed; `transfers` has seconds for each
    of the plan's sizes that was measured."""

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
    """Every descendant of these ranks has been reaped, but for `stuck` (pids the kernel keeps)."""

    keys: tuple[int, ...]
    stuck: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Lingering:
    """Descendants of these ranks that still run, and the command of each. `ending`: their time is
    over, and they have been sent SIGTERM."""

    keys: tuple[int, ...]
    pids: tuple[int, ...]
    commands: tuple[str, ...]
    ending: bool


@dataclass(frozen=True, slots=True)
class Execed:
    """A forked rank has executed itself (same process): none of our code runs in it any more."""

    key: int


@dataclass(frozen=True, slots=True)
class Notice:
    """One sentence for the operator: a fallback, a refused preload."""

    text: str


@dataclass(frozen=True, slots=True)
class Stale:
    """A file that this spawner has imported was changed since: a new spawner is wanted. Until
    there is one, ranks are exec'd, so that they run what now is on disk."""

    reason: str


@dataclass(frozen=True, slots=True)
class Pong:
    """The answer to a Ping."""

    number: int


FromChild = Spawned | Execed | SpawnFailed | Exited | StoreListening | ProbeSaid
"""About one process, named by its key."""

FromSpawner = FromChild | SpawnerReady | Swept | Lingering | Notice | Stale | Pong


# ---------------------------------------------------------------- a launcher and a warm process

DESCRIPTORS: Final = 5
"""Sent once an Ask is granted: the agent's conversation, standard streams, working directory."""

NAMESPACES: Final = ("cgroup", "ipc", "mnt", "net", "pid", "time", "user", "uts")
"""None of these may be left by a fork."""


@dataclass(frozen=True, slots=True)
class Ask:
    """Fork a fork server with these variables, signal dispositions and signal mask. The descriptors
    come when that is granted, with one byte: a process that stands still must not hold them."""

    env: dict[str, str]
    ignored: tuple[int, ...]
    blocked: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Describe:
    """Say what you are."""


@dataclass(frozen=True, slots=True)
class Leave:
    """End; the fork servers that were forked stay."""


@dataclass(frozen=True, slots=True)
class Granted:
    """Send the descriptors."""


@dataclass(frozen=True, slots=True)
class Forked:
    """The fork server runs. From here on its guard speaks, which is its parent."""

    pid: int


@dataclass(frozen=True, slots=True)
class Over:
    """The fork server has ended (negative: by that signal), and nothing below it is left."""

    code: int


@dataclass(frozen=True, slots=True)
class Declined:
    """This launcher cannot be served; `reason` completes "it is not used: "."""

    on_wire: ClassVar = "Refused"
    reason: str


@dataclass(frozen=True, slots=True)
class Description:
    """`modules`: how many are imported; `left`: seconds until it ends unless it is used."""

    pid: int
    torch: str
    modules: int
    served: int
    left: float


ToWarm = Ask | Describe | Leave
FromWarm = Granted | Forked | Over | Declined | Description


# ---------------------------------------------------------------- how the server is started

SERVER_FILE = Path(__file__).resolve().parent.parent / "forkserver" / "server.py"
"""Started by its path, so that no folder of the user's can stand in front of our package."""

SHIELDED = (
    signal.SIGINT,
    signal.SIGTERM,
    signal.SIGHUP,
    signal.SIGQUIT,
    signal.SIGUSR1,
    signal.SIGUSR2,
)
"""Signals that schedulers and terminals send to every process at once; our helpers ignore them
and obey their socket, so that the script's own handler can finish."""

ARGV_PAD = 1024
"""Blank bytes at the end of the server's command line: where the kernel does not let a child move
its command line, the rank's is written over the server's and must fit in."""


def ignored_signals() -> tuple[int, ...]:
    """The signals this process was started with as ignored (nohup, a shell's `&`).

    Call it before any handler is installed. SIGPIPE and SIGXFSZ are left out: Python ignores them
    itself at start, and subprocess gives a child the default again, as torchrun's ranks have it.
    """
    mine = {signal.SIGPIPE, signal.SIGXFSZ}
    return tuple(
        int(s)
        for s in sorted(signal.valid_signals() - mine)
        if signal.getsignal(s) is signal.SIG_IGN
    )


def is_kept_ignored(number: int) -> bool:
    """Whether a launcher does not catch this death signal: it was started by nohup, which is to
    keep it and its ranks alive when the terminal goes. Other signals that were ignored at the start
    are caught, as torchrun does: a shell has its background jobs ignore SIGINT."""
    return number == signal.SIGHUP and signal.getsignal(number) is signal.SIG_IGN


def server_words(
    fd: int, *, parent: int, ignored: Iterable[int], blocked: Iterable[int]
) -> list[str]:
    """The server's `sys.argv`. `fd`: its end of the socketpair; `ignored` and `blocked`: the signal
    dispositions and mask that ranks are to start with."""
    return [
        str(SERVER_FILE),
        f"--fd={fd}",
        f"--parent={parent}",
        f"--ignored-signals={','.join(map(str, ignored))}",
        f"--blocked-signals={','.join(str(int(s)) for s in blocked)}",
        " " * ARGV_PAD,
    ]


def warm_command(place: Path, *, idle: float, tells: int) -> list[str]:
    """The command line of a warm process, which is a fork server's before it has an agent: where it
    listens, seconds until it ends if nobody asks, the descriptor where it says that it is ready."""
    return [
        *(sys.executable, "-u", str(SERVER_FILE), f"--warm={place}", f"--idle={idle!r}"),
        *(f"--tells={tells}", " " * ARGV_PAD),
    ]


def start_server(
    *, ignored: Iterable[int], env: Mapping[str, str] | None = None
) -> tuple[subprocess.Popen[bytes], socket.socket]:
    """Start a fork server in a session of its own; return it and our end of the conversation.

    Call it from the main thread (the server's parent-death signal follows the thread). `ignored`
    is what `ignored_signals()` said at our start; `env` is the environment that ranks build on.
    The shielded signals are blocked over the start, so that none can kill the server before its
    first instruction, and none that is meant for us is lost.
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, SHIELDED)
    words = server_words(theirs.fileno(), parent=os.getpid(), ignored=ignored, blocked=blocked)
    try:
        with debugger.escaped():
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
