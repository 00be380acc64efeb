"""Messages as lines of a trace."""

from __future__ import annotations

from elasticrun.trace.words import snapshot_words
from elasticrun.wire.messages import (
    Beat,
    CommitCheckpoint,
    Departing,
    Finished,
    Hello,
    Holder,
    Holdings,
    Join,
    Leaving,
    Missed,
    NotReplicated,
    Order,
    Park,
    Persist,
    Persisted,
    PersistOver,
    Probe,
    Probed,
    RanksFailed,
    Refused,
    Replicate,
    Report,
    Running,
    SaveAt,
    ShardBad,
    Start,
    Steps,
    Stop,
    Stopped,
    Stopping,
    Wait,
    Watermark,
    Welcome,
    WhereIs,
)

_ABOUT_SNAPSHOTS = (
    Holdings
    | WhereIs
    | ShardBad
    | Persisted
    | Watermark
    | Persist
    | CommitCheckpoint
    | PersistOver
    | Holder
    | NotReplicated
    | Replicate
    | Departing
    | SaveAt
    | Missed
)


def in_short(message: Report | Order) -> str:
    """A message as one line of a trace."""
    if isinstance(message, Start):
        return (
            f"Start {message.round.number}: group {message.group_rank}/{message.group_world_size}, "
            f"ranks from {message.first_rank} of {message.world_size}, store {message.store.host}, "
            f"restarts {message.restart_count}{_from(message)}"
        )
    if isinstance(message, _ABOUT_SNAPSHOTS):
        return snapshot_words(message)
    if isinstance(message, Stop):
        return f"Stop {message.round.number}: {message.reason}"
    if isinstance(message, RanksFailed):
        ranks = ", ".join(f"{f.rank} ({f.exitcode}, {f.kind.value})" for f in message.failures)
        return f"RanksFailed {message.round.number}: {ranks}"
    if isinstance(message, Stopping):
        return f"Stopping {message.round.number}: {message.remaining:g} s"
    if isinstance(message, Running | Stopped | Finished):
        return f"{type(message).__name__} {message.round.number}"
    if isinstance(message, Join):
        return "Join"
    if isinstance(message, Probe):
        where = f"{message.group_rank}/{message.group_world_size}"
        alone = f"with {message.partners}" if message.partners else "alone"
        kind = "Probe (perf)" if message.perf else "Probe"
        return f"{kind} {alone}: group {where}, store {message.store.host}"
    if isinstance(message, Probed):
        whose = "own, " if message.own else "excused, " if message.excused else ""
        said = f"{whose}{message.phase.value}: {message.reason}"
        return "Probed: ok" if message.ok else f"Probed: failed ({said})"
    if isinstance(message, Steps):
        return f"Steps {message.round.number}: {message.own:g} of {message.seconds:g} s"
    if isinstance(message, Wait | Refused | Leaving | Park):
        return f"{type(message).__name__}: {message.reason}"
    if isinstance(message, Hello | Welcome | Beat):
        return type(message).__name__
    exit_code = getattr(message, "exit_code", 0)
    reason = getattr(message, "reason", "")
    return f"End {exit_code}: {reason}"


def _from(start: Start) -> str:
    on = start.restore
    words = "" if on is None else f", from step {on.step} of round {on.round.number}"
    words += f", rewound from {start.rewound_from}" if start.rewound_from >= 0 else ""
    words += ", suspect" if start.suspect else ""
    return words + (f", restore step {start.restore_step}" if start.restore_step >= 0 else "")
