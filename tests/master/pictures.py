"""Made pictures of jobs, for the page's tests and its pictures in the docs.

`python -m tests.master.pictures FOLDER URL` writes the docs' pictures of the page: of the job that
has its page at URL, and of a made one with 1,024 ranks."""

from __future__ import annotations

import asyncio
import math
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from msgspec.structs import replace

from elasticrun.core.sight.curves import Curves
from elasticrun.core.sight.picture import (
    EventRow,
    Goodput,
    IncidentRow,
    LedgerRow,
    PaceRow,
    PhaseRow,
    Picture,
    RankRow,
    SettingRow,
    StackRow,
    VerdictRow,
)
from elasticrun.core.words import render_lasting
from elasticrun.master.loop import Loop
from elasticrun.master.page.http import StatusPage
from elasticrun.master.page.readers import Readers
from elasticrun.wire import messages as m
from elasticrun.wire.types import RoundName
from tests import needs
from tests.master.people import ROUND, Recorder, status

OPTIONS = ["--no-sandbox"]
"""Of the browser: in a container, and as root, it has no sandbox."""

SIZE = {"width": 1180, "height": 1000}

STUCK = """data.py:40 __next__
data.py:71 read_shard
train.py:88 load_shard
train.py:131 main"""
WAITS = """distributed_c10d.py all_reduce
train.py:131 step
train.py:160 main"""


def nodes(number: int, ranks: int) -> tuple[m.NodeStatus, ...]:
    return tuple(
        m.NodeStatus(
            f"node{k:03}", f"gpu-{k:03}", f"10.0.{k // 250}.{k % 250 + 1}", "alive", "running", "",
            k, k * ranks, ranks, tuple(range(4000, 4000 + ranks)),
        )
        for k in range(number)
    )  # fmt: skip


def stepping(number: int, ranks: int) -> tuple[RankRow, ...]:
    return tuple(
        RankRow(
            k, f"node{k // ranks:03}", "stepping", step=4110,
            step_seconds=6.1 + 0.01 * (k % 9),
            quiet=0.3, cpu=0.97, io=2e6, rss=18_432, gpu=96, gpu_mib=71_000,
        )
        for k in range(number * ranks)
    )  # fmt: skip


GOODPUT = Goodput(
    "goodput", 0.938, 0.946, 14_101_200.0,
    (
        LedgerRow("step", "", 13_226_900.0), LedgerRow("redone", "node_lost", 267_900.0),
        LedgerRow("hang", "strong", 197_400.0), LedgerRow("slow", "node005", 155_100.0),
        LedgerRow("save", "", 98_700.0), LedgerRow("start", "init", 84_600.0),
        LedgerRow("unknown", "", 70_600.0),
    ),
    "goodput 93.8 %",
    advice="persist_every=400 (now 1000) would have saved about 1.2 %",
)  # fmt: skip

INCIDENTS = (
    IncidentRow(
        1, "node_lost", "node041 was not heard for 30 s", "7 nodes' collectives failed",
        "restarted on 127 nodes, then on 128", 21_000.0, 1, "node041", over=True,
        phases=(PhaseRow("detect", 30.0), PhaseRow("stop", 2.1), PhaseRow("gather", 61.0),
                PhaseRow("restore", 12.4)),
        steps_lost=51, slot_seconds=108_032.0,
    ),
    IncidentRow(
        2, "rank_failed", "rank 17 on node002 ended with SIGKILL", "", "restarted all",
        9_000.0,
        2, "node002", 17, over=True, phases=(PhaseRow("detect", 0.2), PhaseRow("stop", 1.0),
        PhaseRow("spawn", 0.4), PhaseRow("warm", 310.0)), steps_lost=3, slot_seconds=20_480.0,
        last_lines="loading shard 17\n<b>out of memory</b> & more",
    ),
)  # fmt: skip


def healthy(number: int = 8, ranks: int = 8) -> Picture:
    """A job of so many nodes that trains."""
    page = status(
        job_id="run17", reason="", world_size=number * ranks, nodes=nodes(number, ranks),
        min_nodes=number, max_nodes=number, last_failure="", step=4110, step_age=0.4, age=26_000.0,
        snapshot="step 4100 is whole, step 4000 is written",
        round=RoundName(1, 3, "0badcafe"), goodput="goodput 93.8 %",
    )  # fmt: skip
    events = (
        EventRow(1, 26_000.0, "", f"round 1 begins with {number} nodes", "info"),
        EventRow(2, 21_000.0, "node041", "was not heard for 30 s", "warning"),
        EventRow(3, 9_000.0, "node002", "rank 17 ended with SIGKILL", "error"),
        EventRow(4, 8_690.0, "", f"round 3 begins with {number} nodes", "info"),
    )
    return Picture(
        page, looked=2.0, ranks=stepping(number, ranks), goodput=GOODPUT, incidents=INCIDENTS,
        events=events,
        paces=tuple(
            PaceRow(node.node, 6.1, 5.9 if k == 5 else 4.2 + 0.01 * (k % 9), slow=k == 5)
            for k, node in enumerate(page.nodes)
        ),
        slow=("node005 takes 6.1 s a step where the others take 4.2 s",),
        settings=(SettingRow("heartbeat_timeout", "30.0", "--rdzv-conf"),
                  SettingRow("on_hang", '"tell"')),
    )  # fmt: skip


def hung(number: int = 8, ranks: int = 8) -> Picture:
    """The same, but that all wait for rank 42."""
    well, every = healthy(number, ranks), number * ranks
    call = "all_reduce #8231 [16777216] float32 of group dp"
    pieces = (
        *("rank 42 (node005) is idle at train.py:88 load_shard", 71),
        f"; {every - 1} ranks wait for it in {call}",
    )
    sentence = render_lasting(pieces)
    rows = [
        replace(row, state="waiting", waits_for="42", call=call,
                place="train.py:131 step", quiet=71.0, cpu=0.0, gpu=100)
        for row in well.ranks
    ]  # fmt: skip
    rows[42] = replace(rows[42], state="odd", waits_for="", call="", gpu=0,
                       place="train.py:88 load_shard")  # fmt: skip
    verdict = VerdictRow(
        "strong", "idle", sentence, 71.0, "42", rows[42].node,
        "it is not restarted automatically (--on-hang=tell); torch would end this in 529 s",
        "logs/run17/round3/hang-1", said=pieces,
    )  # fmt: skip
    groups = (
        StackRow("42", 1, "main thread", STUCK),
        StackRow(f"0-41,43-{every - 1}", every - 1, "main thread", WAITS),
    )
    said = (
        StackRow(f"0-{every - 1}", every, "", "step 4110 loss ~2.31"),
        StackRow("42", 1, "", "loading shard 17 of 4096"),
    )
    return replace(well, verdict=verdict, ranks=tuple(rows), stacks=groups, said=said)


def _train(curves: Curves, now: float, newest: int) -> None:
    """Seven hours of a training: 10 steps in 64 s, and a pause of five minutes."""
    for k in range(400):
        step, at = newest - 10 * (399 - k), now - 64 * (400 - k) - 300 * (k < 260)
        loss = 2 + 40 / (k / 10 + 4) + 0.05 * math.sin(k * k)
        values = {"loss": f"{loss:.4f}", "lr": f"{3e-4 * min(1, k / 40):.3e}", "total": "10000"}
        curves.add(at, ROUND.number + (k >= 260), step, values)


@asynccontextmanager
async def served(picture: Picture, port: int = 0) -> AsyncIterator[tuple[Recorder, str]]:
    """The page that shows this picture: who makes it, and the page's address."""
    brain = Recorder()
    brain.page, brain.whole = picture.status, picture
    readers = Readers()
    loop = Loop(brain)
    loop.figures.began -= picture.status.age
    if picture.status.step >= 0:
        loop.figures._on_step(ROUND, picture.status.step)
        _train(loop.figures.curves, loop._clock(), picture.status.step)
    page = StatusPage(loop, readers)
    page.listen("127.0.0.1", port)
    try:
        yield brain, readers.link()
    finally:
        await page.close()


async def main(folder: Path, url: str) -> None:
    from PIL import Image
    from playwright.async_api import async_playwright

    async with async_playwright() as driver, served(hung(128, 8)) as (_, large):
        browser = await driver.chromium.launch(executable_path=needs.browser(), args=OPTIONS)
        for name, mode, shown in (("page-hang", "light", url), ("page-large", "dark", large)):
            page = await browser.new_page(viewport=SIZE, color_scheme=mode)
            await page.goto(shown or large)
            await page.locator(".node").first.wait_for()
            await page.wait_for_timeout(5000)  # until ranks have been looked at
            file = folder / f"{name}.png"
            await page.screenshot(path=file)
            Image.open(file).quantize(128).save(file, optimize=True)
            await page.close()
        await browser.close()


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else ""))
