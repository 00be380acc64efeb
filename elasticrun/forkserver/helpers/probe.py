"""What one probe does: a timed matmul, a word to its group, a timed all_reduce.

It says each phase when it enters it: one that is killed there has failed there. A rank whose own
part went wrong tells the others by the store before any collective begins, so that they need not
wait for it until the limit.
"""

from __future__ import annotations

import importlib
import math
import os
import re
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any, Final

from elasticrun.wire import env
from elasticrun.wire.env import OMP_NUM_THREADS, FaultKind
from elasticrun.wire.spawning import ProbePlan, ProbeSaid

START: Final = "start"
COMPUTE: Final = "compute"
MEET: Final = "meet"
COMM: Final = "comm"
DONE: Final = "done"
"""The words of `wire.messages.ProbePhase`, which is not imported here: it would double what the
fork server has of ours in memory."""

OWN_PHASES: Final = (START, COMPUTE)
"""Whoever fails here has failed with no part of any other node in it."""

TELL_LIMIT: Final = 5.0
"""Seconds for telling the others of a failure, and at most half of what is left until the limit: a
store that cannot be reached must not make a failed probe look like one that hangs."""

MAX_REASON: Final = 400
"""Characters of a reason."""

SLOW_PIECE: Final = 0.005
"""A planted slowness takes a matmul or an all_reduce for this many seconds at the least, and so can
be told from what a busy machine makes of a piece of work that takes less."""

ROUGHLY: Final = 0.01
"""How far a number may be from what it must be: the rounding of bfloat16 is 1/256, and a library
may add in another order the next time; a wrong result is far above."""

_PLACE: Final = re.compile(r"\[[^]\s]+:\d+\] ")
"""`[/pytorch/third_party/gloo/.../pair.cc:537] `"""

Say = Callable[[ProbeSaid], None]


class Failed(Exception):
    """The probe found something wrong; the text is a clause about it."""


def run(key: int, plan: ProbePlan, say: Say) -> None:
    """Probe as planned. Always ends by saying a ProbeSaid with `done`, unless it is killed."""
    one = _Probe(key, plan, say)
    try:
        excuse = one.work()
    except Exception as error:
        one.release_others()
        own = one.phase in OWN_PHASES
        one.say(done=True, own=own, reason=clause(error))
        return
    if excuse:
        one.say(done=True, excused=True, reason=excuse)
    else:
        one.phase = DONE
        one.say(done=True, ok=True)


def clause(error: BaseException | str) -> str:
    """What went wrong, in one line of bounded length, without C++ stacks and places in sources."""
    text = str(error)
    if not isinstance(error, Failed | RuntimeError | str):
        text = f"{type(error).__name__}: {text}" if text else type(error).__name__
    for chatter in ("Exception raised from", "This is typically caused by"):
        text = text.split(chatter, 1)[0]
    text = " ".join(_PLACE.sub("", text).split()).rstrip(".")
    return text if len(text) <= MAX_REASON else text[: MAX_REASON - 3] + "..."


class _Probe:
    """One probe under way. Times are seconds."""

    def __init__(self, key: int, plan: ProbePlan, say: Say) -> None:
        self._key = key
        self._plan = plan
        self._say = say
        self._end = time.monotonic() + plan.limit
        planted = env.own_faults(plan.fault)
        self._fail = env.fault_value(planted, FaultKind.PROBE_FAIL)
        self._hang = env.fault_value(planted, FaultKind.PROBE_HANG)
        self._slow = env.slowness(planted)
        self._torch: Any = None
        self._device: Any = None
        self._store: Any = None
        self._compute = 0.0
        self._transfers: list[float] = []
        self._timed = 0.0
        self.phase = START

    def work(self) -> str:
        """All of it; "", or why it could not be finished through no fault of this node. Raises
        whatever goes wrong."""
        import torch

        self._torch = torch
        self._use_threads()
        try:
            self._enter(COMPUTE)
            self._take_device()
            if self._plan.matrix:
                self._multiply()
        except Exception as error:
            self._tell_others(clause(error))
            raise
        if self._plan.world_size == 1:
            return ""
        self._enter(MEET)
        excuse = self._meet()
        if not excuse:
            self._enter(COMM)
            self._reduce()
            self._part()
        return excuse

    def say(self, **more: Any) -> None:
        """Tell how it stands; `more` are fields of ProbeSaid."""
        said = ProbeSaid(
            self._key,
            self.phase,
            more.pop("done", False),
            compute=self._compute,
            transfers=tuple(self._transfers),
            timed=self._timed,
            **more,
        )
        self._say(said)

    def _enter(self, phase: str) -> None:
        self.phase = phase
        self.say()
        while self._hang == phase:
            signal.pause()

    def _left(self) -> timedelta:
        return timedelta(seconds=max(0.001, self._end - time.monotonic()))

    # ------------------------------------------------------------ its own part

    def _use_threads(self) -> None:
        """As many threads as a rank would have. The fork server may have read another number."""
        given = os.environ.get(OMP_NUM_THREADS, "")
        cores = len(os.sched_getaffinity(0))
        threads = int(given) if given.isdecimal() and int(given) else cores
        if self._torch.get_num_threads() > threads:
            self._torch.set_num_threads(threads)

    def _take_device(self) -> None:
        name = self._plan.device
        if name == "cpu":
            self._device = self._torch.device("cpu")
            return
        if name == "npu":
            importlib.import_module("torch_npu")  # gives torch its `npu`
        module = getattr(self._torch, name)
        count = module.device_count()
        if not count:
            raise Failed(f"torch finds no {name} device")
        self._device = self._torch.device(name, self._plan.device_index % count)
        module.set_device(self._device)

    def _settle(self) -> None:
        """Wait until the device has done what it was given."""
        if self._device.type != "cpu":
            getattr(self._torch, self._device.type).synchronize()

    def _multiply(self) -> None:
        torch, plan = self._torch, self._plan
        if self._fail == "compute":
            raise Failed("a planted fault")
        kind = getattr(torch, plan.dtype)
        source = torch.Generator(self._device).manual_seed(plan.matrix)
        shape = (plan.matrix, plan.matrix)

        def fresh() -> Any:
            return torch.rand(shape, generator=source, device=self._device).to(kind)

        left, right, product = fresh(), fresh(), torch.empty(shape, dtype=kind, device=self._device)
        for _ in range(max(1, plan.warmup)):
            torch.mm(left, right, out=product)
        self._check(left, right, product)
        first = product.clone()
        self._settle()
        began, worked = time.perf_counter(), time.thread_time()
        for _ in range(plan.matmuls):
            torch.mm(left, right, out=product)
        self._settle()
        own = time.perf_counter() - began
        if self._device.type == "cpu":
            own = min(own, time.thread_time() - worked)  # without waits for a core
        self._be_slow(own, plan.matmuls)
        took = time.perf_counter() - began
        self._compute = took / max(1, plan.matmuls)
        self._timed += took
        if self._fail == "wrong":
            product[0, 0] += plan.matrix
        self._check(left, right, product)
        if not bool(((product - first).abs() <= ROUGHLY * first).all()):
            raise Failed("the matmul computed a wrong result: another one than the first time")

    def _check(self, left: Any, right: Any, product: Any) -> None:
        """The product is finite, and right as far as the sums of its rows tell."""
        torch = self._torch
        if not bool(torch.isfinite(product).all()):
            raise Failed("the matmul computed a wrong result: it is not finite")
        ones = torch.ones(self._plan.matrix, dtype=torch.float32, device=self._device)
        sums = product.float() @ ones
        wanted = left.float() @ (right.float() @ ones)
        worst = float(((sums - wanted).abs() / wanted).max())
        if not worst <= ROUGHLY:
            raise Failed(f"the matmul computed a wrong result: row sums are off by {worst:.2%}")

    # ------------------------------------------------------------ the group

    def _connect(self, limit: timedelta) -> None:
        import torch.distributed as dist

        plan = self._plan
        make: Any = dist.TCPStore  # type: ignore[attr-defined]
        store = make(
            plan.store_host,
            plan.store_port,
            is_master=False,
            timeout=limit,
            wait_for_workers=False,
        )
        prefixed: Any = dist.PrefixStore  # type: ignore[attr-defined]
        self._store = prefixed(plan.check, store)

    def _tell_others(self, reason: str) -> None:
        """This rank's own part went wrong: the others need not wait for it."""
        if self._plan.world_size == 1:
            return
        with suppress(Exception):  # the others wait for their limit; our reason stands
            self._connect(min(self._left() / 2, timedelta(seconds=TELL_LIMIT)))
            self._store.set("go", f"failed by itself: {reason}")

    def _meet(self) -> str:
        """Form the process group, once every rank has said that its own part went well."""
        import torch.distributed as dist

        plan = self._plan
        self._connect(self._left())
        if self._store.add("well", 1) == plan.world_size:
            self._store.set("go", "ok")
        self._store.wait(["go"], self._left())
        word = self._store.get("go").decode(errors="replace")
        if word != "ok":
            return clause(word)
        dist.init_process_group(
            plan.backend,
            store=self._store,
            rank=plan.rank,
            world_size=plan.world_size,
            timeout=self._left(),
        )
        return ""

    def _reduce(self) -> None:
        self._agree(4)
        if self._fail == "comm":
            raise Failed("a planted fault")
        torch = self._torch
        for size in self._plan.sizes:
            own = self._agree(size)
            buffer = torch.zeros(max(1, size // 4), dtype=torch.float32, device=self._device)
            self._agree(4)  # all begin together
            began = time.perf_counter()
            for _ in range(self._plan.transfers):
                torch.distributed.all_reduce(buffer)
                self._be_slow(own, 1)
            self._settle()
            took = time.perf_counter() - began
            self._transfers.append(took / max(1, self._plan.transfers))
            self._timed += took

    def _agree(self, size: int) -> float:
        """Warm up with all_reduces of ones, each of which must give the sum; what the fastest
        took."""
        torch = self._torch
        best = math.inf
        for _ in range(max(1, self._plan.warmup)):
            buffer = torch.ones(max(1, size // 4), dtype=torch.float32, device=self._device)
            self._settle()
            began = time.perf_counter()
            torch.distributed.all_reduce(buffer)
            self._settle()
            best = min(best, time.perf_counter() - began)
            low, high = float(buffer.min()), float(buffer.max())
            if not low == high == self._plan.world_size:
                raise Failed(
                    f"the all_reduce gave a wrong sum: {low:g} to {high:g} "
                    f"in the place of {self._plan.world_size}"
                )
        return best

    def _be_slow(self, took: float, pieces: int) -> None:
        """Where slowness was planted: go on when so many pieces of work, which have taken `took`
        seconds, have taken so many times as long. In all_reduces the others wait for it. No core is
        used meanwhile: a slow machine does not slow others down, and agents may share one here."""
        if self._slow == 1.0:
            return
        self._settle()
        time.sleep((self._slow - 1.0) * max(took, pieces * SLOW_PIECE))

    def _part(self) -> None:
        """Nobody goes before all have what they came for: with NCCL a rank that has sent all may
        still have to be there while it arrives."""
        if self._store.add("ended", 1) == self._plan.world_size:
            self._store.set("over", "ok")
        self._store.wait(["over"], self._left())

    def release_others(self) -> None:
        """This rank has failed among them: they need not wait at the end."""
        if self.phase != COMM:
            return
        with suppress(Exception):  # the store is what failed; they wait for their limit
            self._store.set("over", "failed")
