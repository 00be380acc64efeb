"""The page in a real browser: what it shows, what it lets in and out, and that anybody can read
it."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import pytest
from msgspec.structs import replace

from elasticrun.core.sight.picture import EventRow, PaceRow, Picture, SettingRow
from elasticrun.master.page import stream
from elasticrun.wire import messages as m
from tests import aio, needs
from tests.harness import free_port
from tests.master.people import LIMIT, Recorder
from tests.master.pictures import OPTIONS, healthy, hung, served

pytestmark = pytest.mark.slow

needs.packages("playwright", "axe_playwright_python")

EVIL = "<script>document.title='in'</script><img src=x onerror=\"document.title='in'\">"
TELLS = """
import os
import time
from elasticrun.training import progress

for step in range(100_000):
    progress(step, loss=2.0 + int(os.environ["RANK"]), total=100_000)
    print(f"step {step} loss {2.0 + int(os.environ['RANK']) / 8}", flush=True)
    time.sleep(0.2)
"""

STREAM_ENDED = ("ERR_CONNECTION_REFUSED", "ERR_INCOMPLETE_CHUNKED_ENCODING")
"""What the browser notes when the master is gone, or so busy that a stream ends by its limit."""

LOADED = "performance.getEntriesByType('navigation')[0].loadEventEnd > 0"

NARROW = {"width": 400, "height": 800}


class Seen(NamedTuple):
    """A page in the browser: `tab` is playwright's, `brain` makes what it shows."""

    tab: Any
    brain: Recorder
    url: str

    async def text(self, selector: str) -> str:
        found: str = await self.tab.locator(selector).inner_text()
        return found


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    from playwright.async_api import async_playwright

    path = needs.browser()
    driver = aio.run(async_playwright().start())
    yield aio.run(driver.chromium.launch(executable_path=path, args=OPTIONS))
    aio.run(driver.stop())


@asynccontextmanager
async def visited(browser: Any, url: str, **context: Any) -> AsyncIterator[Any]:
    """A tab at this address, whose load event has come, though the page listens on for events. In
    the end nothing was wrong, and nobody else was asked anything."""
    tab = await browser.new_page(**context)
    tab.set_default_timeout(1000 * LIMIT)
    wrong: list[str] = []
    asked: list[str] = []
    tab.on("console", lambda said: wrong.append(said.text))
    tab.on("pageerror", lambda error: wrong.append(str(error)))
    tab.on("request", lambda request: asked.append(request.url))
    await tab.goto(url, wait_until="commit")
    await tab.locator(".node").first.wait_for()
    await tab.wait_for_function(LOADED)
    yield tab
    await tab.close()
    assert not [one for one in wrong if not one.endswith(STREAM_ENDED)]
    assert {urlsplit(one).netloc for one in asked} - {""} == {urlsplit(url).netloc}


@asynccontextmanager
async def shown(browser: Any, picture: Picture, **context: Any) -> AsyncIterator[Seen]:
    async with (
        served(picture) as (brain, url),
        visited(browser, url, **context) as tab,
    ):
        yield Seen(tab, brain, url)


async def test_a_hang_is_read_from_top_to_bottom(browser: Any) -> None:
    made = hung()
    async with shown(browser, made) as seen:
        tab = seen.tab
        assert "63 ranks wait for it" in await seen.text("#sentence")
        assert await tab.title() == "held up: run17"
        aloud = await seen.text("#said")
        assert "63 ranks wait for it" in aloud
        groups = tab.locator("#verdict summary")
        assert await groups.all_inner_texts() == [
            "1 rank (42), main thread",
            "63 ranks (0-41, 43-63), main thread",
        ]
        assert "train.py:88 load_shard" in await tab.locator("#verdict pre").first.inner_text()
        assert await tab.locator(".node").count() == 8
        assert await tab.locator("#grid i.waiting").count() == 63
        assert await tab.locator("#grid i.odd").count() == 1
        assert "odd one" in await seen.text("#legend")
        assert "goodput 94 %" in await seen.text("#good")
        assert await tab.locator("#bar div").count() == 7
        assert await tab.locator("#curves svg").count() == 3
        curves = await seen.text("#curves")
        assert "41 % of 10,000 steps" in curves
        assert "ends in" not in curves
        assert await tab.locator("#line .bad").count() == 3  # the hang is one, though not over
        assert await tab.locator("#line .open").count() == 1
        await tab.get_by_text("#2,").click()
        assert "<b>out of memory</b> & more" in await seen.text("#incidents")
        assert "round 3 begins with 8 nodes" in await seen.text("#events")
        assert (await seen.text("#words")).endswith("[42] loading shard 17 of 4096")
        await tab.get_by_text("2 settings").click()
        said = re.sub(r"\s+", " ", await seen.text("#settings"))
        assert 'heartbeat_timeout 30.0 --rdzv-conf on_hang "tell" default' in said
        assert made.verdict is not None
        older = replace(made.verdict, sentence=made.verdict.sentence.replace("71 s", "74 s"))
        seen.brain.whole = replace(made, verdict=older)
        later = re.compile(r"for (7[2-9]|[89]\d|\d{3,}) s")
        await tab.locator("#sentence").get_by_text(later).wait_for()
        assert await seen.text("#said") == aloud
        seen.brain.whole = replace(made, verdict=replace(older, says="evaluation"))
        await tab.get_by_text("What the others wait for").wait_for()  # which its script has said
        assert await tab.title() == "waits: run17"
        assert await tab.locator("#line .open").count() == 0


async def test_a_training_has_axes_an_end_and_whole_times(browser: Any) -> None:
    """Who is excluded and until when; a job that has ended says how, and promises no end."""
    made = healthy()
    out = m.ExcludedNode("node003", "gpu-003", "failed", "its network check failed", 1.0, 3600.0)
    made = replace(made, status=replace(made.status, excluded=(out,)))
    zone = {"timezone_id": "Asia/Kathmandu"}
    async with shown(browser, made, **zone) as seen:
        assert re.search(
            r"of 10,000 steps; ends in about 10 h \d+ min, at ", await seen.text("#curves")
        )
        axes = await seen.tab.locator("#curves .plot div").all_inner_texts()
        assert axes[0].split() == ["6.4", "s", "0"]
        assert re.match(r"1[12]", axes[1])
        assert re.search(r"\d\d:\d\d:\d\d$", (await seen.text("#curves .times")).strip())
        assert await seen.text("#zone") in ("times in Asia/Kathmandu", "times in Asia/Katmandu")
        assert await seen.tab.locator(".node", has_text="node003 excluded").count() == 1
        assert re.search(r"node003 is excluded until .*: its network", await seen.text("#slow"))
        started = tuple(replace(node, activity="starting") for node in made.status.nodes)
        seen.brain.page = replace(made.status, nodes=started)
        sentence = seen.tab.locator("#sentence")
        await sentence.get_by_text("Ranks are starting: 64 ranks on 8 nodes.").wait_for()
        seen.brain.page = replace(
            made.status, phase="ended", outcome="rank 1 failed", ended=m.ReasonCode("unfit", "{}")
        )
        await sentence.get_by_text("Failed: rank 1 failed").wait_for()
        assert await seen.tab.title() == "failed: run17"
        assert "ends in" not in await seen.text("#curves")


async def test_what_scripts_and_hosts_say_stays_text(browser: Any) -> None:
    made = hung()
    assert made.verdict is not None
    evil = replace(
        made,
        status=replace(made.status, job_id=EVIL, reason=EVIL, last_failure=EVIL),
        verdict=replace(made.verdict, sentence=EVIL, said=(EVIL,), then=EVIL, folder=EVIL),
        ranks=tuple(replace(row, state=EVIL, place=EVIL, call=EVIL) for row in made.ranks),
        stacks=tuple(replace(row, thread=EVIL, text=EVIL) for row in made.stacks),
        incidents=tuple(replace(one, sentence=EVIL, last_lines=EVIL) for one in made.incidents),
        events=(EventRow(1, 1.0, EVIL, EVIL, EVIL),),
        said=tuple(replace(row, text=EVIL) for row in made.said),
        slow=(EVIL,),
        settings=(SettingRow(EVIL, EVIL, EVIL),),
    )
    async with shown(browser, evil) as seen:
        assert await seen.text("#sentence") == EVIL
        assert await seen.tab.locator("script").count() == 1
        assert await seen.tab.locator("img").count() == 0
        assert await seen.tab.title() == f"held up: {EVIL}"


async def test_nothing_else_may_run_or_be_asked(browser: Any) -> None:
    """What the policy in the head forbids, tried from within."""
    async with served(healthy()) as (_, url), served(healthy()) as (_, other):
        tab = await browser.new_page()
        await tab.goto(url)
        tried = await tab.evaluate(
            """async other => {
                const script = document.createElement("script");
                script.textContent = "window.ran = true";
                document.body.append(script);
                const fetched = await fetch(other + "healthz", {mode: "no-cors"}).catch(() => "no");
                return [window.ran, fetched];
            }""",
            other,
        )
        assert tried == [None, "no"]
        await tab.close()


async def test_the_stream_comes_back(browser: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "STREAM_LIFE", 0.2)
    monkeypatch.setattr(stream, "RETRY", 100)
    monkeypatch.setattr(stream, "PACE", 0.1)
    async with shown(browser, healthy()) as seen:
        async with seen.tab.expect_request("**/events**"):
            pass
        whole = seen.brain.whole
        paces = (PaceRow("node003", 0.6, 0.6, slow=True), PaceRow("node001", 0.6, 0.4, slow=False))
        seen.brain.whole = replace(whole, slow=("node003 is slow",), paces=paces)
        await seen.tab.get_by_text("node003 is slow", exact=True).wait_for()
        await seen.tab.locator("#sentence").get_by_text("; node node003 is slow.").wait_for()
        assert "own part of a step: node003 600 ms, node001 400 ms" in await seen.text("#steps")
        assert await seen.tab.locator(".node.slow").count() == 1
        assert await seen.text("#contact") == "live"
        seen.brain.page = replace(seen.brain.page, phase="ended", outcome="It is over.")
        await seen.tab.get_by_text("the job has ended").wait_for()
        assert await seen.text("#sentence") == "It is over."


async def test_another_master_on_the_same_port_is_found(browser: Any) -> None:
    async with AsyncExitStack() as first:
        _, url = await first.enter_async_context(served(healthy(), free_port()))
        async with visited(browser, url) as tab:
            await first.aclose()
            await tab.get_by_text("no contact with the master for").wait_for()
            assert await tab.locator("#said").inner_text() == "No contact with the master."
            async with served(hung(), urlsplit(url).port or 0):
                await tab.locator("#verdict").wait_for()
                assert await tab.locator("#contact").inner_text() == "live"


async def test_a_tab_that_nobody_sees_has_no_ranks_looked_at(browser: Any) -> None:
    async with shown(browser, healthy()) as seen:
        for hidden, query in (("true", "hidden"), ("false", "")):
            async with seen.tab.expect_request("**/events**") as asked:
                await seen.tab.evaluate(
                    "hidden => Object.defineProperty(document, 'hidden', "
                    "{value: hidden, configurable: true}) && "
                    "document.dispatchEvent(new Event('visibilitychange'))",
                    hidden == "true",
                )
            assert urlsplit((await asked.value).url).query == query
        seen.brain.whole = replace(seen.brain.whole, slow=("node003 is slow",))
        await seen.tab.get_by_text("node003 is slow").wait_for()


async def test_the_ranks_of_a_node_are_found_by_keys(browser: Any) -> None:
    async with shown(browser, hung()) as seen:
        tab = seen.tab
        await tab.locator(".node").first.focus()
        for key in ("End", "ArrowLeft", "ArrowLeft", "Enter"):
            await tab.keyboard.press(key)
        assert "Node node005" in await seen.text("#detail")
        assert await tab.locator("#detail tbody tr").count() == 8
        assert await tab.locator('.node[aria-pressed="true"]').count() == 1
        await tab.keyboard.press("Escape")
        assert "Ranks that do not step" in await seen.text("#detail")


@pytest.mark.parametrize("mode", ["light", "dark"])
async def test_anybody_can_read_it(browser: Any, mode: str) -> None:
    """By the rules of axe: names, roles, contrast of 4.5 and more. Narrow: nothing is cut off."""
    from axe_playwright_python.async_playwright import Axe

    async with shown(browser, hung(), color_scheme=mode, viewport=NARROW) as seen:
        await seen.tab.evaluate("document.querySelectorAll('details').forEach(d => d.open = true)")
        found = await Axe().run(seen.tab)
        assert not found.response["violations"], found.generate_report()
        assert await seen.tab.evaluate("document.documentElement.scrollWidth") == NARROW["width"]


async def test_of_a_thousand_ranks_only_what_has_changed_is_drawn(browser: Any) -> None:
    async with shown(browser, healthy(128, 8)) as seen:
        tab, whole = seen.tab, seen.brain.whole
        await tab.evaluate(
            """() => {
                window.touched = [];
                const note = list => list.forEach(one => window.touched.push(one.target.className));
                const of = {subtree: true, childList: true, attributes: true};
                new MutationObserver(note).observe(document.getElementById("grid"), of);
            }"""
        )
        rows = [replace(row, step=5000, rss=1) for row in whole.ranks]
        rows[100] = replace(rows[100], state="busy")
        seen.brain.whole = replace(whole, ranks=tuple(rows))
        await tab.locator("#detail").get_by_text("busy").wait_for()
        assert await tab.locator("#grid i.busy").count() == 1
        assert set(await tab.evaluate("window.touched")) == {"busy", "node"}
        assert await tab.evaluate("window.touched.length") <= 4


async def test_a_real_job_is_watched(browser: Any, elastic_job: Any, tmp_path: Path) -> None:
    """Its ranks of two nodes are looked at because somebody watches: nobody else has asked."""
    (tmp_path / "tells.py").write_text(TELLS)
    told = re.compile(r"the job's page: (\S+)")
    how = {"nnodes": 2, "nproc_per_node": 2, "options": ("--redirects=1",)}
    job = elastic_job(tmp_path / "tells.py", **how)
    url = told.search(job.wait_for_output(0, told))
    assert url is not None
    async with visited(browser, url[1]) as tab:
        await tab.locator("#grid i.stepping").nth(3).wait_for()
        training = re.compile(r"^Training at step [\d,]+: 4 ranks on 2 nodes\.")
        await tab.locator("#sentence").get_by_text(training).wait_for()
        await tab.get_by_text("a step takes").wait_for()
        await (
            tab.locator("#words").get_by_text(re.compile(r"\[0-3\] step \d+ loss ~2.0")).wait_for()
        )
        await tab.locator(".node").first.click()
        assert await tab.locator("#detail tbody tr").count() == 2
        await tab.get_by_text("round 1", exact=True).wait_for()
        await tab.locator("#curves").get_by_text("loss 2", exact=True).wait_for()
        assert await tab.locator("#curves svg[role=img] polyline").count() >= 2
        ahead = re.compile(r"^[\d.]+ % of 100,000 steps; ends in about \d+ (h|d)\b.*, at ")
        await tab.locator("#curves").get_by_text(ahead).wait_for()
        curves = await tab.locator("#curves").inner_text()
        number, unit = re.findall(r"time of a step ([\d.]+) (ms|s)\b", curves)[0]
        assert float(number) * (1 if unit == "s" else 0.001) > 0.1, "its sleep"
