"""The ledger in words: the share of time spent training, where the rest went, and which setting
would have saved most.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from elasticrun.core.persisted import LedgerEnd
from elasticrun.core.sight.picture import Goodput, LedgerRow
from elasticrun.core.words import plural, span
from elasticrun.wire.messages import JobSpec

MICROS = 1_000_000

MIN_SAVED = 0.005
"""Advice is given only if it would have saved at least this share of all slots' time."""

MIN_WALL = 600 * MICROS
"""Microseconds that a job must run before it gets advice. A job that ran this long logs its goodput
at the end even if no round was lost."""

MIN_LOSS = 50_000
"""Losses below this many microseconds of the whole job's time are not mentioned."""

WORDS = {
    "node_lost": "node lost",
    "node_slow": "node slow",
    "rank_failed": "rank failure",
    "preempted": "preemption",
    "scaled": "change of size",
}
"""Display names of causes that differ from the cause's own name."""

WITH_MEMORY = ("node_lost", "node_slow", "preempted")
"""Causes for which the snapshots in the memory of a node are lost too."""

PLANNED = ("scaled", "operator")
"""Causes that are not failures."""

DEFAULT_HANG_LIMIT = 300 * MICROS
"""Microseconds for which --on-hang=restart usually waits before it ends a round that hangs
(`stillness.DEFAULT_LIMIT`)."""

HANGING = "hanging"
"""Display name of time in hangs; hangs that are part of incidents are subtracted."""

KINDS = (
    ("hang", HANGING),
    ("save", "checkpoints"),
    ("wait", "waits for one rank"),
    ("slow", "slow nodes"),
    ("start", "start"),
    ("idle", "idle"),
    ("unknown", "not known"),
)
"""Categories and their display names, in the order in which the line lists them."""


@dataclass(frozen=True, slots=True)
class Account:
    """The totals of the ledger at one moment."""

    book: Mapping[tuple[str, str], int]  # slot-microseconds by category and cause
    total: int  # slot-microseconds in all categories
    wall: int  # microseconds in which any slot was held
    trained: int  # of these, spent on steps that were kept
    ends: tuple[LedgerEnd, ...]
    saves: int  # number of saves, summed over all slots
    steps_reported: bool  # whether steps are reported
    recoveries: tuple[float, ...] = ()  # for each restart, seconds from running to training
    ended: bool = False  # the last of `ends` ended the job: no round followed
    downtime: Mapping[str, float] = field(default_factory=dict)
    """Seconds without training, by cause, as incidents count them."""
    hung: float = 0.0  # of these, in hangs

    def of(self, *categories: str) -> int:
        """Slot-microseconds in these categories."""
        return sum(micros for (one, _), micros in self.book.items() if one in categories)

    @property
    def useful(self) -> int:
        return self.of("step", "moving")


def goodput(found: Account, spec: JobSpec) -> Goodput:
    """The account as a record for people and programs."""
    total, price = found.total, spec.watch.slot_price
    ettr = min(1.0, found.trained / found.wall) if found.steps_reported and found.wall else -1.0
    rows = tuple(
        LedgerRow(*key, micros / MICROS)
        for key, micros in sorted(found.book.items(), key=lambda one: (-one[1], one[0]))
        if micros
    )
    return Goodput(
        name="goodput" if found.steps_reported else "uptime",
        share=found.useful / total if total else 0.0,
        ettr=ettr,
        slot_seconds=total / MICROS,
        rows=rows,
        line=_line(found, ettr, price) if total else "",
        ends=tuple((one.cause, one.count) for one in found.ends),
        advice=_advice(found, spec),
        cost=total / MICROS / 3600 * price,
    )


def _line(found: Account, ettr: float, price: float) -> str:
    share = found.useful / found.total
    ratio = ""
    if abs(ettr - share) >= MIN_SAVED and ettr >= 0.0:
        ratio = f"; ETTR, the share of wall time, {100 * ettr:.1f} %"
    if found.steps_reported:
        head = f"goodput {100 * share:.1f} % (rank time in steps that were kept{ratio})"
    else:
        head = f"uptime {100 * share:.1f} % (time in which ranks ran; no steps are reported)"
    losses = ", ".join(_lost(found, price))
    return f"{head}: {losses}" if losses else head


def _lost(found: Account, price: float) -> Iterator[str]:
    """The losses as clauses, in seconds of the whole job's time."""

    def seconds(micros: int) -> str:
        return span(micros * found.wall / found.total / MICROS)

    down = {**{one.cause: 0.0 for one in found.ends}, **found.downtime}
    ends = sum(one.count for one in found.ends)
    if ends > found.ended or any(down.values()):
        by_cost = sorted(down.items(), key=lambda one: (-one[1], one[0]))
        each = ", ".join(f"{_named(found, cause)} {span(spent)}" for cause, spent in by_cost)
        again = [plural(ends - found.ended, "interruption")] if ends > found.ended else []
        which = " and ".join([*again, *(["the end"] if found.ended or not again else [])])
        cost = f"{which} cost {span(sum(down.values()))}"
        yield f"{cost} ({each})" if each else cost
    if steps := sum(one.steps for one in found.ends):
        yield f"{plural(steps, 'step')} repeated"
    spent = {word: found.of(kind) for kind, word in KINDS}
    for (_, cause), micros in _most_expensive(found, "wait"):
        spent[f"waits for {cause}"] = micros
        spent["waits for one rank"] -= micros
    hung = round(found.hung * MICROS * found.total / found.wall)  # reported as an interruption
    spent[HANGING] = max(0, spent[HANGING] - hung)
    spent["first restore"] = found.book.get(("restore", ""), 0)
    for word, micros in spent.items():
        if micros * found.wall >= MIN_LOSS * found.total:
            yield f"{word} {seconds(micros)}"
    if price:
        yield f"{(found.total - found.useful) / MICROS / 3600 * price:.2f} spent without training"


def _most_expensive(found: Account, kind: str) -> list[tuple[tuple[str, str], int]]:
    """The three most expensive rows of this category that have a cause."""
    rows = [one for one in found.book.items() if one[0][0] == kind and one[0][1]]
    return sorted(rows, key=lambda row: -row[1])[:3]


def _named(found: Account, cause: str) -> str:
    node = next((one.node for one in found.ends if one.cause == cause), "")
    return f"node {node} lost" if node and cause == "node_lost" else _words(cause)


def _words(cause: str) -> str:
    return WORDS.get(cause, cause.replace("_", " "))


# ---------------------------------------------------------------- advice


def _advice(found: Account, spec: JobSpec) -> str:
    """The setting that would have saved most; "" if none is worth mentioning, or if it is too early
    to tell."""
    if found.wall < MIN_WALL or not found.total:
        return ""
    saved, what = max(_savings(found, spec), default=(0, ""))
    share = saved / found.total
    return f"{what} would have saved about {100 * share:.1f} %" if share >= MIN_SAVED else ""


def _savings(found: Account, spec: JobSpec) -> Iterator[tuple[int, str]]:
    """What would have saved time, each with the slot-microseconds that it would have saved."""
    book = found.book
    if found.saves:
        yield _by_interval(found)
    yield from _by_imports(found)
    yield book.get(("idle", "below_min"), 0), "a spare node"
    for (kind, cause), micros in book.items():
        if kind == "slow":
            flag = "" if spec.checks.exclude_stragglers else " (--exclude-stragglers)"
            yield micros, f"leaving out node {cause}, which is slow{flag},"
    lost = sum(book.get(("redone", cause), 0) for cause in WITH_MEMORY)
    yield lost, "a Checkpointer with replicas=1 (or more frequent checkpoints)"
    if spec.watch.on_hang in ("tell", "off"):
        yield book.get(("hang", "certain"), 0), "--on-hang=auto"
    if spec.watch.on_hang != "restart":  # it also waits before it restarts
        yield found.of("hang") - DEFAULT_HANG_LIMIT * found.total // found.wall, "--on-hang=restart"


def _by_imports(found: Account) -> Iterator[tuple[int, str]]:
    """What a warm process would have saved. What a restart skips is mostly the import of torch;
    with a warm process, the first start skips it too."""
    if not found.recoveries:
        return
    least = min(found.recoveries)
    slots = found.total / found.wall
    first = found.book.get(("start", "init"), 0) / slots / MICROS
    times = f"training began {first:.0f} s after the start, {least:.0f} s after a restart"
    yield (
        round((first - least) * slots * MICROS),
        f"a warm process (--warm in the job before; {times})",
    )


def _by_interval(found: Account) -> tuple[int, str]:
    """What a better interval of saves would have saved. Saves and repeated steps together cost
    least with a save every sqrt(2 T_f T_s) seconds of training, where T_f is the time between
    failures and T_s the time of one save."""
    free = (*PLANNED, *WITH_MEMORY)
    failures = sum(one.count for one in found.ends if one.cause not in free)
    between = found.wall / max(1, failures)
    each, now = found.of("save") / found.saves, found.useful / found.saves
    best = max(math.sqrt(2.0 * between * each), MICROS)
    again = sum(
        micros for (kind, cause), micros in found.book.items()
        if kind == "redone" and cause not in free
    )  # fmt: skip
    least = (each / best + best / (2.0 * between)) * found.useful
    setting = f"every_seconds={best / MICROS:.0f} (now about {now / MICROS:.0f})"
    return found.of("save") + again - round(least), setting
