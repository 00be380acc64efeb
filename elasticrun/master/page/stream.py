"""The page's data: the job's picture as JSON, and its changes as server-sent events.

Whatever the number of visitors, a picture is built and encoded at most once a second for each of
the two kinds (strangers, and visitors with full access), and the ranks are sampled at most every
SAMPLE_EVERY seconds. Without visitors no work is done.

A stranger (`readers`) does not get what could reveal paths and arguments: stacks, source lines,
last output lines, settings, events, and the sentences of verdicts and incidents.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, Final

import msgspec
from msgspec.structs import asdict, replace

from elasticrun import __version__
from elasticrun.core.reasons import read, text_without_evidence
from elasticrun.core.sight.picture import IncidentRow, Picture, RankRow, without_words
from elasticrun.master.loop import Loop
from elasticrun.master.outward.report import WORDS
from elasticrun.wire.messages import JobStatus, Reply, Request

Send = Callable[[dict[str, Any]], Awaitable[None]]
Receive = Callable[[], Awaitable[dict[str, Any]]]

PACE: Final = 1.0
"""Minimum seconds between two pictures."""

STREAM_LIFE: Final = 28.0
"""Seconds after which a stream is ended cleanly, before `http.CONNECTION_LIFE` would cut it. The
browser reconnects after RETRY milliseconds and gets the whole picture."""

RETRY: Final = 1000

SAMPLE_EVERY: Final = 3.0
"""Minimum seconds between samples of the ranks, while a visitor with full access is watching."""

RANKS_A_SECOND: Final = 64
"""Maximum number of ranks sampled per second on average: larger jobs are sampled less often,
because the samples also go into the master's trace."""

NO_LINK: Final = (
    "to see stacks and settings, open the link that `elasticrun status` prints on the master's host"
)

AGES: Final = frozenset(
    ("age", "ages", "left", "looked", "since", "quiet", "step_age", "remaining")
)
"""Fields that change merely because time passes: the page updates them itself, so such a change is
not sent."""

STILL: Final = 5.0
"""Seconds after which the page shows that a rank is quiet; the page counts on from there."""

Parts = dict[str, tuple[object, bytes]]
"""Each field of a picture: its value for comparison, and its JSON."""


class Feed:
    """The newest picture for one kind of visitor, and what changed last."""

    def __init__(self, loop: Loop, *, whole: bool) -> None:
        self._loop = loop
        self._whole = whole
        self._parts: Parts = {}
        self._change = b""
        self._due = 0.0
        self.number = 0
        """Number of the last change; 0: none yet."""

    def picture(self) -> bytes:
        """The whole picture as one JSON object."""
        self.refresh()
        return _object({name: data for name, (_, data) in self._parts.items()})

    def since(self, seen: int) -> bytes:
        """The data for a browser that has the picture as of change `seen` (0: none): the next
        change, the whole picture if more than one is missing, or nothing."""
        self.refresh()
        if seen == self.number:
            return b""
        return self._change if seen and seen == self.number - 1 else self.picture()

    def wait(self) -> float:
        """Seconds until another picture may be built."""
        return max(0.0, self._due - asyncio.get_running_loop().time())

    def refresh(self, *, now: bool = False) -> None:
        """Rebuild the picture if it is due; with `now`, in any case."""
        if not now and self.wait() > 0.0:
            return
        picture = self._loop.picture()
        shown = picture if self._whole else for_strangers(picture)
        parts = parts_of(shown)
        fresh = {
            name: data
            for name, (still, data) in parts.items()
            if name not in self._parts or self._parts[name][0] != still
        }
        if "status" in fresh and _have_same_nodes(self._parts, parts):
            fresh["status"] = _without_nodes(shown.status)
        if fresh:
            self._change = _object({"looked": parts["looked"][1], **fresh})
            self.number += 1
        self._parts = parts
        self._due = asyncio.get_running_loop().time() + PACE


class Watchers:
    """The visitors' streams, and the samples taken for them."""

    def __init__(self, loop: Loop) -> None:
        self._loop = loop
        self._sampling: asyncio.Future[Reply] | None = None
        self._sample_at = 0.0
        self._feeds = {whole: Feed(loop, whole=whole) for whole in (True, False)}
        self._closing: asyncio.Event = asyncio.Event()
        self._stream_count = 0
        self._empty: asyncio.Event = asyncio.Event()

    def picture(self, *, whole: bool) -> bytes:
        """The picture for a single request."""
        return self._feeds[whole].picture()

    async def serve(self, receive: Receive, send: Send, *, whole: bool, samples: bool) -> None:
        """Send events (after the response head) until the browser disconnects, STREAM_LIFE is over,
        or the master ends. `samples`: sample the ranks meanwhile."""
        self._stream_count += 1
        disconnected = asyncio.ensure_future(_until_disconnected(receive))
        ends = asyncio.ensure_future(self._closing.wait())
        try:
            await self._send(
                self._feeds[whole],
                send,
                disconnected,
                ends,
                self._sample_if_due if samples else None,
            )
        finally:
            disconnected.cancel()
            ends.cancel()
            self._stream_count -= 1
            if not self._stream_count:
                self._empty.set()

    def _sample_if_due(self) -> None:
        """Request a sample of the ranks, if due; later pictures show the result."""
        now = asyncio.get_running_loop().time()
        if now < self._sample_at or (self._sampling is not None and not self._sampling.done()):
            return
        self._sample_at = now + max(SAMPLE_EVERY, self._loop.status().world_size / RANKS_A_SECOND)
        self._sampling = asyncio.ensure_future(self._loop.request(Request("picture", live=True)))

    async def _send(
        self,
        feed: Feed,
        send: Send,
        disconnected: asyncio.Future[None],
        ends: asyncio.Future[Any],
        sample: Callable[[], None] | None,
    ) -> None:
        clock = asyncio.get_running_loop().time
        until = clock() + STREAM_LIFE
        await send(_piece(f"retry: {RETRY}\n\n".encode()))
        seen = 0
        while clock() < until and not disconnected.done():
            if data := feed.since(seen):
                await send(_piece(b"data: " + data + b"\n\n"))
                seen = feed.number
            if ends.done():
                break
            if sample is not None:
                sample()
            await asyncio.wait(
                (disconnected, ends), timeout=feed.wait(), return_when=asyncio.FIRST_COMPLETED
            )
            if ends.done():
                feed.refresh(now=True)
        await send({"type": "http.response.body", "body": b""})

    async def close(self, limit: float) -> None:
        """Send the last picture to every stream and end it; waits `limit` seconds at most."""
        self._closing.set()
        if self._sampling is not None:
            self._sampling.cancel()
        if self._stream_count:
            self._empty.clear()
            waiting = asyncio.ensure_future(self._empty.wait())
            await asyncio.wait((waiting,), timeout=limit)
            waiting.cancel()


async def _until_disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _piece(data: bytes) -> dict[str, Any]:
    return {"type": "http.response.body", "body": data, "more_body": True}


def parts_of(picture: Picture) -> Parts:
    """The picture field by field, and the version of elasticrun."""
    fields: dict[str, Any] = {**asdict(picture), "version": __version__}
    found = picture.verdict
    timeless = "".join(p for p in found.said if isinstance(p, str)) if found is not None else ""
    compared = fields | {"status": replace(picture.status, verdict=timeless)}
    return {
        name: (_still(msgspec.to_builtins(compared[name])), msgspec.json.encode(value))
        for name, value in fields.items()
        if name != "looked"
    } | {"looked": (0, msgspec.json.encode(picture.looked))}


def _have_same_nodes(before: Parts, after: Parts) -> bool:
    return bool(before) and _nodes(before) == _nodes(after)


def _nodes(parts: Parts) -> object:
    status: Any = parts["status"][0]
    return status["nodes"]


def _without_nodes(status: JobStatus) -> bytes:
    """The JSON of a status for a browser that has these nodes: the step changes each second, and
    the nodes of a large job are most of its status."""
    fields = msgspec.to_builtins(replace(status, nodes=()))
    del fields["nodes"]
    return msgspec.json.encode(fields)


def _still(value: Any) -> Any:
    """A value to compare: without ages; a rank's `quiet` becomes a flag, and a verdict has no
    seconds."""
    if isinstance(value, dict):
        still = {name: _still(one) for name, one in value.items() if name not in AGES}
        if isinstance(quiet := value.get("quiet"), float):
            still["quiet"] = quiet >= STILL
        if "klass" in value:  # a verdict: its sentence contains seconds
            del still["sentence"]
            still["said"] = [piece for piece in value["said"] if isinstance(piece, str)]
        return still
    if isinstance(value, list | tuple):
        return [_still(one) for one in value]
    return value


def _object(fields: dict[str, bytes]) -> bytes:
    """A JSON object of values that are already encoded. It must not contain a line break, which
    would end an event."""
    inside = b",".join(b'"%s":%s' % (name.encode(), data) for name, data in fields.items())
    return b"{" + inside + b"}"


def for_strangers(picture: Picture) -> Picture:
    """The picture without what could reveal paths, arguments and output of the script."""
    verdict, spent = picture.verdict, picture.goodput
    declared = "something long" if verdict is not None and verdict.says else ""
    return replace(
        picture,
        status=status_for_strangers(picture.status),
        events=(),
        ranks=tuple(_rank_for_strangers(row) for row in picture.ranks),
        incidents=tuple(_incident_for_strangers(row) for row in picture.incidents),
        verdict=(
            replace(verdict, sentence=verdict.kind, said=(), folder="", says=declared, place="")
            if verdict
            else None
        ),
        goodput=replace(spent, rows=without_words(spent.rows)) if spent else None,
        stacks=(),
        stacks_missing=NO_LINK,
        said=(),
        settings=(),
        training=None,
    )


def _rank_for_strangers(row: RankRow) -> RankRow:
    return replace(row, place="")


def _incident_for_strangers(row: IncidentRow) -> IncidentRow:
    what = WORDS.get(row.cause, row.cause)
    hidden = {"followed": "", "decision": "", "hang": "", "last_lines": ""}
    hidden |= {"ended_before": "", "found": ""}
    return replace(row, sentence=what, stacks=(), **hidden)


def status_for_strangers(status: JobStatus) -> JobStatus:
    """The status without the sentence of a verdict, which names source lines, and without texts
    from ranks, people and agents."""
    return replace(
        status,
        verdict="ranks are hanging" if status.verdict else "",
        last_failure=text_without_evidence(read(status.last_failure, status.failed)),
        outcome=text_without_evidence(read(status.outcome, status.ended)),
        failed=None,
        ended=None,
    )
