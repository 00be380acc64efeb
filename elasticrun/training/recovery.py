"""Functions that a rank can call again in the same process, as a rank of the next round.

`recoverable` runs the function in the calling thread. A second thread holds the connection to the
agent. When the round ends, this thread wakes the calling one: it shuts down the sockets of the
process groups and of the store, aborts the groups of other backends, and sends the calling thread
INTERRUPT every INTERRUPT_AFTER seconds, whose handler raises `RoundOver`. The exception leaves the
function; then the process groups are destroyed, the agent is notified, and the function is called
again once the next round has begun.

If an exception leaves the function earlier, the agent decides what it means. The loss of a peer
ends the round. Anything else is the rank's own failure, and is raised.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import signal
import socket
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from types import FrameType
from typing import Any, Final, ParamSpec, TypeVar

from elasticrun.wire import env
from elasticrun.wire.frames import FrameBuffer, FrameError, encode
from elasticrun.wire.progress import address, read_place
from elasticrun.wire.snapshots import (
    EnterRound,
    FromRecoverable,
    LeaveRound,
    Left,
    Raised,
    RecoverableHere,
    Returned,
    ToRecoverable,
)

SEND_LIMIT: Final = 5.0
"""Seconds for the agent to accept a message."""

ANSWER_LIMIT: Final = 10.0
"""Seconds for the agent to decide what an exception means; after that the exception is raised."""

INTERRUPT: Final = signal.SIGURG
"""The signal that interrupts the calling thread. It is ignored by default, so one that arrives late
does no harm. It ends sleeps, reads and waits for locks; C code that computes is not interrupted
before it returns."""

INTERRUPT_AFTER: Final = 1.0
"""Seconds after which a thread that has not left its collective gets INTERRUPT, and between two
attempts."""

MOST_IDLE: Final = 3
"""Maximum number of consecutive rounds without a new step that one process takes part in. After
that the process itself is suspect, and the rank gets a new one for the next round."""

_IMPORTLIB: Final = ("<frozen importlib._bootstrap>", "<frozen importlib._bootstrap_external>")

MAX_MESSAGE: Final = 1024
MAX_TRACEBACK: Final = 32 * 1024
READ_BYTES: Final = 64 * 1024

P = ParamSpec("P")
T = TypeVar("T")


class RoundOver(BaseException):
    """Raised in a recoverable function whose round has ended. Do not catch it."""


@dataclass(slots=True)
class _Kept:
    """An object that is kept, and what torch does not save of the modules in it: which of them are
    in training mode, which parameters require gradients."""

    value: Any
    stateless: bool
    modes: list[tuple[Any, bool]]
    gradients: list[tuple[Any, bool]]
    renewed: bool = False  # built in an earlier round

    def renew(self) -> None:
        """Restore modes and drop gradients: the failed step may have left the modules in evaluation
        mode, or with gradients."""
        self.renewed = True
        for module, training in self.modes:
            module.training = training
        for parameter, required in self.gradients:
            parameter.grad = None
            parameter.requires_grad_(required)


_kept: dict[str, _Kept] = {}
_running = False


def keep(name: str, build: Callable[[], T], *, stateless: bool = False) -> T:
    """The object that `build` returns: built once per process, and the same one in every call of a
    recoverable function in this process::

        model = training.keep("model", build_model)

    A Checkpointer that is given the object rolls it back. Modules (also in a tuple, list or dict)
    return to the mode in which they were built, without gradients. If no step in memory can be
    restored, the object is built again, because the failed round may have trained it.
    `stateless=True`: training does not change it (a tokenizer, a dataset), so it is kept even then.

    The object must not contain process groups, which end with their round: keep a module, not its
    DDP."""
    if name not in _kept:
        built = build()
        modules = _modules_in(built)
        modes = [(one, one.training) for top in modules for one in top.modules()]
        parameters = [(p, p.requires_grad) for top in modules for p in top.parameters()]
        _kept[name] = _Kept(built, stateless, modes, parameters)
    found: T = _kept[name].value
    return found


def keeps_trained_state() -> bool:
    """Whether this process keeps objects that an earlier round has trained."""
    return any(kept.renewed and not kept.stateless for kept in _kept.values())


def _modules_in(value: Any) -> list[Any]:
    """The modules of torch that an object is, or has in a tuple, list or dict."""
    if not (torch := sys.modules.get("torch")):
        return []
    several = value.values() if isinstance(value, dict) else value
    found = [*several] if isinstance(value, dict | list | tuple) else [value]
    return [one for one in found if isinstance(one, torch.nn.Module)]


def _renew_kept(*, restores: bool) -> None:
    for name, kept in list(_kept.items()):
        if kept.stateless or restores:
            kept.renew()
        else:
            del _kept[name]


def recoverable(function: Callable[P, T]) -> Callable[P, T]:
    """Make `function` one that healthy ranks call again in the same process after another rank or
    node has failed, joined or left::

        @training.recoverable
        def train() -> None:
            torch.distributed.init_process_group()
            model = training.keep("model", build_model)
            ...

        train()

    The function must create everything that depends on the ranks, process groups first, and restore
    its state (`Checkpointer.restore`). Under torchrun, or called in another thread than the main
    one, it is an ordinary call."""

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        global _running
        agent = None if _running or not _is_main() else _connect()
        if agent is None:
            return function(*args, **kwargs)
        _running = True
        try:
            return _Recovery(agent).run(lambda: function(*args, **kwargs))
        finally:
            _running = False

    return run


def _is_main() -> bool:
    return threading.current_thread() is threading.main_thread()


class _Agent:
    """The connection to the agent. Messages are sent by the calling thread and read by another."""

    def __init__(self, place: str) -> None:
        """Raises OSError or ValueError if the agent cannot be reached."""
        name, local_rank = read_place(place)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._frames = FrameBuffer(ToRecoverable)
        try:
            self._socket.settimeout(SEND_LIMIT)
            self._socket.connect(address(name))
            self.send(RecoverableHere(local_rank))
            self._socket.settimeout(None)
        except OSError:
            self._socket.close()
            raise
        os.register_at_fork(after_in_child=self._socket.close)

    def send(self, message: FromRecoverable) -> None:
        """Send a message. Raises OSError."""
        self._socket.sendall(encode(message))

    def receive(self) -> list[ToRecoverable]:
        """Block until messages arrive; none at the end of the connection."""
        while True:
            data = self._socket.recv(READ_BYTES)
            if not data:
                return []
            if found := list(self._frames.feed(data)):
                return found

    def close(self) -> None:
        """End the connection, also for a thread that reads it."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


def _connect() -> _Agent | None:
    """The connection; None without an agent."""
    if env.SNAPSHOTS not in os.environ and "elasticrun.training.checkpointing" not in sys.modules:
        return None
    from elasticrun.training.checkpointing.agent_connection import agent_address

    if not (place := agent_address()):
        return None
    try:
        return _Agent(place)
    except (OSError, ValueError) as error:
        warnings.warn(
            f"elasticrun: this rank cannot keep its process over a failure ({error})", stacklevel=4
        )
        return None


class _Recovery:
    """One recoverable call, over all its rounds.

    `_is_over` is set by the thread that listens, `_outside` by the one that calls. Each thread sets
    its flag before it reads the other one, so neither misses a round that ends during the call."""

    def __init__(self, agent: _Agent) -> None:
        self._agent = agent
        self._excepthook = sys.excepthook
        self._caller = threading.get_ident()
        self._interrupts = signal.getsignal(INTERRUPT) == signal.SIG_DFL
        if self._interrupts:  # else the script handles it
            signal.signal(INTERRUPT, self._on_interrupt)
        self._outside = threading.Event()  # the function does not run
        self._outside.set()
        self._is_over = False  # the round has ended
        self._inbox: SimpleQueue[ToRecoverable | None] = SimpleQueue()  # None: no agent
        self._idle = 0
        self._groups: list[Any] = []  # as they were when the round ended: the function may end them
        self._thread = threading.Thread(target=self._listen, name="elasticrun", daemon=True)
        self._thread.start()

    def run(self, call: Callable[[], T]) -> T:
        """Call the function until it returns, or fails in a way that ends this rank."""
        try:
            while True:
                step = _newest_step()
                try:
                    try:
                        return self._call(call)
                    finally:
                        self._stop_interrupts()
                except BaseException as error:
                    self._stop_interrupts()
                    if not self._must_leave(error, step):
                        raise
                    traceback.clear_frames(error.__traceback__)
                self._leave()
        finally:
            self._end()

    def _call(self, call: Callable[[], T]) -> T:
        self._outside.clear()
        if self._is_over:
            raise RoundOver("the round has ended")
        return call()

    def _stop_interrupts(self) -> None:
        """Stop raising RoundOver: the function has ended."""
        while not self._outside.is_set():
            with contextlib.suppress(RoundOver):
                self._outside.set()

    def _on_interrupt(self, signum: int, frame: FrameType | None) -> None:
        # not within an import, whose callbacks would swallow it: it is tried again
        importing = frame is not None and frame.f_code.co_filename in _IMPORTLIB
        if self._is_over and not self._outside.is_set() and not importing:
            raise RoundOver("the round has ended")

    def _must_leave(self, error: BaseException, step: int) -> bool:
        """Report the exception, unless the round is over, and wait for the agent's decision.
        Returns whether the round ends and this process takes part in the next one. `step`: the
        newest one when the function was called."""
        self._idle = 0 if _newest_step() > step else self._idle + 1
        if not isinstance(error, Exception | RoundOver) or self._idle > MOST_IDLE:
            return False
        if not self._is_over:
            words = "".join(traceback.format_exception(error))
            line = f"{type(error).__name__}: {error}"[:MAX_MESSAGE]
            raised = Raised(line, words[-MAX_TRACEBACK:], time.time_ns() // 1000)
            try:
                self._agent.send(raised)
            except OSError:
                return False
        try:
            return isinstance(self._inbox.get(timeout=ANSWER_LIMIT), LeaveRound)
        except Empty:
            return False

    def _leave(self) -> None:
        """End this round in this process, and wait for the next one. Raises what destroying the
        process groups raises, and ConnectionError without an agent."""
        # These are the last references to the groups: torch drops them without the GIL. If a DDP
        # had the last one, it would join gloo's threads with the GIL, and they may wait for it.
        groups = [*self._groups, *_groups()]
        _end_round()
        self._groups.clear()
        del groups
        order: ToRecoverable | None = LeaveRound()
        while isinstance(order, LeaveRound):  # again, if the next round ends before it has begun
            self._agent.send(Left())
            order = self._inbox.get()
        if not isinstance(order, EnterRound):
            raise ConnectionError("the agent has ended")
        if sys.excepthook.__module__ == "torch.distributed.distributed_c10d":
            sys.excepthook = self._excepthook  # each init_process_group wraps it once more
        _begin_round(order)

    def _end(self) -> None:
        if self._interrupts and signal.getsignal(INTERRUPT) == self._on_interrupt:
            signal.signal(INTERRUPT, signal.SIG_DFL)
        with contextlib.suppress(OSError):
            self._agent.send(Returned())
        self._agent.close()
        self._thread.join(INTERRUPT_AFTER)

    # ------------------------------------------------------------ in the other thread

    def _listen(self) -> None:
        with contextlib.suppress(OSError, FrameError):
            while messages := self._agent.receive():
                for message in messages:
                    self._take(message)
        self._inbox.put(None)

    def _take(self, message: ToRecoverable) -> None:
        self._is_over = isinstance(message, LeaveRound)
        if self._is_over:
            self._groups = _groups()
        self._inbox.put(message)
        while self._is_over and not self._outside.is_set():
            _wake_collectives()
            if not self._outside.wait(INTERRUPT_AFTER) and self._interrupts:
                signal.pthread_kill(self._caller, INTERRUPT)


def _newest_step() -> int:
    """The newest step that the script has reported to `progress` or a Checkpointer; -1: none."""
    newest = -1
    if connection := sys.modules.get("elasticrun.training.checkpointing.agent_connection"):
        newest = connection.costs.newest_step
    if reporting := sys.modules.get("elasticrun.training.reporting"):
        newest = max(newest, reporting.newest_step())
    return newest


# ------------------------------------------------------------ the end of a round


def _wake_collectives() -> None:
    """Make every collective of this process fail."""
    for descriptor in _gloo_sockets() | _store_sockets():
        with contextlib.suppress(OSError), _socket(descriptor) as one:
            one.shutdown(socket.SHUT_RDWR)
    for backend in _other_backends():
        with contextlib.suppress(Exception):
            backend.abort()


def _socket(descriptor: int) -> socket.socket:
    return socket.socket(fileno=os.dup(descriptor))


def _gloo_sockets() -> set[int]:
    """The sockets between ranks. Each gloo device has one epoll instance with a pipe, its listening
    TCP socket and its connections, and nothing else; event loops of other libraries also have an
    eventfd or a socket pair."""
    found: set[int] = set()
    for descriptor, target in _descriptors():
        if target == "anon_inode:[eventpoll]":
            found |= _peers_of(descriptor)
    return found


def _peers_of(epoll: int) -> set[int]:
    with contextlib.suppress(OSError, ValueError), open(f"/proc/self/fdinfo/{epoll}") as lines:
        watched = {int(line.split()[1]) for line in lines if line.startswith("tfd:")}
        targets = {one: os.readlink(f"/proc/self/fd/{one}") for one in watched}
        sockets = {one for one, target in targets.items() if target.startswith("socket:")}
        pipes = {one for one, target in targets.items() if target.startswith("pipe:")}
        if pipes and sockets and sockets | pipes == watched:
            kinds = {one: _kind(one) for one in sockets}
            if list(kinds.values()).count("listening") == 1 and "other" not in kinds.values():
                return {one for one, kind in kinds.items() if kind == "connected"}
    return set()


def _kind(descriptor: int) -> str:
    with _socket(descriptor) as one:
        if one.family not in (socket.AF_INET, socket.AF_INET6) or one.type != socket.SOCK_STREAM:
            return "other"
        listens = one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
        return "listening" if listens else "connected"


def _store_sockets() -> set[int]:
    """The connections to this round's store."""
    found = set()
    port = os.environ.get(env.MASTER_PORT, "")
    for descriptor, target in _descriptors():
        if target.startswith("socket:"):
            with contextlib.suppress(OSError), _socket(descriptor) as one:
                if _kind(descriptor) == "connected" and str(one.getpeername()[1]) == port:
                    found.add(descriptor)
    return found


def _descriptors() -> list[tuple[int, str]]:
    """Every open descriptor of this process, and what it refers to."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            found.append((int(name), os.readlink(f"/proc/self/fd/{name}")))
    return found


def _other_backends() -> list[Any]:
    """The backends of this process's groups that are not gloo."""
    found: list[Any] = []
    for group in _groups():
        for device in list(getattr(group, "_device_types", ())):
            with contextlib.suppress(Exception):
                backend = group._get_backend(device)
                if backend.name() != "gloo" and backend not in found:
                    found.append(backend)
    return found


def _groups() -> list[Any]:
    """All process groups of this process."""
    c10d = sys.modules.get("torch.distributed.distributed_c10d")
    return list(c10d._world.pg_map) if c10d else []


def _end_round() -> None:
    """Destroy what belongs to the round."""
    if checkpointer := sys.modules.get("elasticrun.training.checkpointing.checkpointer"):
        checkpointer.end_round()
    if (dist := sys.modules.get("torch.distributed")) and dist.is_available():
        _reset_frameworks()
        if dist.is_initialized():
            dist.destroy_process_group()
        # An interrupted init_process_group has counted its group. The count is part of the name by
        # which ranks find each other in the store, and it begins with 0 in new ranks.
        dist.distributed_c10d._world.group_count = 0
    gc.collect()


def _reset_frameworks() -> None:
    """Reset what frameworks remember about the ranks."""
    if accelerate := sys.modules.get("accelerate.state"):
        accelerate.AcceleratorState._reset_state(reset_partial_state=True)
        accelerate.GradientState._reset_state()
    if megatron := sys.modules.get("megatron.core.parallel_state"):
        megatron.destroy_model_parallel()


def _begin_round(entry: EnterRound) -> None:
    """Give this process the output files, environment and state of a new rank of the round."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()
    for descriptor, path in ((1, entry.stdout), (2, entry.stderr)):
        if path:
            opened = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)  # as at a start
            os.dup2(opened, descriptor)
            os.close(opened)
    os.environ.update(entry.environ)
    _renew_kept(restores=entry.restores)
    if reporting := sys.modules.get("elasticrun.training.reporting"):
        reporting.begin_round()
    if connection := sys.modules.get("elasticrun.training.checkpointing.agent_connection"):
        connection.costs.begin_round()
    if work := sys.modules.get("elasticrun.training.work"):
        work.begin_round()
