"""How the trace writes down what the master's brain takes in and says: events so that they can be
read again exactly, effects in words that tell any two of them apart.

Pure functions; the file is `writer.py`, who reads it is `replay.py`.
"""

from __future__ import annotations

import typing
from typing import Any, Final

from elasticrun.core.events import Hangup, Heard, JobEffect, JobEvent, JobOver, Note, Record, Tell
from elasticrun.core.persisted import Facts
from elasticrun.core.words import some
from elasticrun.wire import messages as m
from elasticrun.wire.records import plain, typed

TRACE_VERSION: Final = 1
"""Raised with every change of the lines that an older reader cannot read."""

MOST_NAMED: Final = 8
"""Sessions that an effect in words lists; of more it says how many."""

_EVENTS: Final[dict[str, type]] = {kind.__name__: kind for kind in typing.get_args(JobEvent)}
_REPORTS: Final[dict[str, type]] = {kind.__name__: kind for kind in typing.get_args(m.Report)}


# ---------------------------------------------------------------- events


def event_to_plain(event: JobEvent) -> dict[str, Any]:
    """An event as JSON takes it: {"Heard": {"session": 3, "report": {"Stopped": {...}}}}."""
    body = plain(event)
    if isinstance(event, Heard):
        body["report"] = {type(event.report).__name__: body["report"]}
    return {type(event).__name__: body}


def event_from_plain(value: Any) -> JobEvent:
    """The event that was written; ValueError if it is none."""
    kind, body = _tagged(value, _EVENTS)
    if kind is not Heard:
        event: JobEvent = typed(body, kind)
        return event
    if not (isinstance(body, dict) and body.keys() == {"session", "report"}):
        raise ValueError("a Heard without its session and report")
    report, said = _tagged(body["report"], _REPORTS)
    return Heard(typed(body["session"], int), typed(said, report))


def _tagged(value: Any, kinds: dict[str, type]) -> tuple[type, Any]:
    if isinstance(value, dict) and len(value) == 1:
        ((name, body),) = value.items()
        if name in kinds:
            return kinds[name], body
    raise ValueError("neither an event nor a report of this version")


# ---------------------------------------------------------------- effects


def effect_in_words(effect: JobEffect) -> str:
    """One line; equal for equal effects only, but for the ages in facts."""
    match effect:
        case Tell():
            return f"tell {_sessions(effect.sessions)}: {in_words(effect.order)}"
        case Hangup():
            return f"hang up {effect.session}"
        case Note():
            return f"{effect.level}: {effect.text}"
        case JobOver():
            return f"over with {effect.exit_code}: {effect.reason}"
        case Record():
            return f"record: {facts_in_words(effect.facts)}"


def in_words(message: m.Report | m.Order) -> str:
    """An order as one line, with the whole name of its round; a report, with the number."""
    match message:
        case m.Start():
            group = f"{message.group_rank}/{message.group_world_size}"
            return (
                f"Start {message.round}: group {group}, ranks "
                f"from {message.first_rank} of {message.world_size}, store {message.store}"
                f"{' (its own)' if message.host_store else ''}, restarts {message.restart_count}"
                f"{_restored(message)}"
            )
        case m.Stop():
            return f"Stop {message.round}: {message.reason}"
        case m.End():
            return f"End {message.exit_code}: {message.reason}"
        case m.Refused():
            return f"Refused {message.exit_code}: {message.reason}"
        case m.Wait():
            return f"Wait: {message.reason}"
        case m.Park():
            return f"Park for {message.seconds:g} s: {message.reason}"
        case m.Welcome():
            return f"Welcome: term {message.term}, a beat every {message.beat_interval:g} s"
        case m.Echo():
            return f"Echo {message.number}"
        case m.Probe():
            node = f"node {message.group_rank} of {message.group_world_size}"
            ranks = f"ranks from {message.first_rank} of {message.world_size}"
            return (
                f"Probe {message.check}{' (perf)' if message.perf else ''}: {node}, {ranks}, "
                f"store {message.store}, limit {message.limit:g} s"
            )
        case m.Join():
            return f"Join, with store {message.store}"
        case m.RanksFailed():
            ranks = ", ".join(
                f"{failed.rank} ({failed.exitcode}, {failed.kind.value})"
                for failed in message.failures
            )
            return f"RanksFailed {message.round.number}: {ranks}"
        case m.Stopping():
            return f"Stopping {message.round.number}, {message.remaining:g} s left"
        case m.Running() | m.Stopped() | m.Finished():
            return f"{type(message).__name__} {message.round.number}"
        case m.Leaving():
            return f"Leaving: {message.reason}"
        case m.Beat():
            return f"Beat {message.number}"
        case m.Probed():
            found = "ok" if message.ok else f"failed in {message.phase.value}: {message.reason}"
            return f"Probed {message.check}: {found}"
        case m.Steps():
            return (
                f"Steps {message.round.number}: {message.step}, {message.seconds:.3g} s each, "
                f"{message.own:.3g} s its own"
            )
        case _:
            return snapshot_words(message)


def _restored(order: m.Start) -> str:
    on = order.restore
    words = "" if on is None else f", from step {on.step} of round {on.round}"
    words += f", rewound from {order.rewound_from}" if order.rewound_from >= 0 else ""
    words += ", suspect" if order.suspect else ""
    return words + (f", restore step {order.restore_step}" if order.restore_step >= 0 else "")


def snapshot_words(message: m.Report | m.Order) -> str:
    """A message about snapshots as one line; another one's name."""
    match message:
        case m.Holdings():
            skipped = f"; {message.skipped} skipped" if message.skipped else ""
            return f"Holdings: {', '.join(map(_holding, message.held)) or 'none'}{skipped}"
        case m.WhereIs():
            return f"WhereIs rank {message.rank} at step {message.step}"
        case m.ShardBad():
            return f"ShardBad rank {message.rank} at step {message.step}: {message.reason}"
        case m.Holder():
            if message.saver is None:
                return f"Holder of rank {message.rank} at step {message.step}: {message.reason}"
            what = f"rank {message.rank} at step {message.step}"
            return f"Holder of {what}: {message.saver}, as rank {message.holds}"
        case m.NotReplicated():
            return f"NotReplicated step {message.step}: {message.reason}"
        case m.Replicate():
            what = f"step {message.step} of round {message.round.number}"
            return f"Replicate {what}, ranks {_numbers(message.ranks)}, from {message.saver}"
        case m.Persisted():
            what = "committed" if message.committed else "written"
            said = f"{what}, {message.nbytes} bytes" if message.ok else f"failed: {message.reason}"
            return f"Persisted {message.attempt}: {said}"
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
            asked = f", asked for {message.asked}" if message.asked >= 0 else ""
            at = f"at step {message.step}, {message.margin} more{asked}"
            return f"Departing: {message.reason}, {at}"
        case m.SaveAt():
            return f"SaveAt {message.round.number}: step {message.step}: {message.reason}"
        case m.Missed():
            return f"Missed {message.round.number}: step {message.asked}, is at {message.step}"
        case m.CommitCheckpoint():
            return f"CommitCheckpoint {message.attempt}"
        case m.PersistOver():
            end = "committed" if message.ok else f"over: {message.reason}"
            return f"PersistOver {message.attempt or '(wanted)'}: step {message.step} {end}"
        case _:
            return type(message).__name__


def _holding(one: m.Holding) -> str:
    what = f"step {one.step} of round {one.round.number}"
    if one.replica:
        last = one.first_rank + len(one.contents) - 1
        return f"{what} (replica of ranks {one.first_rank}-{last})"
    return what + (" (wanted)" if one.wanted else "")


def _numbers(ranks: tuple[int, ...]) -> str:
    more = f" and {len(ranks) - MOST_NAMED} more" if len(ranks) > MOST_NAMED else ""
    return ", ".join(map(str, ranks[:MOST_NAMED])) + more if ranks else "none"


def facts_in_words(facts: Facts) -> str:
    """What the next master would believe, in short."""
    words = [f"restarts {facts.restart_count}"]
    if facts.round is None:
        words.insert(0, "no round")
    else:
        last = facts.round
        over = " (over)" if last.over else ""
        ranks = f"{some(last.world_size, 'rank')} on {some(len(last.seats), 'node')}"
        words.insert(0, f"round {last.name}{over}, {ranks}")
    if facts.left_out:
        words.append(f"{len(facts.left_out)} left out")
    if facts.excluded:
        words.append(f"{len(facts.excluded)} excluded")
    if facts.written is not None:
        words.append(f"step {facts.written.step} written")
    if facts.starved:
        words.append(f"below its smallest size for {facts.starved:.1f} s")
    if facts.outcome is not None:
        words.append(f"outcome {facts.outcome.exit_code}")
    return ", ".join(words)


def _sessions(sessions: tuple[int, ...]) -> str:
    named = ",".join(map(str, sessions[:MOST_NAMED]))
    more = len(sessions) - MOST_NAMED
    return f"{named} and {more} more" if more > 0 else named
