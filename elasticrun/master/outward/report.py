"""Renders an incident as a Markdown page, as plain text (`error.txt`) and as a line, and all
incidents as a table."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Iterator
from typing import Final

from elasticrun.core.rounds.failures import SIGKILL, SIGNALS, is_self_inflicted
from elasticrun.core.sight.causes import FAILURES
from elasticrun.core.sight.picture import IncidentRow
from elasticrun.core.words import plain, plural, recovery_times, span
from elasticrun.wire.messages import Failure, FailureKind

PHASES: Final = {
    "detect": "from the last sign of life until it was noticed",
    "left": "until a decision was made",
    "stop": "until every rank had exited",
    "gather": "until the next round was formed",
    "spawn": "until every rank ran again",
    "restore": "until the state was restored",
    "warm": "until the first collective or step",
}
"""Descriptions of the recovery phases."""

WORDS: Final = {
    "node_lost": "a node was lost",
    "node_slow": "a node was too slow",
    "rank_failed": "a rank failed",
    "hang": "a rank hung",
    "preempted": "a node was preempted",
    "scaled": "the job was resized",
    "operator": "an operator asked for it",
    "master": "the master decided so",
    "corruption": "replicas differed",
    "script": "the script ended the job",
}
"""Descriptions of the causes."""

_OF_A_NODE: Final = {
    "preempted": "preempted",
    "node_slow": "hardware",
    "corruption": "unknown: hardware that computes wrongly, or a script whose replicas differ",
}

_UNKNOWN: Final = (
    "no rank or node failed first",
    "a lost machine, a network failure and a killed agent look the same to other nodes",
)
"""Why a verdict without a failed rank is unknown; the second: a node was lost."""

_OUTSIDE: Final = "a signal from outside the job"
_KILLED: Final = f"{_OUTSIDE}; the kernel has recorded no OOM kill"

_STANDS_STILL: Final = "it hung; see the stacks"

_OF_A_HANG: Final = {
    "mismatch": "script",
    "deadlock": "script",
    "ended": "script",
    "disk": "hardware",
    "fabric": "network",
    "stopped": "unknown: SIGSTOP has stopped it, and no SIGCONT followed",
    "frozen": "unknown: its cgroup was frozen",
}
"""The responsible part, by the kind of a hang's verdict."""

_OF_A_RANK: Final = {
    FailureKind.SPAWN: "its process could not be started",
    FailureKind.SPAWNER: "the process that forks ranks has died",
}

_NETWORK: Final = re.compile(
    r"network is unreachable|no route to host|connection (?:refused|timed out|reset)"
    r"|name or service not known|temporary failure in name resolution|stale file handle",
    re.IGNORECASE,
)
_HARDWARE: Final = re.compile(
    r"uncorrectable ecc|no cuda-capable device|unspecified launch failure|input/output error"
    r"|no space left on device|devices? (?:is|are) busy or unavailable",
    re.IGNORECASE,
)

NOTHING: Final = "no incident: nothing has interrupted the training\n"


def page(row: IncidentRow) -> str:
    """An incident as a Markdown page."""
    lines = [f"# Incident {row.number}: {plain(row.sentence)}", ""]
    state = "" if row.over else " It is not over yet."
    lines += [f"{_capital(WORDS.get(row.cause, row.cause))}, in round {row.round}.{state}", ""]
    if row.hang:
        lines.append(f"- **Hang before it**: {plain(row.hang)}")
    if row.found:
        lines.append(f"- **Found before it**: {plain(row.found)}")
    if row.followed:
        lines.append(f"- **Then**: {plain(row.followed)}")
    if row.decision:
        lines.append(f"- **Decision**: {plain(row.decision)}")
    if where := _stacks_at(row):
        when = " at its end" if row.cause == "hang" else ""  # the log line names earlier ones
        lines.append(f"- **Stacks and counters{when}**: {where}")
    if row.excluded:
        lines.append(f"- **Excluded**: {', '.join(row.excluded)}")
    if back := recovery_times(row.restarted, row.first_step):
        lines.append(f"- **Way back**: {back}")
    lines += ["", *_timeline(row), "", *_cost(row)]
    if row.stacks:
        lines += ["", "## Stacks"]
        for group in row.stacks:
            who = f"{'ranks' if group.count > 1 else 'rank'} {group.ranks}"
            thread = f", {group.thread}" if group.thread else ""
            lines += ["", f"{who}{thread}:", *_block(group.text)]
    if row.last_lines:
        whose = f"rank {row.rank}" if row.rank >= 0 else "the rank"
        lines += ["", f"## Last lines of {whose}", *_block(row.last_lines)]
    return "\n".join(lines) + "\n"


def verdict(row: IncidentRow) -> str:
    """What is responsible, as far as known: script, hardware, network or preempted; otherwise
    "unknown: " and why."""
    if row.cause in _OF_A_NODE:
        return _OF_A_NODE[row.cause]
    if row.cause == "hang":
        kind = "" if row.verdict is None else row.verdict.kind
        return _OF_A_HANG.get(kind, f"unknown: {_STANDS_STILL}")
    if not row.kind:
        return f"unknown: {_UNKNOWN[row.cause == 'node_lost']}"
    kind, text = FailureKind(row.kind), row.sentence
    if kind is FailureKind.PEER_LOST and row.ended_before:
        return "script"  # ranks with different numbers of collectives
    if kind is FailureKind.PEER_LOST or _NETWORK.search(text):
        return "network"
    if _HARDWARE.search(text) or kind is FailureKind.STUCK:
        return "hardware"
    own = is_self_inflicted(Failure("", row.rank, -1, 0, row.exitcode, 0, kind, "", "", ""))
    if own or kind is FailureKind.OOM:
        return "script"
    killed = kind is FailureKind.SIGNAL and row.exitcode == -SIGKILL
    return f"unknown: {_KILLED if killed else _OF_A_RANK.get(kind, _OUTSIDE)}"


def error_page(row: IncidentRow, when: float) -> str:
    """A failure as plain text: the sentence, the facts, the last output and the stacks; "" if the
    incident is not a failure. `when`: seconds since 1970."""
    if row.cause not in FAILURES:
        return ""
    code = row.exitcode
    end = f"signal {SIGNALS.get(-code, str(-code))}" if code < 0 else f"exit code {code}"
    hang = row.verdict if row.cause == "hang" else None
    who = "ranks" if hang is not None and not hang.ranks.isdecimal() else "rank"
    facts = {
        "when": time.strftime("%F %T %z", time.localtime(when)),
        "node": row.node,
        who: hang.ranks if hang is not None else str(row.rank) if row.rank >= 0 else "",
        "ended with": end if code and row.cause != "hang" else "",
        "last step": str(row.step) if row.step >= 0 else "",
        "round": str(row.round),
        "verdict": verdict(row),
        "before": row.found,
        "then": row.followed,
        "decision": row.decision,
        "way back": recovery_times(row.restarted, row.first_step),
        "stacks": _stacks_at(row),
    }
    lines = [plain(row.sentence), ""]
    lines += [f"{name + ':':<12}{plain(value)}" for name, value in facts.items() if value]
    if row.last_lines:
        lines += ["", "its last output:", *_block(row.last_lines)]
    for group in row.stacks:
        lines += ["", f"stack of {group.ranks} {group.thread}".rstrip() + ":", *_block(group.text)]
    return "\n".join(lines) + "\n"


def line(row: IncidentRow) -> str:
    """One line, such as `incident 3: rank 1 failed (ValueError: bad luck)`. An incident that ended
    the job has no sentence here, because the launcher prints it."""
    if row.ended:
        return f"incident {row.number} ended the job"
    return f"incident {row.number}: {plain(row.sentence)}"


def table(rows: Iterable[IncidentRow], columns: int = 0, now: str = "") -> str:
    """One line per incident, in the order given, cut to `columns` (0: uncut). `now`: a line to add
    at the end."""
    lines = [
        _row(row) + (plain(row.sentence) if row.over else f"(open) {plain(row.sentence)}")
        for row in rows
    ]
    now = f"{plain(now)}\n" if now else ""
    if not lines:
        return f"no incident yet; {now}" if now else NOTHING
    head = "  NO     AGO CAUSE       RESTARTED FIRST STEP REPEATED  WHAT"
    cut = [line if not 0 < columns < len(line) else f"{line[: columns - 1]}…" for line in lines]
    return "\n".join([head, *cut]) + "\n" + now


def lasted(row: IncidentRow) -> float:
    """Seconds that an incident interrupted training."""
    return sum(phase.seconds for phase in row.phases)


def _row(row: IncidentRow) -> str:
    steps = str(row.steps_lost) if row.steps_lost else "-"
    back, first = (span(one) if one >= 0.0 else "-" for one in (row.restarted, row.first_step))
    return f"{row.number:>4} {span(row.age):>7} {row.cause:<11} {back:>9} {first:>10} {steps:>8}  "


def _timeline(row: IncidentRow) -> Iterator[str]:
    yield "| Phase | Seconds | |"
    yield "| --- | ---: | --- |"
    for phase in row.phases:
        yield f"| {phase.name} | {phase.seconds:.2f} | {PHASES.get(phase.name, '')} |"
    yield f"| **all** | **{lasted(row):.2f}** | |"


def _cost(row: IncidentRow) -> Iterator[str]:
    hours = row.slot_seconds / 3600.0
    steps = plural(row.steps_lost, "step")
    money = f", cost {row.cost:.2f}" if row.cost else ""
    yield f"**Cost**: {hours:.3g} slot-hours ({row.slot_seconds:.1f} slot-seconds){money}" + (
        f", and {steps} repeated." if row.steps_lost else "."
    )


def _stacks_at(row: IncidentRow) -> str:
    folder = "" if row.verdict is None else row.verdict.folder
    of_node = f" on node {row.node}" if row.node and row.cause == "hang" else ""
    return f"{plain(folder)}{of_node}" if folder else ""


def _block(text: str) -> Iterator[str]:
    """A Markdown code block, indented so that a fence in the text does not end it; control
    characters are made visible."""
    yield ""
    for line in text.rstrip("\n").split("\n"):
        yield "    " + plain(line)


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]
