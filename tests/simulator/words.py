"""Messages as lines of a trace."""

from __future__ import annotations

import elasticrun.wire.messages as m
from elasticrun.master.trace.words import in_words


def in_short(message: m.Report | m.Order) -> str:
    kind = type(message).__name__
    match message:
        case m.Start():
            return (
                f"Start {message.round.number}: "
                f"group {message.group_rank}/{message.group_world_size}, "
                f"ranks from {message.first_rank} of {message.info.world_size}, "
                f"store {message.store.host}, restarts {message.info.restart_count}{_from(message)}"
            )
        case m.Stop():
            return f"Stop {message.round.number}: {message.reason}"
        case m.RanksFailed():
            ranks = ", ".join(f"{f.rank} ({f.exitcode}, {f.kind.value})" for f in message.failures)
            return f"RanksFailed {message.round.number}: {ranks}"
        case m.Stopping():
            return f"Stopping {message.round.number}: {message.remaining:g} s"
        case m.Running() | m.Stopped() | m.Finished():
            return f"{kind} {message.round.number}"
        case m.Probe():
            where = f"{message.group_rank}/{message.group_world_size}"
            alone = f"with {message.partners}" if message.partners else "alone"
            perf = " (perf)" if message.perf else ""
            return f"Probe{perf} {alone}: group {where}, store {message.store.host}"
        case m.Probed():
            whose = "own, " if message.own else "excused, " if message.excused else ""
            said = f"{whose}{message.phase.value}: {message.reason}"
            return "Probed: ok" if message.ok else f"Probed: failed ({said})"
        case m.Steps():
            return f"Steps {message.round.number}: {message.own:g} of {message.seconds:g} s"
        case m.Wait() | m.Refused() | m.Leaving():
            return f"{kind}: {message.reason}"
        case m.Join() | m.Hello() | m.Welcome() | m.Beat() | m.Echo():
            return kind
        case m.End():
            return f"End {message.exit_code}: {message.reason}"
        case _:
            return in_words(message)


def _from(start: m.Start) -> str:
    on = start.info.restore
    words = "" if on is None else f", from step {on.step} of round {on.round.number}"
    skip = start.info.skip
    words += f", without ranks {list(lost)}" if (lost := start.info.distrusted) else ""
    words += f", rewound from {skip.storage_from}" if skip.storage_from >= 0 else ""
    words += ", suspect" if skip.memory else ""
    return words + (f", restore step {skip.all_but}" if skip.all_but >= 0 else "")
