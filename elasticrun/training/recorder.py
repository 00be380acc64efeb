"""Splits a rank's steps into its own work and waiting for others, using torch's flight recorders.

A recorder keeps the newest collectives of the process in a ring. They give the rank's own part:

* Backends for the CPU (gloo): only the time at which the rank *entered* each collective is known.
  When a rank enters the last collective of a step, its own work for that step is done; the rest is
  waiting for the others (and the optimizer, which is short). If a step waits several times (FSDP),
  the earlier waits are indistinguishable from work: all ranks then appear to have the same own
  part, and none is found slow.
* Backends for accelerators (NCCL): the recorder has the duration of each collective on the device,
  from the arrival of this rank until all have arrived. The last rank to arrive has the shortest
  duration. The rest of the step is the rank's own part.

torch is not imported here: if the script has not imported it, there is nothing to read.
"""

from __future__ import annotations

import os
import sys
from bisect import bisect_right
from collections.abc import MutableMapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Final

from elasticrun.training.monitor.recorders import CPU, FlightRecorder, Row, groups, recorders
from elasticrun.wire import env
from elasticrun.wire.progress import Own

SMALL_RING: Final = "128"
"""Number of collectives kept on a host without an accelerator: a read costs 10 microseconds for
each. With NCCL, torch's default of 2000 stays, because users read it after a hang, and a read uses
only the CPU.
"""

ACCELERATORS: Final = ("/dev/nvidiactl", "/dev/kfd", "/dev/davinci_manager")
"""Device files that reveal a host with accelerators without any library."""

SETTLED: Final = 10**9
"""Nanoseconds. If a collective that began this long after a step has finished, then the step's
collectives have finished too, and torch's watchdog (it polls ten times a second) has recorded that.
"""


def prepare(environ: MutableMapping[str, str]) -> None:
    """Set the variables that the recorder needs; call before the process group is created.
    Variables set by the user are kept."""
    named = env.FLIGHT_RECORDER_SIZE in environ or env.NCCL_TRACE_SIZE in environ
    if not named and not any(os.path.exists(path) for path in ACCELERATORS):
        environ[env.FLIGHT_RECORDER_SIZE] = SMALL_RING
    environ.setdefault(env.NCCL_ENABLE_TIMING, "1")


@dataclass(frozen=True, slots=True)
class Collective:
    """One entry of a recorder."""

    number: int  # counts from 0; the ring holds the newest
    created: int  # when this rank called it: nanoseconds of the wall clock
    seconds: float | None  # duration on the device; None: unknown (so far)


@dataclass(frozen=True, slots=True)
class RecorderState:
    """The content of a recorder; `timed` if its entries have, or will have, durations."""

    knows: Own
    collectives: tuple[Collective, ...] = ()
    timed: bool = False


def read_recorders() -> RecorderState:
    """Read the recorders of this process; takes a few milliseconds for a hundred entries."""
    dist = sys.modules.get("torch.distributed")
    if dist is None or not dist.is_available() or not dist.is_initialized():
        return RecorderState(Own.ALONE)
    if dist.get_world_size() < 2:
        return RecorderState(Own.ALONE)
    known = groups()
    on_cpu = {name for group in known for name, types in group.devices.items() if CPU in types}
    plain: list[Collective] = []
    for recorder in recorders(known):
        seen = _entries(recorder)
        if seen and not recorder.backends & on_cpu:
            return RecorderState(Own.KNOWN, seen, timed=True)
        plain += seen
    return RecorderState(Own.KNOWN, tuple(plain)) if plain else RecorderState(Own.UNAVAILABLE)


def _entries(recorder: FlightRecorder) -> tuple[Collective, ...]:
    return tuple(map(_collective, recorder.whole()[1]))


def _collective(entry: Row) -> Collective:
    took = entry.get("duration_ms")
    seconds = None if took is None else float(took) / 1e3
    return Collective(int(entry["record_id"]), int(entry["time_created_ns"]), seconds)


@dataclass(frozen=True, slots=True)
class Split:
    """Own part and waiting of several steps (seconds, sums over `steps`); the caller drops the
    first `used` marks."""

    steps: int = 0
    own: float = 0.0
    waited: float = 0.0
    used: int = 0


def split(marks: Sequence[int], state: RecorderState) -> Split:
    """Split the steps between these times (nanoseconds of the wall clock, in order)."""
    return (
        _by_time(marks, state.collectives) if state.timed else _by_entry(marks, state.collectives)
    )


def _by_entry(marks: Sequence[int], seen: Sequence[Collective]) -> Split:
    """A step's own part ends when its last collective is entered. A step without a collective is
    skipped: it did not wait, or its entry has left the ring."""
    steps, own, waited = 0, 0, 0
    created = sorted(one.created for one in seen)
    for began, ended in zip(marks, islice(marks, 1, None), strict=False):
        newest = bisect_right(created, ended) - 1
        if newest >= 0 and created[newest] > began:
            steps += 1
            own += created[newest] - began
            waited += ended - created[newest]
    return Split(steps, own / 1e9, waited / 1e9, max(0, len(marks) - 1))


def _by_time(marks: Sequence[int], seen: Sequence[Collective]) -> Split:
    """A step's waiting is the sum of the durations of its collectives. Steps that are not complete
    in the ring are skipped. Steps whose collectives may not all be finished are left for the next
    call. An older collective without a duration (a part of a coalesced one) will never have one."""
    steps, own, waited, used = 0, 0.0, 0.0, 0
    seen = sorted(seen, key=lambda one: one.created)
    created = [one.created for one in seen]
    finished = max((one.created for one in seen if one.seconds is not None), default=0)
    whole_from = created[0] if seen and seen[0].number > 0 else 0
    for began, ended in zip(marks, islice(marks, 1, None), strict=False):
        if ended > finished - SETTLED:
            break
        used += 1
        inside = seen[bisect_right(created, began) : bisect_right(created, ended)]
        if inside and began >= whole_from:
            seconds = (ended - began) / 1e9
            took = sum(one.seconds for one in inside if one.seconds is not None)
            steps += 1
            waited += min(seconds, took)
            own += max(0.0, seconds - took)
    return Split(steps, own, waited, used)
