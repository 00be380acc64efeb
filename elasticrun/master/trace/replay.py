"""Replays a trace: feeds a master's recorded input to the real state machine.

`read` parses a trace line by line, and reads the ring's two files as one. If a file starts in the
middle of a master's run, its head is used only if the file before it is missing.

`replay` feeds it to the state machine. That is deterministic (time and nonces are arguments, and
both are in the trace), so its output must equal the recorded one. If it differs, the trace is of
another version, or there is a bug; the first MAX_DIFFERENCES differences are shown.
"""

from __future__ import annotations

import json
import re
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import groupby, zip_longest
from pathlib import Path
from typing import Any, BinaryIO, Final

from msgspec.structs import replace

from elasticrun import __version__
from elasticrun.core import events
from elasticrun.core.job.job import Job
from elasticrun.core.persisted import Facts, aged
from elasticrun.core.rounds.round import restored
from elasticrun.master.trace import words
from elasticrun.master.trace.chrome import ChromeTrace
from elasticrun.master.trace.writer import FILE, OLDER
from elasticrun.wire import messages as m
from elasticrun.wire.types import typed

MAX_LINE: Final = 64 * 1024 * 1024
"""Maximum bytes of a line; the facts of 100,000 nodes are about 30 MB."""

CAUSE_WIDTH: Final = 38
"""Columns for the text of an event; a longer one gets a line of its own."""

MAX_NAMED: Final = 4
"""Maximum number of nodes named for orders of the same kind; of the others only the number is
shown."""

MAX_DIFFERENCES: Final = 10
"""Maximum number of differences shown; later ones usually follow from the first."""

_ROUND_NAME: Final = re.compile(r" \(\d+/[0-9a-f?]+\)")  # term and nonce, after a round's number

SAME: Final = 0
DIFFERS: Final = 1


# ---------------------------------------------------------------- reading


class NoTrace(Exception):
    """The file cannot be read as a trace, or the timeline cannot be written; the text is one
    sentence."""


@dataclass(frozen=True, slots=True)
class TraceHead:
    """The head of a master's trace, or (`midst`) of a file that the ring began during its run."""

    version: str
    job_id: str
    term: int
    spec: m.JobSpec | None
    facts: Facts | None
    at: float
    wall: str
    midst: bool = False
    facts_age: float = 0.0
    streams: tuple[events.Attached, ...] = ()


@dataclass(frozen=True, slots=True)
class Step:
    """One step of the state machine: its input, its output as text, and its exception, if any."""

    at: float
    event: events.JobEvent
    minted: tuple[str, ...] = ()
    output: tuple[str, ...] = ()
    raised: str = ""


@dataclass(frozen=True, slots=True)
class Gap:
    """Data is missing here; `why` is a sentence. `cut`: the writer died in the middle of a line."""

    why: str
    cut: bool = False


Item = TraceHead | Step | Gap


def read(path: Path) -> Iterator[Item]:
    """The items of the trace at `path` (a file, or a record's folder). Raises NoTrace."""
    if path.is_dir():
        path = path / FILE
    older = path.with_name(path.name + OLDER)
    files = [older, path] if older.exists() and path.exists() else [path]
    for number, file in enumerate(files):
        try:
            opened = file.open("rb")
        except OSError as wrong:
            raise NoTrace(f"{file} cannot be read: {wrong.strerror or wrong}") from None
        with opened:
            yield from _read_file(file, opened, first=not number)


def _read_file(path: Path, file: BinaryIO, *, first: bool) -> Iterator[Item]:
    for number, line in enumerate(iter(partial(file.readline, MAX_LINE), b""), start=1):
        if not line.strip():
            continue
        try:
            items = list(_items(json.loads(line)))
        except (ValueError, TypeError, RecursionError) as wrong:
            if first:
                foreign = isinstance(wrong, json.JSONDecodeError)
                why = "it is not text of that form" if foreign else str(wrong)
                raise NoTrace(f"{path} is not a trace: {why}") from None
            cut = not line.endswith(b"\n") or _is_cut(file)
            killed = "is incomplete, because its master was killed"
            damage = killed if cut else f"is damaged: {wrong}"
            yield Gap(f"line {number} of {path.name} {damage}", cut)
            continue
        if first and not (items and isinstance(items[0], TraceHead)):
            raise NoTrace(f"{path} is not a trace: it does not begin with a master's header")
        first = False
        yield from items
    if first:
        raise NoTrace(f"{path} is not a trace: it is empty")


def _is_cut(file: BinaryIO) -> bool:
    """Whether the line just read was left unfinished by a killed master: then a later master has
    ended it, and the next line is that master's head."""
    here = file.tell()
    following = file.readline(64)
    file.seek(here)
    return following.startswith(b'{"trace":')


def _items(line: Any) -> Iterator[Item]:
    if not isinstance(line, dict):
        raise ValueError("a line is not a JSON object")
    if "trace" in line:
        yield _head(line)
    elif "beats" in line:
        for at, session, number in line["beats"]:
            beat = m.Beat(typed(number, int))
            yield Step(typed(at, float), events.Heard(typed(session, int), beat))
    elif "dropped" in line:
        yield Gap(
            f"{typed(line['dropped'], int)} events are missing here, because the disk was slow"
        )
    else:
        yield Step(
            typed(line.get("t"), float),
            words.event_from_plain(line.get("e")),
            typed(line.get("mint", []), tuple[str, ...]),
            typed(line.get("do", []), tuple[str, ...]),
            typed(line.get("raised", ""), str),
        )


def _head(line: dict[str, Any]) -> TraceHead:
    if line["trace"] != words.TRACE_VERSION:
        raise ValueError(
            f"it has version {line['trace']!r}, but this elasticrun reads {words.TRACE_VERSION}"
        )
    streams = [words.event_from_plain(stream) for stream in line.get("streams", [])]
    return TraceHead(
        version=typed(line.get("version"), str),
        job_id=typed(line.get("job"), str),
        term=typed(line.get("term"), int),
        spec=typed(line.get("spec"), m.JobSpec | None),
        facts=typed(line.get("facts"), Facts | None),
        at=typed(line.get("t"), float),
        wall=typed(line.get("wall", ""), str),
        midst=typed(line.get("midst", False), bool),
        facts_age=typed(line.get("facts_age", 0.0), float),
        streams=tuple(stream for stream in streams if isinstance(stream, events.Attached)),
    )


# ---------------------------------------------------------------- replay


@dataclass(frozen=True, slots=True)
class Selection:
    """Which lines to print."""

    node: str = ""  # only lines about this node
    since: float = 0.0  # seconds from the start of the trace
    everything: bool = False  # also events without an effect


def replay(
    path: Path, selection: Selection, out: Callable[[str], None], timeline: Path | None = None
) -> int:
    """Print the decisions in the trace at `path`, one per line; returns SAME or DIFFERS.
    `timeline`: a file for rounds, incidents and hangs (`chrome`). Raises NoTrace."""
    player = _Player(selection, out)
    for item in read(path):
        match item:
            case TraceHead():
                player.head(item)
            case Step():
                player.step(item)
            case Gap():
                player.gap(item)
    return player.finish(timeline)


class _Player:
    def __init__(self, selection: Selection, out: Callable[[str], None]) -> None:
        self._selection = selection
        self._out = out
        self._job: Job | None = None
        self._term = -1
        self._nonces: deque[str] = deque()
        self._nodes: dict[int, str] = {}
        self._origin: float | None = None
        self._now = 0.0
        self._exact = True
        self._steps = 0
        self._differences = 0
        self._uncounted = False
        self._timeline = ChromeTrace()

    # ------------------------------------------------------------ items of the trace

    def head(self, head: TraceHead) -> None:
        """Start a state machine as the recorded master did, unless this is only its next file."""
        if head.midst and self._job is not None and head.term == self._term:
            return
        if self._origin is None or head.at < self._now:  # after a reboot the clock starts anew
            self._origin = head.at
        self._now = head.at
        self._term = head.term
        self._nonces.clear()
        self._nodes.clear()
        self._exact = not head.midst
        facts = head.facts
        for line in _heading(head):
            self._out(line)
        if facts is not None and head.midst:
            facts = aged(facts, head.facts_age)
        self._job = Job(head.spec, head.term, self._mint, facts)
        for stream in head.streams:
            self._nodes[stream.session] = stream.hello.node
            self._job.step(_reattached(stream, facts), head.at)

    def step(self, step: Step) -> None:
        """Process a recorded event, print the output, and compare it with the recorded one."""
        assert self._job is not None
        self._now = step.at
        self._steps += 1
        self._nonces.extend(step.minted)
        if isinstance(step.event, events.Attached):
            self._nodes[step.event.session] = step.event.hello.node
        raised = ""
        effects: list[events.JobEffect] = []
        try:
            effects = self._job.step(step.event, step.at)
        except Exception as fault:  # as recorded
            raised = f"{type(fault).__name__}: {fault}"
        self._timeline.add(step.at, effects)
        self._show(step, effects, raised)
        self._compare(step, effects, raised)
        if isinstance(step.event, events.Detached):
            self._nodes.pop(step.event.session, None)

    def gap(self, gap: Gap) -> None:
        """Print that data is missing; unless it is only a cut line, later differences do not
        count."""
        self._out(f"-- {gap.why}")
        self._exact = self._exact and gap.cut

    def finish(self, timeline: Path | None) -> int:
        """Write the timeline if requested and print the summary; returns SAME or DIFFERS."""
        if timeline is not None:
            try:
                self._timeline.write(timeline, self._now)
            except OSError as wrong:
                raise NoTrace(f"the timeline cannot be written: {wrong}") from None
        summary = "the replay matches the recording"
        if self._differences:
            summary = f"the replay DIFFERS from the recording, {self._differences} times"
        elif self._uncounted:
            summary = "the replay differs after the gap, which is expected"
        self._out(f"-- {self._steps} events; {summary}")
        return DIFFERS if self._differences else SAME

    def _mint(self) -> str:
        return self._nonces.popleft() if self._nonces else "????????"

    # ------------------------------------------------------------ printing

    def _show(self, step: Step, effects: list[events.JobEffect], raised: str) -> None:
        at = step.at - (self._origin or 0.0)
        if at < self._selection.since:
            return
        lines = list(self._decisions(effects))
        if raised:
            lines.append(f"the state machine raised {raised}")
        cause = self._cause(step.event)
        beat = isinstance(step.event, events.Heard) and isinstance(step.event.report, m.Beat)
        if not lines and (beat or not self._selection.everything):
            return
        if self._selection.node and not self._concerns(step, effects, [cause, *lines]):
            return
        self._print(at, cause, lines or ["-"])

    def _print(self, at: float, cause: str, lines: list[str]) -> None:
        stamp = f"{at:10.3f}  "
        if len(cause) > CAUSE_WIDTH:
            self._out(stamp + cause)
            stamp, cause = " " * len(stamp), ""
        for line in lines:
            # People need only a round's number; the comparison uses the whole name.
            self._out(f"{stamp}{cause:<{CAUSE_WIDTH}}  {_ROUND_NAME.sub('', line)}")
            stamp, cause = " " * len(stamp), ""

    def _concerns(self, step: Step, effects: list[events.JobEffect], lines: list[str]) -> bool:
        name = self._selection.node
        concerned = {
            s for effect in effects if isinstance(effect, events.Send) for s in effect.sessions
        }
        if isinstance(step.event, events.Attached | events.Heard | events.Detached):
            concerned.add(step.event.session)
        if any(self._nodes.get(session) == name for session in concerned):
            return True
        return any(name == word.strip(".,:;()'\"") for line in lines for word in line.split())

    def _cause(self, event: events.JobEvent) -> str:
        if isinstance(event, events.Attached):
            attached = event.hello.attached
            back = "" if attached is None else f", in round {attached.round.number}"
            return f"{event.hello.node} attaches{back}"
        if isinstance(event, events.Heard):
            return f"{self._name(event.session)}: {words.in_words(event.report)}"
        if isinstance(event, events.Detached):
            how = "hangs up" if event.clean else "stream broke"
            return f"{self._name(event.session)}: {how}"
        if isinstance(event, events.Overslept):
            return f"the loop was {event.by:.1f} s late"
        if isinstance(event, events.Requested):
            return f"{event.request.who or 'a reader'} asks: {event.request.verb}"
        return "(a deadline)"

    def _decisions(self, effects: list[events.JobEffect]) -> Iterator[str]:
        for kind, group in groupby(effects, _kind):
            same = list(group)
            sends = [effect for effect in same if isinstance(effect, events.Send)]
            if kind is m.Welcome:
                continue
            if len(sends) > MAX_NAMED:
                yield self._sends_in_short(sends)
                continue
            for effect in same:
                yield self._decision(effect)

    def _decision(self, effect: events.JobEffect) -> str:
        match effect:
            case events.Send():
                return f"-> {self._names(effect.sessions)}: {words.in_words(effect.order)}"
            case events.Hangup():
                return f"hang up on {self._name(effect.session)}"
            case events.Note():
                return effect.text if effect.level == "info" else f"{effect.level}: {effect.text}"
            case events.JobOver():
                return f"the job is over with {effect.exit_code}: {effect.reason}"
            case events.Record():
                return f"recorded: {words.facts_in_words(effect.facts)}"
            case events.Replied() | events.Filed() | events.Judged() | events.FoundSlow():
                return words.effect_in_words(effect)

    def _sends_in_short(self, sends: list[events.Send]) -> str:
        sessions = tuple(session for send in sends for session in send.sessions)
        order = sends[0].order
        number = f" {order.round.number}" if isinstance(order, m.Start) else ""
        return f"-> {self._names(sessions)}: {type(order).__name__}{number}, one for each"

    def _names(self, sessions: tuple[int, ...]) -> str:
        return words.listed([self._name(session) for session in sessions], MAX_NAMED)

    def _name(self, session: int) -> str:
        return self._nodes.get(session, f"session {session}")

    # ------------------------------------------------------------ comparing

    def _compare(self, step: Step, effects: list[events.JobEffect], raised: str) -> None:
        output = tuple(words.effect_in_words(effect) for effect in effects)
        if output == step.output and raised == step.raised:
            return
        if not self._exact:
            self._uncounted = True
            return
        self._differences += 1
        if self._differences > MAX_DIFFERENCES:
            return
        self._print(step.at - (self._origin or 0.0), self._cause(step.event), ["DIFFERS:"])
        if raised != step.raised:
            self._out(f"  recorded: raised {step.raised or 'nothing'}")
            self._out(f"  replayed: raised {raised or 'nothing'}")
        for recorded, replayed in zip_longest(step.output, output, fillvalue="(nothing)"):
            if recorded != replayed:
                self._out(f"  recorded: {recorded}")
                self._out(f"  replayed: {replayed}")


def _kind(effect: events.JobEffect) -> type:
    """The kind of an effect; adjacent effects of the same kind are grouped."""
    return type(effect.order) if isinstance(effect, events.Send) else type(effect)


def _heading(head: TraceHead) -> Iterator[str]:
    yield f"== job {head.job_id!r}, a master of term {head.term} since {head.wall}"
    if head.version != __version__:
        yield f"-- recorded by elasticrun {head.version}; this is {__version__}"
    if head.midst:
        yield (
            "-- earlier events are lost (the trace is a ring): the replay starts from the facts of "
            "this moment, as a successor would, so its output may differ"
        )
    if head.facts is not None:
        yield f"-- with a record: {_ROUND_NAME.sub('', words.facts_in_words(head.facts))}"


def _reattached(stream: events.Attached, facts: Facts | None) -> events.Attached:
    """A stream that was open when the file began, as its node would attach to a new master: with
    its seat in the running round."""
    last = None if facts is None else restored(facts.rendezvous)
    seat = None if last is None else last.members.get(stream.hello.node)
    if last is None or seat is None or seat.incarnation != stream.hello.incarnation:
        return stream
    attached = last.start(seat.node)
    return replace(stream, hello=replace(stream.hello, attached=attached))
