"""The sentences of the network check (verdicts, the health of a node, the outcome), and the
formatting of figures.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

from elasticrun.core.health.groups import FailedGroup, ProbeFailure, Rate, Trial
from elasticrun.core.words import names, plural
from elasticrun.wire.messages import Probed
from elasticrun.wire.types import MAX_TEXT

MAX_QUOTED = 400
"""Maximum length of an agent's reason within our sentences, in characters."""

MAX_LISTED = 2
"""Maximum number of failures that a verdict names (those that prove most), and of bad links that an
outcome names."""


def duration(seconds: float) -> str:
    """`0.0123 ms`, `10.1 ms`, `3.1 s`, `1200 s`."""
    if seconds < 0.9995:
        return f"{seconds * 1e3:.3g} ms"
    return f"{seconds:.3g} s" if seconds < 999.5 else f"{seconds:.0f} s"


def figure(value: float) -> str:
    """Three significant digits, without an exponent for large values."""
    return f"{value:.3g}" if value < 999.5 else f"{value:.0f}"


def size(count: int) -> str:
    """`4 KiB`, `1 MiB`, `1.5 GiB`."""
    value, unit = float(count), "B"
    for larger in ("KiB", "MiB", "GiB"):
        if value < 1024:
            break
        value, unit = value / 1024, larger
    return f"{value:.0f} {unit}" if value >= 999.5 else f"{value:.3g} {unit}"


def speed(rate: float) -> str:
    """Bytes per second in GB/s (1e9), the usual unit for links."""
    return f"{rate / 1e9:.3g} GB/s"


def quoted(reason: str) -> str:
    """An agent's reason, truncated for use in a sentence."""
    return reason if len(reason) <= MAX_QUOTED else f"{reason[: MAX_QUOTED - 3]}..."


def why_convicted(trial: Trial, trials: Mapping[str, Trial]) -> str:
    """The sentence that says why a node is convicted."""
    strongest = sorted(trial.failures, key=lambda one: _weight(one, trials))[:MAX_LISTED]
    clauses = [describe_failure(one, trials) for one in strongest]
    if len(set(clauses)) == 1:
        return cut(f"{trial.node} failed the network check twice {clauses[0]}")
    return cut(f"{trial.node} failed the network check: {', and '.join(clauses)}")


def why_unresolved(trial: Trial, trials: Mapping[str, Trial]) -> str:
    """The sentence that says why a node has not passed, and what would show whether it is at
    fault."""
    joint = [one for one in trial.failures if one.partners]
    if not joint:
        own = trial.failures[-1:]
        what = f"failed {describe_failure(own[0], trials)}" if own else "could not be fully probed"
        why = "" if own or not trial.held_up else f" ({quoted(trial.held_up)})"
        return cut(f"{trial.node} {what}{why}, and the check ended before it passed a probe")
    widest = max(joint, key=lambda one: len(one.partners))
    if _works(widest, trials):
        return cut(
            f"{trial.node} failed {describe_failure(widest, trials)}; another node would show "
            f"whether it or its link to {names(widest.partners)} is at fault"
        )
    group = sorted((trial.node, *widest.partners), key=lambda node: trials[node].place)
    helper = "a third node" if len(trials) == 2 else "another node"
    return cut(
        f"{names(group)} failed together in {widest.phase} "
        f"({quoted(widest.reason)}); {helper} would show which of them is at fault"
    )


def describe_failure(failure: ProbeFailure, trials: Mapping[str, Trial]) -> str:
    """One failure: in which phase, with which partners, and what the node reported."""
    if not failure.partners:
        return f"by itself in {failure.phase} ({quoted(failure.reason)})"
    verb = "works" if len(failure.partners) == 1 else "work"
    known = f", which {verb} with others" if _works(failure, trials) else ""
    why = quoted(failure.reason)
    return f"in {failure.phase} with {names(failure.partners)}{known} ({why})"


def wait_reason(number: int, groups: Sequence[Sequence[str]]) -> str:
    """Why the round waits while a pass runs. The text does not count answers, so it does not
    change."""
    nodes = [node for group in groups for node in group]
    if number == 1:
        whom = f"{nodes[0]} is" if len(nodes) == 1 else f"{len(nodes)} nodes are"
        where = f" in {plural(len(groups), 'group')}" if len(nodes) > 1 else ""
        return f"the network check probes: {whom} measured{where} before a round forms"
    listed = names(sorted(nodes))
    return f"the network check continues: pass {number} probes {listed} before a round forms"


def describe_outcome(
    trials: Mapping[str, Trial],
    found: Sequence[tuple[str, str]],
    groups: Iterable[FailedGroup],
    passes: int,
    seconds: float,
) -> str:
    """What a check found, as a sentence. `found`: kinds of verdict and nodes."""
    clauses = []
    for kind, one, more in (
        ("failed", "failed", "failed"),
        ("lost", "was lost", "were lost"),
        ("unresolved", "did not pass", "did not pass"),
        ("slow", "is slow", "are slow"),
    ):
        if nodes := [node for what, node in found if what == kind]:
            clauses.append(f"{names(nodes)} {one if len(nodes) == 1 else more}")
    clauses += _links(trials, groups)
    bad = {node for kind, node in found if kind != "slow"}
    rest = len(trials) - len(bad)
    if rest:
        whom = "all passed" if not bad else f"{plural(rest, 'node')} passed"
        clauses.append(whom if len(trials) > 1 else "it passed")
    head = f"network check of {plural(len(trials), 'node')}"
    took = f"{passes} {'pass' if passes == 1 else 'passes'}, {duration(seconds)}"
    return cut(f"{head} ({took}): {'; '.join(clauses)}")


def health(compute: float, flops: float, rate: Rate | None) -> str:
    """What the last probes of a node measured; "" if nothing."""
    parts = []
    if compute > 0:
        fast = f" ({figure(flops / compute / 1e9)} GFLOP/s)" if flops > 0 else ""
        parts.append(f"{duration(compute)} per matmul{fast}")
    if rate is not None:
        whom = f"with {names(rate.partners)}" if rate.partners else "among its own ranks"
        parts.append(f"all_reduce of {size(rate.size)} {duration(rate.seconds)} {whom}")
    return ", ".join(parts)


def describe_trouble(partners: Sequence[str], answer: Probed) -> str:
    """What went wrong in the last probe of a node."""
    what = "was not fully probed" if answer.excused else f"failed in {answer.phase}"
    whom = f" with {names(partners)}" if partners else ""
    return f"{what}{whom} ({quoted(answer.reason)})"


def cut(sentence: str) -> str:
    """The sentence, truncated to the maximum length of a message."""
    return sentence if len(sentence) <= MAX_TEXT else f"{sentence[: MAX_TEXT - 3]}..."


def _links(trials: Mapping[str, Trial], groups: Iterable[FailedGroup]) -> list[str]:
    """Clauses about failed groups whose nodes all turned out to work: a link between them is
    bad."""
    pairs: list[Collection[str]] = []
    clauses: list[str] = []
    for group in sorted(groups, key=lambda one: len(one.nodes)):
        sound = all(trials[node].good and not trials[node].out for node in group.nodes)
        if not sound or any(set(pair) <= set(group.nodes) for pair in pairs):
            continue
        pairs.append(group.nodes)
        between = "the link between" if len(group.nodes) == 2 else "a link among"
        why = f"in {group.failure.phase} ({quoted(group.failure.reason)})"
        clauses.append(
            f"{between} {names(group.nodes)} failed {why}, though each works with others"
        )
    more = f"and {len(clauses) - MAX_LISTED} more links failed"
    return [*clauses[:MAX_LISTED], more] if len(clauses) > MAX_LISTED else clauses


def _works(failure: ProbeFailure, trials: Mapping[str, Trial]) -> bool:
    return bool(failure.partners) and all(trials[node].good for node in failure.partners)


def _weight(failure: ProbeFailure, trials: Mapping[str, Trial]) -> tuple[bool, int]:
    """Sort key: first the failures that prove most (not explained by a partner, few
    participants)."""
    return bool(failure.partners) and not _works(failure, trials), len(failure.partners)
