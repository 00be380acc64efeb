"""Measures how long the page blocks a browser's frames, how soon it is drawn, and how much it is
sent, with 1,024 ranks on 128 nodes that all change every second; half of the time the job hangs.

    python benchmarks/page.py [--seconds S] [--slower N]

Target: no task of the page's main thread uses 50 ms of CPU time, which browsers call a long task;
by the clock it takes longer if other programs use the CPU. `--slower`: simulates a CPU that is N
times slower.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import sys
import time
from pathlib import Path
from typing import NamedTuple

from msgspec.structs import replace

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import report

from elasticrun.core.sight.picture import Picture
from tests import needs
from tests.master.pictures import OPTIONS, healthy, hung, served

BAR = 50.0


def one_second_later(picture: Picture, number: int) -> Picture:
    """The picture one second later: every rank has another step, CPU and memory."""
    ranks = tuple(
        replace(row, step=row.step + number, cpu=random.random(), rss=row.rss + number)
        for row in picture.ranks
    )
    return replace(picture, ranks=ranks, slow=(f"node005 is {number} % slower than the others",))


class Found(NamedTuple):
    """What was measured. Times are in milliseconds; updates in bytes, the first one is whole."""

    own: float  # of the longest task of the main thread, by CPU time
    clock: float  # the same by the clock
    long: int  # tasks that exceed the target by the clock
    drawn: float  # from the request until curves and ranks are there
    updates: list[int]


async def measure(seconds: int, slower: float, *, sampled: bool) -> Found:
    """`sampled`: all ranks are sampled every second; else only the status changes."""
    from playwright.async_api import async_playwright

    well, held = healthy(128, 8), hung(128, 8)
    async with async_playwright() as driver, served(well) as (brain, url):
        browser = await driver.chromium.launch(executable_path=needs.browser(), args=OPTIONS)
        page = await browser.new_page(viewport={"width": 1280, "height": 900})
        line = await page.context.new_cdp_session(page)
        await line.send("Emulation.setCPUThrottlingRate", {"rate": slower})
        updates: list[int] = []
        line.on(
            "Network.eventSourceMessageReceived",
            lambda event: updates.append(len(event["data"].encode())),
        )
        await line.send("Network.enable")
        await browser.start_tracing(page=page, categories=["toplevel", "__metadata"])
        began = time.monotonic()
        await page.goto(url)
        await page.locator(".curve").first.wait_for()
        await page.locator(".node i.stepping").nth(1023).wait_for()
        drawn = 1000 * (time.monotonic() - began)
        for number in range(seconds):
            await asyncio.sleep(1.0)
            if sampled:
                brain.whole = one_second_later(held if number // 3 % 2 else well, number)
            else:
                brain.page = replace(well.status, snapshot=f"step {4111 + number} is whole")
        trace = json.loads(await browser.stop_tracing())["traceEvents"]
        await browser.close()
    mains = {
        (one["pid"], one["tid"])
        for one in trace
        if one["name"] == "thread_name" and one["args"]["name"] == "CrRendererMain"
    }
    tasks = [
        one
        for one in trace
        if (one["pid"], one["tid"]) in mains and one["name"].endswith("RunTask") and "dur" in one
    ]
    clock = [one["dur"] / 1000 for one in tasks]
    own = max(one.get("tdur", one["dur"]) / 1000 for one in tasks)
    return Found(own, max(clock), sum(one > BAR for one in clock), drawn, updates)


def main() -> int:
    """Measure and print. Returns 1 if the target is missed."""
    parser = argparse.ArgumentParser(description="How long the page holds up a browser's frames.")
    parser.add_argument("--seconds", type=int, default=30)
    parser.add_argument("--slower", type=float, default=1.0)
    options = parser.parse_args()
    report.begin()
    worst = 0.0
    for sampled in (True, False):
        found = asyncio.run(measure(options.seconds, options.slower, sampled=sampled))
        print("all ranks change every second" if sampled else "only the status changes")
        print(
            f"  drawn after {found.drawn:.0f} ms; the longest task: {found.own:.0f} ms of the "
            f"processor, {found.clock:.0f} ms by the clock; {found.long} above {BAR:g} ms"
        )
        whole, *changes = found.updates
        print(
            f"  {whole} bytes at first, then {statistics.median(changes):.0f} per update "
            f"(median of {len(changes)})"
        )
        worst = max(worst, found.own)
    return report.verdict([f"no task above {BAR:g} ms of the processor"] if worst > BAR else [])


if __name__ == "__main__":
    sys.exit(main())
