"""How the server gets ready: what it imports, and whether its forks can be trusted."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from elasticrun.forkserver import linux, trust
from elasticrun.forkserver.child import Birth
from elasticrun.forkserver.lazy import Stash
from elasticrun.forkserver.learn import Lessons
from elasticrun.forkserver.preload import (
    ONE_BY_ONE,
    Poisoned,
    Preloader,
    installed_folders,
)
from elasticrun.forkserver.program import hides_frames
from elasticrun.wire.entry import EntryKind
from elasticrun.wire.env import PYTHON_EXEC
from elasticrun.wire.spawner import Configure

if TYPE_CHECKING:
    from elasticrun.forkserver.warm.keeper import Stock

FOR_SNAPSHOTS = ("torch.distributed.tensor", "torch.distributed.checkpoint", "torch._dynamo")
"""What a Checkpointer imports of torch, and torch's optimizers when they are made: more than a
second of one core; every life of every rank of a script that names one would pay it."""

CHECKPOINTER = "elasticrun.checkpointing.checkpointer"
"""Some 50 ms more. Not all of TRAINING, whose import looks at the rank's environment."""

TRAINING = "elasticrun.training"
"""By this name `--preload` asks for it where the script's own text names no Checkpointer."""


@dataclass
class Prepared:
    """What came of it; `mode` is fork or exec, `reason` why it is exec where a fork was wanted."""

    birth: Birth
    stash: Stash
    preloader: Preloader
    lessons: Lessons
    learn: bool
    python: str
    mode: str = "exec"
    reason: str = ""
    torch: str = ""
    import_seconds: float = 0.0
    can_fork_stores: bool = False
    remarks: list[str] = field(default_factory=list)


def prepare(
    configure: Configure, birth: Birth, refused: list[str], stock: Stock | None = None
) -> Prepared:
    """Import what is to be shared and look at the result. Raises Poisoned where a preloaded
    module has spoiled this process; then it must be begun anew with that module in `refused`.
    `stock`: what a warm process has imported, of which this one is a fork."""
    stash = Stash(birth.baseline) if stock is None else stock.stash
    preloader = Preloader(stash, configure.learn) if stock is None else stock.preloader
    prepared = Prepared(
        birth=birth,
        stash=stash,
        preloader=preloader,
        lessons=Lessons(configure.preload, installed_folders()),
        learn=configure.learn,
        python=os.environ.get(PYTHON_EXEC, ""),
    )
    if configure.launch == "exec":
        return prepared
    started = time.monotonic()
    prepared.reason = _get_ready(prepared, configure, refused)
    prepared.import_seconds = time.monotonic() - started
    if configure.entry.kind is EntryKind.COMMAND:
        prepared.reason = ""  # nobody expected a command to be forked
    elif not prepared.reason:
        prepared.mode = "fork"
        prepared.lessons = Lessons({*configure.preload, *sys.modules}, installed_folders())
    return prepared


def _get_ready(prepared: Prepared, configure: Configure, refused: list[str]) -> str:
    """The reason for exec, or empty."""
    reason = trust.before_import(configure.entry, configure.numa, os.environ)
    if linux.thread_count() > 1:
        return reason or "a .pth file or sitecustomize has started a thread"
    backend = trust.untested_backend(os.environ)
    if backend:
        os.environ[trust.AUTOLOAD] = "0"
    alone = bool(reason or backend)
    if configure.aside and ONE_BY_ONE not in refused:
        failure = aside(lambda: _imports(prepared, configure, refused, alone=alone))
    else:
        failure = _imports(prepared, configure, refused, alone=alone)
    prepared.preloader.look_at_all()
    verdict = failure or trust.build_reason() or _about_torch(trust.trial())
    prepared.can_fork_stores = not (failure or verdict)
    reason = reason or backend or verdict
    if not reason:
        prepared.stash.seal()
        reason = trust.shadowed(configure.entry, prepared.stash.top_names(), os.environ)
    if not reason and not hides_frames():
        prepared.remarks.append("this interpreter shows a frame of ours below the script's")
    return reason


def aside(work: Callable[[], str]) -> str:
    """Do it with cores that nobody else wants: in a thread that the kernel runs only then, for what
    a whole process has given away it may not take back, and forks would inherit it."""
    found: list[str] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))  # 0: this thread
            found.append(work())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    while linux.has_thread(thread.native_id or 0):  # its end is told before it is one
        os.sched_yield()
    if errors:
        raise errors[0]
    return found[0]


def _about_torch(verdict: str) -> str:
    return f"torch cannot be shared: {verdict}" if verdict else ""


def _imports(prepared: Prepared, configure: Configure, refused: list[str], *, alone: bool) -> str:
    """Import torch, and unless ranks will be exec'd, what --preload names."""
    try:
        if not prepared.stash.roots:  # else it was imported in a warm process
            prepared.preloader.import_torch()
    except Poisoned as poison:
        return _about_torch(poison.reason)
    except (Exception, SystemExit) as error:
        return f"torch cannot be imported here ({type(error).__name__}: {error})"[:300]
    prepared.torch = str(getattr(sys.modules["torch"], "__version__", "unknown"))
    if not alone:
        modules = dict.fromkeys(configure.preload)
        snapshots = TRAINING in modules or trust.takes_snapshots(configure.entry)
        if snapshots:
            modules = dict.fromkeys([*modules, *FOR_SNAPSHOTS])
            modules.pop(TRAINING, None)
        prepared.remarks += prepared.preloader.import_modules(modules, refused)
        if snapshots:
            prepared.preloader.import_own(CHECKPOINTER)
    return ""
