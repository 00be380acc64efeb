"""What browsers live on: the job's picture as JSON, and what has changed in it as server-sent
events. However many watch, a picture is made and written once a second at most, and the ranks are
looked at every LOOK_EVERY seconds; while nobody watches, nothing is done for it.

A stranger (`readers`) is not shown what tells of paths and arguments: stacks, places in the script,
last lines, settings, events, and the sentences of verdicts and incidents.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, Final

import msgspec
from msgspec.structs import asdict, replace

from elasticrun import __version__
from elasticrun.core.reasons import brief, read
from elasticrun.core.sight.picture import IncidentRow, Picture, RankRow, without_words
from elasticrun.master.loop import Loop
from elasticrun.master.outward.report import WORDS
from elasticrun.wire.messages import JobStatus, Reply, Request

Send = Callable[[dict[str, Any]], Awaitable[None]]
Receive = Callable[[], Awaitable[dict[str, Any]]]

PACE: Final = 1.0
"""Seconds from one picture to the next."""

STREAM_LIFE: Final = 28.0
"""Seconds after which a stream ends in order, before its connection would be cut; the browser comes
back after RETRY milliseconds and is given the whole picture again."""

RETRY: Final = 1000

LOOK_EVERY: Final = 3.0
"""Seconds between looks at the ranks for those who watch, and may see all."""

RANKS_A_SECOND: Final = 64
"""Larger jobs are looked at less often: what the ranks say goes into the master's trace, too."""

NO_LINK: Final = (
    "stacks and settings are shown to who opens the link that `elasticrun status` prints on the "
    "master's host"
)

AGES: Final = frozenset(("age", "looked", "since", "quiet", "step_age", "remaining"))
"""They run by themselves: the page counts on, and nothing is sent for them."""

STILL: Final = 5.0
"""Seconds from which on the page counts on for how long a rank has been quiet."""

Parts = dict[str, tuple[object, bytes]]
"""Each field of a picture: what is compared of it, and its JSON."""


class Feed:
    """The picture for one kind of visitor, as it was last made, and what was new in it then."""

    def __init__(self, loop: Loop, *, whole: bool) -> None:
        self._loop = loop
        self._whole = whole
        self._parts: Parts = {}
        self._change = b""
        self._due = 0.0
        self.number = 0
        """Of the change that came last; a stream that has seen it waits for the next."""

    def picture(self) -> bytes:
        """All of it, as one JSON object."""
        self.refresh()
        return _object({name: data for name, (_, data) in self._parts.items()})

    def since(self, seen: int) -> bytes:
        """What a stream sends whose browser has seen change `seen`; 0: nothing. Empty: no news."""
        self.refresh()
        if seen == self.number:
            return b""
        return self._change if seen and seen == self.number - 1 else self.picture()

    def wait(self) -> float:
        """Seconds until another picture may be made."""
        return max(0.0, self._due - asyncio.get_running_loop().time())

    def refresh(self, *, now: bool = False) -> None:
        """Make the picture anew if it is due, or `now` in any case."""
        if not now and self.wait() > 0.0:
            return
        picture = self._loop.picture()
        parts = parts_of(picture if self._whole else for_strangers(picture))
        fresh = {
            name: data
            for name, (still, data) in parts.items()
            if name not in self._parts or self._parts[name][0] != still
        }
        if fresh:
            self._change = _object({"looked": parts["looked"][1], **fresh})
            self.number += 1
        self._parts = parts
        self._due = asyncio.get_running_loop().time() + PACE


class Watchers:
    """Those who watch. `close` sends the last picture to each and ends it."""

    def __init__(self, loop: Loop) -> None:
        self._loop = loop
        self._looking: asyncio.Future[Reply] | None = None
        self._look_at = 0.0
        self._feeds = {whole: Feed(loop, whole=whole) for whole in (True, False)}
        self._closing: asyncio.Event = asyncio.Event()
        self._watched = 0
        self._empty: asyncio.Event = asyncio.Event()

    def picture(self, *, whole: bool) -> bytes:
        """For who asks once."""
        return self._feeds[whole].picture()

    async def serve(self, receive: Receive, send: Send, *, whole: bool, looks: bool) -> None:
        """Send events, the head having been sent, until the browser has gone, the stream's life is
        over or the master ends. `looks`: have the ranks looked at meanwhile."""
        self._watched += 1
        gone = asyncio.ensure_future(_gone(receive))
        ends = asyncio.ensure_future(self._closing.wait())
        try:
            await self._send(self._feeds[whole], send, gone, ends, self._look if looks else None)
        finally:
            gone.cancel()
            ends.cancel()
            self._watched -= 1
            if not self._watched:
                self._empty.set()

    def _look(self) -> None:
        """Have the ranks looked at, if that is due; the pictures that follow show what is found."""
        now = asyncio.get_running_loop().time()
        if now < self._look_at or (self._looking is not None and not self._looking.done()):
            return
        self._look_at = now + max(LOOK_EVERY, self._loop.status().world_size / RANKS_A_SECOND)
        self._looking = asyncio.ensure_future(self._loop.ask(Request("picture", live=True)))

    async def _send(
        self,
        feed: Feed,
        send: Send,
        gone: asyncio.Future[None],
        ends: asyncio.Future[Any],
        look: Callable[[], None] | None,
    ) -> None:
        clock = asyncio.get_running_loop().time
        until = clock() + STREAM_LIFE
        await send(_piece(f"retry: {RETRY}\n\n".encode()))
        seen = 0
        while clock() < until and not gone.done():
            if data := feed.since(seen):
                await send(_piece(b"data: " + data + b"\n\n"))
                seen = feed.number
            if ends.done():
                break
            if look is not None:
                look()
            await asyncio.wait(
                (gone, ends), timeout=feed.wait(), return_when=asyncio.FIRST_COMPLETED
            )
            if ends.done():
                feed.refresh(now=True)
        await send({"type": "http.response.body", "body": b""})

    async def close(self, limit: float) -> None:
        """Let every stream say how it ended, for `limit` seconds at most."""
        self._closing.set()
        if self._looking is not None:
            self._looking.cancel()
        if self._watched:
            self._empty.clear()
            waiting = asyncio.ensure_future(self._empty.wait())
            await asyncio.wait((waiting,), timeout=limit)
            waiting.cancel()


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _piece(data: bytes) -> dict[str, Any]:
    return {"type": "http.response.body", "body": data, "more_body": True}


def parts_of(picture: Picture) -> Parts:
    """Field by field, and which version of elasticrun says so."""
    fields: dict[str, Any] = {**asdict(picture), "version": __version__}
    found = picture.verdict
    timeless = "".join(p for p in found.said if isinstance(p, str)) if found is not None else ""
    compared = fields | {"status": replace(picture.status, verdict=timeless)}
    return {
        name: (_still(msgspec.to_builtins(compared[name])), msgspec.json.encode(value))
        for name, value in fields.items()
        if name != "looked"
    } | {"looked": (0, msgspec.json.encode(picture.looked))}


def _still(value: Any) -> Any:
    """The same without ages; of a rank's `quiet`, whether it is still."""
    if isinstance(value, dict):
        still = {name: _still(one) for name, one in value.items() if name not in AGES}
        if isinstance(quiet := value.get("quiet"), float):
            still["quiet"] = quiet >= STILL
        if "klass" in value:  # a verdict: its sentence counts seconds
            del still["sentence"]
            still["said"] = [piece for piece in value["said"] if isinstance(piece, str)]
        return still
    if isinstance(value, list | tuple):
        return [_still(one) for one in value]
    return value


def _object(fields: dict[str, bytes]) -> bytes:
    """JSON of values that are JSON already. Its text has no line end: that would end an event."""
    inside = b",".join(b'"%s":%s' % (name.encode(), data) for name, data in fields.items())
    return b"{" + inside + b"}"


def for_strangers(picture: Picture) -> Picture:
    """The picture without paths, arguments and what the script has said."""
    verdict, spent = picture.verdict, picture.goodput
    says = "something long" if verdict is not None and verdict.says else ""
    return replace(
        picture,
        status=status_for_strangers(picture.status),
        events=(),
        ranks=tuple(_rank_for_strangers(row) for row in picture.ranks),
        incidents=tuple(_incident_for_strangers(row) for row in picture.incidents),
        verdict=(
            replace(verdict, sentence=verdict.kind, said=(), folder="", says=says, place="")
            if verdict
            else None
        ),
        goodput=replace(spent, rows=without_words(spent.rows)) if spent else None,
        stacks=(),
        stacks_missing=NO_LINK,
        said=(),
        settings=(),
    )


def _rank_for_strangers(row: RankRow) -> RankRow:
    return replace(row, place="")


def _incident_for_strangers(row: IncidentRow) -> IncidentRow:
    what = WORDS.get(row.cause, row.cause)
    said = {"followed": "", "decision": "", "hang": "", "last_lines": "", "ended_before": ""}
    return replace(row, sentence=what, stacks=(), **said)


def status_for_strangers(status: JobStatus) -> JobStatus:
    """The status without the lines of the script that a verdict names, of whatever kind it is, and
    without what a rank, a person or an agent has said."""
    return replace(
        status,
        verdict="ranks stand still" if status.verdict else "",
        last_failure=brief(read(status.last_failure, status.failed)),
        outcome=brief(read(status.outcome, status.ended)),
        failed=None,
        ended=None,
    )
