"""The text format of the trace: events as JSON that decodes to equal events, effects as lines.

Pure functions; `writer.py` writes the file and `replay.py` reads it.
"""

from __future__ import annotations

import base64
import json
import typing
import zlib
from collections.abc import Sequence
from typing import Any, Final

from elasticrun.core.events import (
    Filed,
    FoundSlow,
    Hangup,
    Heard,
    JobEffect,
    JobEvent,
    JobOver,
    Judged,
    Note,
    Record,
    Replied,
    Send,
)
from elasticrun.core.persisted import Facts
from elasticrun.core.sight.picture import IncidentRow
from elasticrun.core.words import plural
from elasticrun.wire import messages as m
from elasticrun.wire.types import plain, typed

TRACE_VERSION: Final = 3
"""Incremented at every change of the format of lines, or of the facts in them."""

MAX_EVENT: Final = 16 * 1024 * 1024
"""Maximum bytes of an unpacked event."""

MAX_NAMED: Final = 8
"""Maximum number of sessions or ranks named in a line; of the others only the number is shown."""

_EVENTS: Final[dict[str, type]] = {kind.__name__: kind for kind in typing.get_args(JobEvent)}
_REPORTS: Final[dict[str, type]] = {kind.__name__: kind for kind in typing.get_args(m.Report)}


# ---------------------------------------------------------------- events


def event_to_plain(event: JobEvent) -> dict[str, Any]:
    """An event as JSON values: {"Heard": {"session": 3, "report": {"Stopped": {...}}}}. Samples of
    the ranks are compressed, because they contain the same text again and again."""
    body = plain(event)
    if isinstance(event, Heard):
        body["report"] = {type(event.report).__name__: body["report"]}
    found = {type(event).__name__: body}
    if isinstance(event, Heard) and isinstance(event.report, m.Inspected | m.Stacks):
        data = zlib.compress(json.dumps(found, separators=(",", ":")).encode())
        return {"packed": base64.b64encode(data).decode()}
    return found


def event_from_plain(value: Any) -> JobEvent:
    """Decode an event. Raises ValueError if it is not one of this version."""
    if isinstance(value, dict) and value.keys() == {"packed"}:
        value = _unpacked(value["packed"])
    kind, body = _tagged(value, _EVENTS)
    if kind is not Heard:
        event: JobEvent = typed(body, kind)
        return event
    if not (isinstance(body, dict) and body.keys() == {"session", "report"}):
        raise ValueError("a Heard without its session and report")
    report, body_of_report = _tagged(body["report"], _REPORTS)
    return Heard(typed(body["session"], int), typed(body_of_report, report))


def _unpacked(text: Any) -> Any:
    unpacking = zlib.decompressobj()
    try:
        data = unpacking.decompress(base64.b64decode(typed(text, str), validate=True), MAX_EVENT)
    except zlib.error as wrong:
        raise ValueError(f"an event cannot be unpacked: {wrong}") from None
    if not unpacking.eof:
        raise ValueError("an event is cut, or too long")
    return json.loads(data)


def _tagged(value: Any, kinds: dict[str, type]) -> tuple[type, Any]:
    if isinstance(value, dict) and len(value) == 1:
        ((name, body),) = value.items()
        if name in kinds:
            return kinds[name], body
    raise ValueError("neither an event nor a report of this version")


# ---------------------------------------------------------------- effects


def effect_in_words(effect: JobEffect) -> str:
    """An effect as one line, to print and to compare. It is a summary: different effects can have
    the same line."""
    match effect:
        case Send():
            sessions = listed(effect.sessions, MAX_NAMED, ",")
            return f"tell {sessions}: {in_words(effect.order)}"
        case Hangup():
            return f"hang up {effect.session}"
        case Note():
            return f"{effect.level}: {effect.text}"
        case JobOver():
            return f"over with {effect.exit_code}: {effect.reason}"
        case Record():
            return f"record: {facts_in_words(effect.facts)}"
        case Replied():
            return f"answer {effect.number}: {effect.reply.reason or 'done'}"
        case Filed():
            return f"filed: {incident_in_words(effect.incident)}"
        case Judged():
            state = "over" if effect.over else "told"
            return f"verdict ({state}), {effect.verdict.klass}: {effect.verdict.sentence}"
        case FoundSlow():
            return f"slow: {effect.sentence}"


def incident_in_words(incident: IncidentRow) -> str:
    """An incident as one line, without times."""
    state = "over" if incident.over else "open"
    return f"incident {incident.number} ({state}), {incident.cause}: {incident.sentence}"


_FORMS: Final[dict[type, str]] = {
    m.End: "End {0.exit_code}: {0.reason}",
    m.Refused: "Refused {0.exit_code}: {0.reason}",
    m.Welcome: "Welcome: term {0.term}, a beat every {0.beat_interval:g} s",
    m.Echo: "Echo {0.number}",
    m.Join: "Join, with store {0.store}",
    m.Stopping: "Stopping {0.round.number}, {0.remaining:g} s left",
    m.Beat: "Beat {0.number}",
    m.Steps: "Steps {0.round.number}: {0.step}, {0.seconds:.3g} s each, {0.own:.3g} s its own",
    m.WhereIs: "WhereIs rank {0.rank} at step {0.step}",
    m.ShardBad: "ShardBad rank {0.rank} at step {0.step}: {0.reason}",
    m.NotReplicated: "NotReplicated step {0.step}: {0.reason}",
    m.WorkBase: "WorkBase {0.round.number}: {0.source}, step {0.step}",
    m.SaveAt: "SaveAt {0.round.number}: step {0.step}: {0.reason}",
    m.Missed: "Missed {0.round.number}: step {0.asked}, is at {0.step}",
    m.Inspected: "Inspected {0.round.number}: look {0.number}, {0.left} ranks left",
    m.Stacks: "Stacks {0.round.number}: look {0.number}",
    m.Quiet: "Quiet {0.round.number}: {0.seconds:g} s, {0.waiting} wait",
    m.Recovery: "Recovery {0.round}: {0.restarted:.1f} s, {0.first_step:.1f} s",
    m.Inspect: "Inspect {0.round.number}: look {0.number}",
    m.NodeHealth: "NodeHealth: fault {0.fault!r}, notices {0.notices}",
    m.LastLines: "LastLines {0.round.number}: rank {0.rank}",
    m.CommitCheckpoint: "CommitCheckpoint {0.attempt}",
}
"""Formats of messages for which one format string suffices."""


def in_words(message: m.Report | m.Order) -> str:
    """A message as one line. Most orders show the full name of their round, reports only its
    number."""
    if form := _FORMS.get(type(message)):
        return form.format(message)
    match message:
        case m.Start():
            group = f"{message.group_rank}/{message.group_world_size}"
            info = message.info
            return (
                f"Start {message.round}: group {group}, ranks "
                f"from {message.first_rank} of {info.world_size}, store {message.store}"
                f"{' (its own)' if message.host_store else ''}, restarts {info.restart_count}"
                f"{_restored(message)}"
            )
        case m.Probe():
            node = f"node {message.group_rank} of {message.group_world_size}"
            ranks = f"ranks from {message.first_rank} of {message.world_size}"
            return (
                f"Probe {message.check}{' (perf)' if message.perf else ''}: {node}, {ranks}, "
                f"store {message.store}, limit {message.limit:g} s"
            )
        case m.RanksFailed():
            ranks = ", ".join(f"{f.rank} ({f.exitcode}, {f.kind.value})" for f in message.failures)
            return f"RanksFailed {message.round.number}: {ranks}"
        case m.Probed():
            found = "ok" if message.ok else f"failed in {message.phase.value}: {message.reason}"
            return f"Probed {message.check}: {found}"
        case m.Holdings():
            skipped = f"; {message.skipped} skipped" if message.skipped else ""
            return f"Holdings: {', '.join(map(_holding, message.held)) or 'none'}{skipped}"
        case m.Holder():
            where = f"{message.saver}, as rank {message.holds}" if message.saver else message.reason
            return f"Holder of rank {message.rank} at step {message.step}: {where}"
        case m.Replicate() | m.CompareReplicas() | m.Digests() | m.KeepStep():
            return _replicas(message)
        case m.Persisted():
            what = "committed" if message.committed else "written"
            end = f"{what}, {message.nbytes} bytes" if message.ok else f"failed: {message.reason}"
            return f"Persisted {message.attempt}: {end}"
        case m.Watermark():
            given_up = f", up to {message.given_up} given up" if message.given_up >= 0 else ""
            return f"Watermark {message.round.number}: step {message.step}{given_up}"
        case m.Persist():
            role = "coordinates" if message.coordinates else f"with {message.coordinator}"
            return (
                f"Persist {message.attempt} ({message.reason}): step {message.step} of round "
                f"{message.round.number}, ranks {_numbers(message.ranks)}, shared "
                f"{_numbers(message.shared)} of {message.writers}, {role}"
            )
        case m.Departing():
            requested = f", asked for {message.asked}" if message.asked >= 0 else ""
            step = f"step {message.step}, {message.margin} more{requested}"
            return f"Departing: {message.reason}, at {step}"
        case m.PersistOver():
            end = "committed" if message.ok else f"over: {message.reason}"
            return f"PersistOver {message.attempt or '(wanted)'}: step {message.step} {end}"
        case _:
            return _default_line(message)


def _default_line(message: m.Report | m.Order) -> str:
    """The type of a message, and its round and text if it has them."""
    if isinstance(message, m.WorkState | m.WorkGrant):
        return _work(message)
    words = type(message).__name__
    if (round_ := getattr(message, "round", None)) is not None:
        words += f" {round_ if isinstance(message, m.Order) else round_.number}"
    text = getattr(message, "reason", None) or getattr(message, "text", None)
    return f"{words}: {text}" if text else words


def _replicas(message: m.Replicate | m.CompareReplicas | m.Digests | m.KeepStep) -> str:
    if isinstance(message, m.Replicate):
        what = f"step {message.step} of round {message.round.number}"
        return f"Replicate {what}, ranks {_numbers(message.ranks)}, from {message.saver}"
    if isinstance(message, m.KeepStep):
        return f"KeepStep {message.round.number}: step {message.step}"
    if isinstance(message, m.Digests):
        parts = "; ".join(f"{one.rank}: {len(one.digests)}" for one in message.ranks)
        return f"Digests {message.number}: step {message.step}, parts by rank {parts}"
    which = f" of ranks {_numbers(message.ranks)}" if message.ranks else ""
    part = f", tensors {message.first}-{message.last}" if message.last else ""
    out = f", {len(message.left_out)} left out" if message.left_out else ""
    when = "of" if message.last else "after"
    return f"CompareReplicas {message.number}: {when} step {message.step}{which}{part}{out}"


def _restored(order: m.Start) -> str:
    on = order.info.restore
    words = "" if on is None else f", from step {on.step} of round {on.round}"
    skip = order.info.skip
    words += f", without rank {_numbers(lost)}" if (lost := order.info.distrusted) else ""
    words += f", rewound from {skip.storage_from}" if skip.storage_from >= 0 else ""
    words += ", suspect" if skip.memory else ""
    return words + (f", restore step {skip.all_but}" if skip.all_but >= 0 else "")


def _holding(one: m.Holding) -> str:
    what = f"step {one.step} of round {one.round.number}"
    if one.replica:
        last = one.first_rank + len(one.contents) - 1
        return f"{what} (replica of ranks {one.first_rank}-{last})"
    return what + (" (wanted)" if one.wanted else "")


def listed(items: Sequence[object], most: int, between: str = ", ") -> str:
    """The first `most` items, and the number of the others."""
    named, more = between.join(map(str, items[:most])), len(items) - most
    return f"{named} and {more} more" if more > 0 else named


def _work(message: m.WorkState | m.WorkGrant) -> str:
    if isinstance(message, m.WorkGrant):
        what = message.refused or _leases(message.first, message.leases)
        over = ", and nothing is left" if message.over else ""
        return f"WorkGrant rank {message.rank}: {message.dataset} {what}{over}"
    shares = "; ".join(
        f"{one.spec.name} {one.used} used of {_leases(one.dropped, one.leases)}"
        f"{', wants more' if one.wants else ''}"
        for one in message.shares
    )
    marks = f", marked {_numbers(message.marked)}" if message.marked else ""
    return f"WorkState {message.round.number} rank {message.rank}: {shares}{marks}"


def _leases(first: int, leases: tuple[int, ...]) -> str:
    spans = [f"{start}-{stop}" for start, stop in m.batched(leases)]
    more = f" and {len(spans) - MAX_NAMED} more" if len(spans) > MAX_NAMED else ""
    return f"{', '.join(spans[:MAX_NAMED]) or 'nothing'}{more} after {first}"


def _numbers(ranks: tuple[int, ...]) -> str:
    return listed(ranks, MAX_NAMED) or "none"


def facts_in_words(facts: Facts) -> str:
    """A summary of the facts that the next master would load."""
    words = ["no round", f"restarts {facts.restarts.count}"]
    if (last := facts.rendezvous.round) is not None:
        over = " (over)" if facts.rendezvous.over else ""
        nodes = plural(len(facts.rendezvous.seats), "node")
        words[0] = f"round {last.name}{over}, {plural(last.world_size, 'rank')} on {nodes}"
    if left_out := facts.membership.left_out:
        words.append(f"{len(left_out)} left out")
    if excluded := facts.exclusions.excluded:
        words.append(f"{len(excluded)} excluded")
    if (written := facts.snapshots.written) is not None:
        words.append(f"step {written.step} written")
    if starved := facts.rendezvous.starved:
        words.append(f"below its smallest size for {starved:.1f} s")
    if facts.outcome is not None:
        words.append(f"outcome {facts.outcome.exit_code}")
    return ", ".join(words)
