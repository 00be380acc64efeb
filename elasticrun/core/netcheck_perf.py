"""What one all_reduce over all good nodes came to, size by size."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from elasticrun.core.netcheck_pass import Run
from elasticrun.core.netcheck_terms import Rate, duration, quoted, size, speed
from elasticrun.core.netcheck_words import cut
from elasticrun.core.wording import names, some


@dataclass(frozen=True, slots=True)
class PerfResult:
    """The perf test in words. A failed one convicts nobody."""

    lines: tuple[str, ...]  # one for each size
    sentence: str
    failure: str  # why the job must not start; "" if it may


def result(run: Run, ranks: Mapping[str, int], floor: float) -> PerfResult:
    """Of a run that every node has answered. `floor`: GB/s (1e9) of bus bandwidth wanted at the
    largest size, 0.0 for none."""
    nodes = run.group.nodes
    world = sum(ranks.get(node, 1) for node in nodes)
    over = f"over {some(len(nodes), 'node')}, {some(world, 'rank')}"
    bad = [(node, said) for node, said in run.said.items() if not said.ok]
    if bad:
        who = names([node for node, _ in bad])
        cause = next((said for _, said in bad if not said.excused), bad[0][1])
        why = cut(
            f"comm perf test {over} failed on {who} in {cause.phase} ({quoted(cause.reason)})"
        )
        return PerfResult((), why, why if floor > 0 else "")
    slowest = _slowest(run, world)
    if not slowest:
        sentence = f"comm perf test {over}: nothing was measured"
        return PerfResult((), sentence, sentence if floor > 0 and world > 1 else "")
    lines = tuple(f"all_reduce of {_line(rate)}, {over}" for _, rate in slowest)
    node, last = slowest[-1]
    sentence = cut(f"comm perf test {over}: all_reduce of {_line(last)}")
    if floor <= 0 or last.bus >= floor * 1e9:
        return PerfResult(lines, sentence, "")
    why = f"below the {floor:g} GB/s that are wanted (slowest on {node})"
    told = f"comm perf test {over}: bus bandwidth {speed(last.bus)} at {size(last.size)}, {why}"
    return PerfResult(lines, cut(told), cut(told))


def _slowest(run: Run, world: int) -> list[tuple[str, Rate]]:
    """By size, the node that took longest, and its figure; sizes that all nodes measured."""
    if world < 2:
        return []
    found: dict[int, list[tuple[float, str]]] = {}
    for node, said in run.said.items():
        for one in said.transfers:
            if one.size > 0 and one.seconds > 0:
                found.setdefault(one.size, []).append((one.seconds, node))
    whole = {count: max(all_) for count, all_ in found.items() if len(all_) == len(run.said)}
    return [(node, Rate(count, took, world, ())) for count, (took, node) in sorted(whole.items())]


def _line(rate: Rate) -> str:
    plain = speed(rate.size / rate.seconds)
    return (
        f"{size(rate.size)}: {duration(rate.seconds)}, algorithm bandwidth {plain}, "
        f"bus bandwidth {speed(rate.bus)}"
    )
