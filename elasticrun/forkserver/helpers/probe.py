"""The work of one probe: a timed matmul, a meeting with its group, a timed all_reduce.

It reports each phase as it enters it, so a probe that is killed has failed in the last phase
reported. A rank whose own part failed writes that to the store before any collective starts, so
that the others need not wait until the limit.
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
"""The values of `wire.messages.ProbePhase`. That module is not imported here: it would double the
memory that the fork server needs for our modules.
"""

OWN_PHASES: Final = (START, COMPUTE)
"""A failure in these phases involves no other node."""

REPORT_LIMIT: Final = 5.0
"""Seconds for reporting a failure to the others, and at most half of the time left: an unreachable
store must not make a failed probe look like a hanging one.
"""

MAX_REASON: Final = 400
"""Maximum characters of a reason."""

SLOW_PIECE: Final = 0.005
"""With an injected slowness, a matmul or an all_reduce counts as at least this many seconds, so
that the slowness stands out from the noise of a busy machine on shorter work.
"""

ROUGHLY: Final = 0.01
"""Relative tolerance of results. The rounding of bfloat16 is 1/256, and a library may add in
another order the next time; a wrong result is far above.
"""

_PLACE: Final = re.compile(r"\[[^]\s]+:\d+\] ")
"""A source location, such as `[/pytorch/third_party/gloo/.../pair.cc:537] `."""

Send = Callable[[ProbeSaid], None]


class Failed(Exception):
    """The probe found a fault; the text is a clause about it."""


def run(key: int, plan: ProbePlan, send: Send) -> None:
    """Run the probe as planned. Always ends with a ProbeSaid with `done`, unless it is killed."""
    one = _Probe(key, plan, send)
    try:
        excuse = one.work()
    except Exception as error:
        one.release_others()
        own = one.phase in OWN_PHASES
        one.report(done=True, own=own, reason=clause(error))
        return
    if excuse:
        one.report(done=True, excused=True, reason=excuse)
    else:
        one.phase = DONE
        one.report(done=True, ok=True)


def clause(error: BaseException | str) -> str:
    """The error as one line of bounded length, without C++ stacks and source locations."""
    text = str(error)
    if not isinstance(error, Failed | RuntimeError | str):
        text = f"{type(error).__name__}: {text}" if text else type(error).__name__
    for chatter in ("Exception raised from", "This is typically caused by"):
        text = text.split(chatter, 1)[0]
    text = " ".join(_PLACE.sub("", text).split()).rstrip(".")
    return text if len(text) <= MAX_REASON else text[: MAX_REASON - 3] + "..."


class _Probe:
    """A running probe. Times are seconds."""

    def __init__(self, key: int, plan: ProbePlan, send: Send) -> None:
        self._key = key
        self._plan = plan
        self._send = send
        self._end = time.monotonic() + plan.limit
        planted = env.read_own_faults(plan.fault)
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
        """Run all phases. Return "", or why they could not be completed through no fault of this
        node. Raises whatever goes wrong."""
        import torch

        self._torch = torch
        self._use_threads()
        try:
            self._enter(COMPUTE)
            self._take_device()
            if self._plan.matrix:
                self._multiply()
        except Exception as error:
            self._report_failure(clause(error))
            raise
        if self._plan.world_size == 1:
            return ""
        self._enter(MEET)
        excuse = self._meet()
        if not excuse:
            self._enter(COMM)
            self._reduce()
            self._wait_for_all()
        return excuse

    def report(self, **more: Any) -> None:
        """Report the current state; `more` are fields of ProbeSaid."""
        message = ProbeSaid(
            self._key,
            self.phase,
            more.pop("done", False),
            compute=self._compute,
            transfers=tuple(self._transfers),
            timed=self._timed,
            **more,
        )
        self._send(message)

    def _enter(self, phase: str) -> None:
        self.phase = phase
        self.report()
        while self._hang == phase:
            signal.pause()

    def _left(self) -> timedelta:
        return timedelta(seconds=max(0.001, self._end - time.monotonic()))

    # ------------------------------------------------------------ its own part

    def _use_threads(self) -> None:
        """Use as many threads as a rank would. The number that the fork server has read may
        differ."""
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
            importlib.import_module("torch_npu")  # registers `torch.npu`
        module = getattr(self._torch, name)
        count = module.device_count()
        if not count:
            raise Failed(f"torch finds no {name} device")
        self._device = self._torch.device(name, self._plan.device_index % count)
        module.set_device(self._device)

    def _settle(self) -> None:
        """Wait until the device has finished all queued work."""
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
            own = min(own, time.thread_time() - worked)  # excludes waits for a core
        self._be_slow(own, plan.matmuls)
        took = time.perf_counter() - began
        self._compute = took / max(1, plan.matmuls)
        self._timed += took
        if self._fail == "wrong":
            product[0, 0] += plan.matrix
        self._check(left, right, product)
        if not bool(((product - first).abs() <= ROUGHLY * first).all()):
            raise Failed("the matmul computed a wrong result: it differs from the first one")

    def _check(self, left: Any, right: Any, product: Any) -> None:
        """Check that the product is finite and, by its row sums, correct."""
        torch = self._torch
        if not bool(torch.isfinite(product).all()):
            raise Failed("the matmul computed a wrong result: it is not finite")
        ones = torch.ones(self._plan.matrix, dtype=torch.float32, device=self._device)
        sums = product.float() @ ones
        expected = left.float() @ (right.float() @ ones)
        worst = float(((sums - expected).abs() / expected).max())
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

    def _report_failure(self, reason: str) -> None:
        """Report that this rank's own part failed, so that the others do not wait for it."""
        if self._plan.world_size == 1:
            return
        with suppress(Exception):  # they wait until their limit; our reason is reported
            self._connect(min(self._left() / 2, timedelta(seconds=REPORT_LIMIT)))
            self._store.set("go", f"failed by itself: {reason}")

    def _meet(self) -> str:
        """Form the process group once every rank has reported success of its own part. Returns "",
        or the reason of another rank that has failed."""
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
            self._agree(4)  # start together
            began = time.perf_counter()
            for _ in range(self._plan.transfers):
                torch.distributed.all_reduce(buffer)
                self._be_slow(own, 1)
            self._settle()
            took = time.perf_counter() - began
            self._transfers.append(took / max(1, self._plan.transfers))
            self._timed += took

    def _agree(self, size: int) -> float:
        """Warm up with all_reduces of ones, checking each sum; return the time of the fastest."""
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
                    f"instead of {self._plan.world_size}"
                )
        return best

    def _be_slow(self, took: float, pieces: int) -> None:
        """With an injected slowness: sleep until `pieces` pieces of work, which took `took`
        seconds, have taken `_slow` times as long. In all_reduces the other ranks wait for this one.
        Sleeping uses no core: a slow machine does not slow down others, and in tests agents share
        one."""
        if self._slow == 1.0:
            return
        self._settle()
        time.sleep((self._slow - 1.0) * max(took, pieces * SLOW_PIECE))

    def _wait_for_all(self) -> None:
        """Wait until all ranks have finished: with NCCL a rank that has sent everything may have to
        stay alive while its data arrives."""
        if self._store.add("ended", 1) == self._plan.world_size:
            self._store.set("over", "ok")
        self._store.wait(["over"], self._left())

    def release_others(self) -> None:
        """After a failure of this rank in the collective phase: end the others' wait at the
        end."""
        if self.phase != COMM:
            return
        with suppress(Exception):  # the store itself failed; the others wait until their limit
            self._store.set("over", "failed")
