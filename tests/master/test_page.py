"""The HTTP page: what it says, and what strangers can do to it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st
from msgspec import structs
from prometheus_client.parser import text_string_to_metric_families

from elasticrun import __version__
from elasticrun.core.events import Heard, Judged, Replied, Requested, Send
from elasticrun.core.reasons import NoRestartsLeft, RankFailed, code, text
from elasticrun.core.sight.picture import IncidentRow, LedgerRow, RankRow, VerdictRow
from elasticrun.master.loop import Loop
from elasticrun.master.page import http as page_module, stream
from elasticrun.master.page.http import MAX_CONNECTIONS, StatusPage
from elasticrun.master.page.metrics import SlotCounters
from elasticrun.master.page.readers import MAX_SPENT, NO_KEY, Readers, page_url
from elasticrun.master.page.stream import for_strangers
from elasticrun.wire import messages as m
from elasticrun.wire.auth import PAGE_KEY_LIFE, operator_token, page_key
from elasticrun.wire.types import Endpoint
from tests import aio
from tests.further import examples
from tests.master.people import LIMIT, ROUND, Recorder, status
from tests.master.pictures import hung

PROBED = m.Probed(
    "c1", True, m.ProbePhase.DONE, False, False, "", 0.01, 2.7e8, (), seconds=0.4, timed=0.2
)
EXCLUDED = m.ExcludedNode("n9", "h9", "slow", "n9 is slow", 5.0, 3595.0)
FAILURE = m.Failure("h", 1, 1, 9, -9, 0, m.FailureKind.SIGNAL, "killed", "", "")


@asynccontextmanager
async def paged() -> AsyncIterator[tuple[Loop, int]]:
    brain = Recorder()
    brain.page = status(excluded=(EXCLUDED,), check="all passed")
    loop = Loop(brain)
    page = StatusPage(loop)
    try:
        yield loop, page.listen("127.0.0.1", 0)
    finally:
        await page.close()


async def say(port: int, data: bytes) -> bytes:
    """All that comes back for these bytes; empty when the connection is cut."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(data)
        async with asyncio.timeout(LIMIT):
            return await reader.read()
    except ConnectionError:
        return b""
    finally:
        writer.close()


async def get(port: int, path: str, method: str = "GET") -> tuple[int, str, bytes]:
    request = f"{method} {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
    head, _, body = (await say(port, request.encode())).partition(b"\r\n\r\n")
    return int(head.split()[1]), head.decode().lower(), body


async def test_status_is_the_picture() -> None:
    async with paged() as (loop, port):
        code, head, body = await get(port, "/status?pretty=1")
        assert code == 200
        assert "application/json" in head
        shown = json.loads(body)
        assert shown["version"] == __version__
        assert shown["round"]["number"] == 1
        assert shown["nodes"][0]["reason"] == "because [so]"
        assert shown["restarts_left"] == loop.status().restarts_left
        assert shown["check"] == "all passed"
        assert shown["excluded"] == [structs.asdict(EXCLUDED)]


async def test_metrics_can_be_scraped() -> None:
    async with paged() as (loop, port):
        start = m.Start(m.RoundInfo(ROUND, 2), 0, 1, 0, 0, 2, Endpoint("h", 1), True)
        loop._perform(Send((1,), start))
        for _ in range(2):  # a node repeats itself
            loop.put(Heard(1, m.RanksFailed(ROUND, (FAILURE,))))
        loop.put(Heard(1, PROBED))
        verdict = VerdictRow("strong", "idle", "rank 3 is idle", 61.0, "3", "", "")
        loop._perform(Judged(verdict, over=False))
        loop._perform(Judged(verdict, over=True))
        loop._turn()
        code, head, body = await get(port, "/metrics")
        assert code == 200
        assert "version=0.0.4" in head
        found = {
            (sample.name, *sample.labels.values()): sample.value
            for family in text_string_to_metric_families(body.decode())
            for sample in family.samples
        }
        page = (Path(__file__).parents[2] / "docs/sight.md").read_text()
        assert not {name for name, *_ in found if not re.search(rf"`{name}[`{{]", page)}
        assert found["elasticrun_nodes", "alive"] == 1
        assert found["elasticrun_nodes", "dead"] == 0
        assert found["elasticrun_round",] == 1
        assert found["elasticrun_world_size",] == 2
        assert found["elasticrun_restarts_total",] == 1
        assert found["elasticrun_restarts_left",] == 2
        assert found["elasticrun_rank_failures_total",] == 1
        assert found["elasticrun_excluded_nodes",] == 1
        assert found["elasticrun_probes_total",] == 1
        assert found["elasticrun_phase", "running"] == 1
        assert found["elasticrun_slot_seconds_total", "step", ""] == 4.0
        assert found["elasticrun_round_age_seconds",] >= 0
        assert found["elasticrun_job", "job", "job", __version__] == 1
        assert found["elasticrun_quiet_seconds",] == 7.5
        assert found["elasticrun_goodput_ratio",] == 0.5
        assert found["elasticrun_incidents_total", "hang"] == 0
        assert found["elasticrun_hang_verdicts_total", "strong"] == 1


def test_counters_of_time_never_go_down_and_add_up() -> None:
    """Of 60 s of steps 20 are to be done again: nothing more is counted as steps until as many
    are new."""
    counters = SlotCounters()
    looks = [
        ({"step": 60.0}, {"step": 60.0}),
        ({"step": 40.0, "redone": 20.0, "down": 10.0}, {"step": 60.0, "redone": 6.7, "down": 3.3}),
        ({"step": 50.0, "redone": 20.0, "down": 10.0}, {"step": 60.0, "redone": 13.3, "down": 6.7}),
        (
            {"step": 70.0, "redone": 20.0, "down": 10.0},
            {"step": 70.0, "redone": 20.0, "down": 10.0},
        ),
    ]
    for ledger, expected in looks:
        rows = [LedgerRow(category, "", seconds) for category, seconds in ledger.items()]
        found = {category: seconds for (category, _), seconds in counters.take(rows).items()}
        assert found == pytest.approx(expected, abs=0.05)
        assert round(1e6 * sum(found.values())) == round(1e6 * sum(ledger.values()))


@pytest.mark.parametrize("name", ["alerts.yml", "grafana.json"])
async def test_what_is_watched_by_others_is_there(name: str) -> None:
    """Every metric that the rules and the dashboard name, with the labels that they use."""
    async with paged() as (_, port):
        _, _, body = await get(port, "/metrics")
    shown = {
        sample.name: set(sample.labels)
        for family in text_string_to_metric_families(body.decode())
        for sample in family.samples
    }
    path = Path(__file__).parents[2] / "docs/monitoring" / name
    text = path.read_text()
    used = set(re.findall(r"elasticrun_\w+", text))
    assert used
    assert used <= shown.keys()
    for metric, labels in re.findall(r"(elasticrun_\w+)\{([^}]*)\}", text):
        asked = set(re.findall(r"(\w+)=", labels)) - {"instance"}
        assert asked <= shown[metric]
    if path.suffix == ".json":
        assert [panel["id"] for panel in json.loads(text)["panels"]] == [*range(1, 9)]


@pytest.mark.parametrize(
    ("method", "path", "code"),
    [
        ("GET", "/healthz", 200),
        ("HEAD", "/status", 200),
        ("GET", "/", 200),
        ("HEAD", "/events", 200),
        ("POST", "/picture", 405),
        ("GET", "/status/", 404),
        ("POST", "/status", 405),
        ("DELETE", "/metrics", 405),
        ("POST", "/nowhere", 404),
    ],
)
async def test_other_paths_and_methods(method: str, path: str, code: int) -> None:
    async with paged() as (_, port):
        got, head, body = await get(port, path, method)
        assert got == code
        assert ("allow: get, head" in head) == (code == 405)
        if method == "HEAD":
            assert body == b""


async def test_a_request_without_end_is_refused() -> None:
    async with paged() as (_, port):
        answer = await say(port, b"GET /status HTTP/1.1\r\nX: " + b"y" * 200_000)
        assert not answer.startswith(b"HTTP/1.1 200")
        assert (await get(port, "/healthz"))[0] == 200


@pytest.mark.slow
@given(noise=st.binary(min_size=1, max_size=400))
@settings(max_examples=examples(15), deadline=None, suppress_health_check=list(HealthCheck))
def test_noise_is_answered_or_cut(noise: bytes) -> None:
    async def run() -> None:
        async with paged() as (_, port):
            assert not (await say(port, noise + b"\r\n\r\n\r\n")).startswith(b"HTTP/1.1 5")
            assert (await get(port, "/healthz"))[0] == 200

    aio.run(run())


async def test_a_dribbler_is_cut_in_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_module, "CONNECTION_LIFE", 0.3)
    async with paged() as (_, port):
        assert await say(port, b"GET /status HT") == b""


async def test_the_idlest_connection_makes_room_for_a_newcomer() -> None:
    """64 that anybody on the host holds open shut nobody out; the first of them goes."""
    async with paged() as (_, port):
        assert (await get(port, "/healthz"))[0] == 200
        held = [await asyncio.open_connection("127.0.0.1", port) for _ in range(MAX_CONNECTIONS)]
        try:
            held[0][1].write(b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n")
            async with asyncio.timeout(LIMIT):
                assert (await held[0][0].readuntil(b"ok\n")).startswith(b"HTTP/1.1 200")
            for _ in range(3):
                assert (await get(port, "/healthz"))[0] == 200
            async with asyncio.timeout(LIMIT):
                with contextlib.suppress(ConnectionResetError):
                    assert await held[1][0].read() == b""
            assert not held[0][0].at_eof()  # it has asked for something since
            assert not held[-1][0].at_eof()
        finally:
            for _, writer in held:
                writer.close()


@pytest.mark.parametrize(
    ("host", "code"),
    [
        ("127.0.0.1:80", 200),
        ("[::1]:80", 200),
        ("10.0.0.7", 200),
        ("localhost:9", 200),
        ("node1:29401", 200),
        ("tr-0.tr.default.svc.cluster.local:80", 200),
        (socket.gethostname(), 200),
        ("evil.example.com", 421),
        ("127.0.0.1.evil.example.com:80", 421),
        ("localhost.evil.example.com", 421),
    ],
)
async def test_a_name_that_somebody_made_lead_here_is_refused(host: str, code: int) -> None:
    """DNS rebinding: a web page could else read the job's status by its visitor's browser."""
    async with paged() as (_, port):
        for path in ("/status", "/metrics", "/healthz"):
            request = f"GET {path} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n"
            assert int((await say(port, request.encode())).split()[1]) == code


def test_nothing_is_imported_before_somebody_knocks() -> None:
    """In a process of its own: this one has imported everything already."""
    code = (
        "import sys, elasticrun.master.main;"
        "sys.exit([n for n in ('uvicorn', 'prometheus_client', 'rich', 'torch')"
        " if n in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stderr.strip() == "[]"


async def test_a_port_that_is_taken_is_an_oserror() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        page = StatusPage(Loop(Recorder()))
        with pytest.raises(OSError, match="in use"):
            page.listen("127.0.0.1", taken.getsockname()[1])
        await page.close()


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("0.0.0.0", "http://127.0.0.1:80/"),
        ("10.0.0.1", "http://10.0.0.1:80/"),
        ("::", "http://[::1]:80/"),
    ],
)
def test_the_address_for_people(host: str, url: str) -> None:
    assert page_url(host, 80) == url


async def test_the_page_is_one_file_that_fetches_nothing_from_outside() -> None:
    async with paged() as (_, port):
        code, head, body = await get(port, "/")
        assert code == 200
        assert len(body) < 60_000
        assert b"http" not in body
        assert b"innerHTML" not in body
        policy = next(line for line in head.splitlines() if line.startswith("content-security"))
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert "frame-ancestors 'none'" in policy
        assert "x-content-type-options: nosniff" in head
        assert "referrer-policy: no-referrer" in head


async def event(reader: asyncio.StreamReader) -> dict[str, Any]:
    """What the next event brings."""
    async with asyncio.timeout(LIMIT):
        while not (line := await reader.readline()).startswith(b"data: "):
            assert line
    found: dict[str, Any] = json.loads(line[len(b"data: ") :])
    return found


async def test_events_bring_the_picture_and_then_what_changes_and_the_end() -> None:
    brain = Recorder()
    brain.whole = hung()
    brain.page = brain.whole.status
    page = StatusPage(Loop(brain))
    port = page.listen("127.0.0.1", 0)
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(b"GET /events HTTP/1.1\r\nHost: x\r\n\r\n")
        first = await event(reader)
        assert first["verdict"]["ranks"] == "42"
        assert len(first["ranks"]) == 64
        assert first.keys() == json.loads((await get(port, "/picture"))[2]).keys()
        brain.page = structs.replace(brain.page, snapshot="step 4200 is whole", quiet=9.0)
        change = await event(reader)
        assert change.keys() == {"looked", "status"}
        assert "nodes" not in change["status"]  # they are the same
        brain.page = structs.replace(brain.page, nodes=brain.page.nodes[:3])
        assert len((await event(reader))["status"]["nodes"]) == 3
        brain.page = structs.replace(brain.page, phase="ended")
        closing = asyncio.ensure_future(page.close())
        assert (await event(reader))["status"]["phase"] == "ended"
        await closing
    finally:
        writer.close()


async def test_ranks_are_looked_at_while_somebody_watches(monkeypatch: pytest.MonkeyPatch) -> None:
    """One look after the other, however many watch; none for who asks once for the picture, or has
    the page in a tab that is hidden."""
    monkeypatch.setattr(stream, "SAMPLE_EVERY", 0.0)
    monkeypatch.setattr(stream, "PACE", 0.01)
    async with paged() as (loop, port):
        brain = loop._job
        done = m.Reply(True, "")
        brain.on = lambda asked: [Replied(asked.number, done)]
        turning = asyncio.ensure_future(loop.run())
        assert (await get(port, "/picture"))[0] == 200
        assert not brain.events
        watching = [await asyncio.open_connection("127.0.0.1", port) for _ in range(3)]
        watching[0][1].write(b"GET /events?hidden HTTP/1.1\r\nHost: x\r\n\r\n")
        await event(watching[0][0])
        assert not brain.events
        for _, writer in watching[1:]:
            writer.write(b"GET /events HTTP/1.1\r\nHost: x\r\n\r\n")
        for number in (1, 2):
            asked = await brain.until(lambda one, number=number: one.number == number)
            assert asked == Requested(number, m.Request("picture", live=True))
        for _, writer in watching:
            writer.close()
        turning.cancel()


def test_a_stranger_is_not_shown_paths_arguments_and_what_was_said() -> None:
    told = for_strangers(hung())
    assert (told.stacks, told.said, told.settings) == ((), (), ())
    assert not any(row.place for row in told.ranks)
    assert not any(row.last_lines or row.stacks for row in told.incidents)
    said = msgspec.json.encode(told).decode()
    assert not any(word in said for word in (".py", "ValueError", "/home", "logs/"))
    whole = hung()
    assert whole.verdict is not None
    assert whole.goodput is not None
    rows = (LedgerRow("wait", "judge", 2.0), LedgerRow("wait", "secret", 1.0), *whole.goodput.rows)
    whole = structs.replace(
        whole,
        verdict=structs.replace(whole.verdict, says="judge"),
        goodput=structs.replace(whole.goodput, rows=rows),
    )
    told = for_strangers(whole)
    assert told.goodput is not None
    assert told.goodput.rows[0] == LedgerRow("wait", "said", 3.0)
    assert "judge" not in msgspec.json.encode(told).decode()


def test_a_stranger_is_not_shown_the_message_of_an_exception() -> None:
    whole = hung()
    failure = RankFailed(1, "", "ValueError: cannot read /data/secret: it is gone")
    end = NoRestartsLeft(RankFailed(2, "", "exit code 1"), 0, 0.0, "")
    failed = structs.replace(
        whole.status,
        last_failure=text(failure),
        failed=code(failure),
        outcome=text(end),
        ended=code(end),
    )
    told = for_strangers(structs.replace(whole, status=failed)).status
    assert (told.last_failure, told.outcome) == ("rank 1", "rank 2")
    assert (told.failed, told.ended) == (None, None)


def test_a_stranger_is_shown_no_text_but_names_and_words_of_ours() -> None:
    """Whatever texts a record has, and later ones too."""

    def texts(kind: type) -> dict[str, Any]:
        every = {one.encode_name: one.type for one in structs.fields(kind)}
        return {name: f"~{name}~" if type_ is str else 1 for name, type_ in every.items()
                if type_ in (str, int, float)}  # fmt: skip

    told = for_strangers(
        structs.replace(
            hung(),
            verdict=VerdictRow(**texts(VerdictRow)),
            incidents=(IncidentRow(**texts(IncidentRow)),),
            ranks=(RankRow(**texts(RankRow)),),
        )
    )
    for row, shown in (
        (told.verdict, "klass kind ranks node then"),
        (told.incidents[0], "cause node kind"),
        (told.ranks[0], "node state waits_for call"),
    ):
        said = msgspec.json.encode(row).decode()
        assert set(re.findall(r"~(\w+)~", said)) == set(shown.split())


SECRET = operator_token("a token")


async def test_a_stranger_who_watches_has_no_rank_looked_at(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A look costs the ranks something; several pictures come, and the brain hears of nothing."""
    monkeypatch.setattr(stream, "SAMPLE_EVERY", 0.0)
    monkeypatch.setattr(stream, "PACE", 0.01)
    brain = Recorder()
    brain.page = status(verdict="rank 1 is idle at train.py:3")
    loop = Loop(brain)
    page = StatusPage(loop, Readers(SECRET, guarded=True))
    port = page.listen("127.0.0.1", 0)
    turning = asyncio.ensure_future(loop.run())
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(b"GET /events HTTP/1.1\r\nHost: x\r\n\r\n")
        assert (await event(reader))["status"]["verdict"] == "ranks are hanging"
        for reason in ("a", "b"):
            brain.page = status(reason=reason)
            await event(reader)
        assert not brain.events
    finally:
        turning.cancel()
        writer.close()
        await page.close()


@pytest.mark.parametrize(
    ("guarded", "peer", "key", "enters", "trusted"),
    [
        (False, "127.0.0.1", "", True, True),
        (False, "::ffff:127.0.0.1", "", True, True),
        (False, "10.0.0.7", "", False, False),
        (False, "10.0.0.7", "new", True, False),
        (True, "127.0.0.1", "", False, False),
        (True, "127.0.0.1", "new", True, False),
        (True, "127.0.0.1", "old", False, False),
        (True, "127.0.0.1", "of a master before", False, False),
        (True, "127.0.0.1", "another job's", False, False),
        (True, "127.0.0.1", "fffffffff.x.\ufffd", False, False),
    ],
)
def test_who_may_see_all(guarded: bool, peer: str, key: str, enters: bool, trusted: bool) -> None:
    """A key by itself shows nothing: it is given back as a cookie, and only once."""
    now = time.time()
    keys = {
        "new": page_key(SECRET, now),
        "old": page_key(SECRET, now - PAGE_KEY_LIFE - 1),
        "of a master before": page_key(SECRET, now - 1),
        "another job's": page_key(operator_token("another"), now),
    }
    key = keys.get(key, key)
    readers = Readers(SECRET, guarded=guarded)
    scope = {"client": (peer, 1), "query_string": urlencode({"key": key}).encode(), "headers": []}
    assert readers.trusts(scope) is trusted
    cookie = readers.enter(scope)
    assert bool(cookie) is enters
    if cookie and not trusted:
        assert not readers.enter(scope)
        known = cookie.partition(";")[0].encode()
        with_it = {**scope, "headers": [(b"cookie", b"other=1; " + known)]}
        assert readers.trusts(with_it)
        assert readers.enter(with_it) == cookie
        assert not readers.trusts({**scope, "headers": [(b"cookie", known[:-1])]})
        assert not Readers(SECRET, guarded=True).trusts(with_it)


def test_keys_that_are_remembered_are_bounded() -> None:
    readers = Readers(SECRET, guarded=True)
    spent = [page_key(SECRET, time.time()) for _ in range(MAX_SPENT + 1)]
    assert [readers._redeem(key) for key in spent] == [True] * MAX_SPENT + [False]
    readers._spent = dict.fromkeys(readers._spent, time.time())
    assert readers._redeem(spent[-1])
    assert len(readers._spent) == 1


async def test_a_link_of_a_job_with_a_token_opens_the_page_once() -> None:
    """On loopback too, where others of the host can come: to them the page is a stranger's."""
    brain = Recorder()
    brain.whole = hung()
    brain.page = brain.whole.status
    readers = Readers(SECRET, guarded=True)
    page = StatusPage(Loop(brain), readers)
    port = page.listen("127.0.0.1", 0)
    try:
        path = readers.link().partition(f":{port}")[2]
        assert (await get(port, path, "HEAD"))[0] == 200  # who only looks at it spends no key
        request = f"GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
        head = (await say(port, request.encode())).decode()
        assert head.startswith("HTTP/1.1 303")
        assert "location: ./\r\n" in head
        assert "; Path=/; HttpOnly; SameSite=Strict" in head
        cookie = re.search(r"set-cookie: ([^;]+)", head)
        assert cookie is not None
        code, _, body = await get(port, path)
        assert (code, body.decode()) == (403, NO_KEY)
        stranger = json.loads((await get(port, "/picture"))[2])
        assert not stranger["stacks"]
        assert "elasticrun status" in stranger["stacks_missing"]
        request = f"GET /picture HTTP/1.0\r\nHost: x\r\nCookie: {cookie[1]}\r\n\r\n"
        whole = json.loads((await say(port, request.encode())).partition(b"\r\n\r\n")[2])
        assert whole["stacks"]
        assert (await get(port, "/"))[0] == 200
    finally:
        await page.close()
