"""How long the page holds up a browser's frames: 1,024 ranks on 128 nodes, all of them changed
every second, half of the time a hang of them all.

    python benchmarks/page.py [--seconds S] [--slower N]

The bar: no task above 50 ms, which is what browsers call long. `--slower`: as if the processor were
so many times slower.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
from pathlib import Path
from typing import Any

from msgspec.structs import replace

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import report

from elasticrun.core.sight.picture import Picture
from tests import needs
from tests.master.pictures import OPTIONS, healthy, hung, served

BAR = 50.0

WATCH = """
window.tasks = [];
window.frames = [];
const seen = list => list.getEntries().forEach(one => window.tasks.push(one.duration));
new PerformanceObserver(seen).observe({type: "longtask", buffered: true});
let was = performance.now();
function frame() {
    const now = performance.now();
    window.frames.push(now - was);
    was = now;
    requestAnimationFrame(frame);
}
requestAnimationFrame(frame);
"""


def changed(picture: Picture, number: int) -> Picture:
    """The same a second later: every rank has another step, CPU and memory."""
    ranks = tuple(
        replace(row, step=row.step + number, cpu=random.random(), rss=row.rss + number)
        for row in picture.ranks
    )
    return replace(picture, ranks=ranks, slow=(f"node005 is {number} % slower than the others",))


async def measure(seconds: int, slower: float) -> dict[str, Any]:
    """Milliseconds."""
    from playwright.async_api import async_playwright

    well, held = healthy(128, 8), hung(128, 8)
    async with async_playwright() as driver, served(well) as (brain, url):
        browser = await driver.chromium.launch(executable_path=needs.browser(), args=OPTIONS)
        page = await browser.new_page(viewport={"width": 1280, "height": 900})
        line = await page.context.new_cdp_session(page)
        await line.send("Emulation.setCPUThrottlingRate", {"rate": slower})
        await page.add_init_script(WATCH)
        await page.goto(url)
        for number in range(seconds):
            await asyncio.sleep(1.0)
            brain.whole = changed(held if number // 3 % 2 else well, number)
        tasks, frames = await page.evaluate("[window.tasks, window.frames]")
        await browser.close()
    return {"long_tasks": tasks, "frames": len(frames), "longest_frame": max(frames)}


def main() -> int:
    """Measure, print; 1 if the bar is missed."""
    parser = argparse.ArgumentParser(description="How long the page holds up a browser's frames.")
    parser.add_argument("--seconds", type=int, default=30)
    parser.add_argument("--slower", type=float, default=1.0)
    options = parser.parse_args()
    report.begin()
    found = asyncio.run(measure(options.seconds, options.slower))
    print(f"{found['frames']} frames, the longest {found['longest_frame']:.0f} ms")
    print(f"tasks above {BAR:g} ms: {', '.join(f'{one:.0f}' for one in found['long_tasks']) or 0}")
    return report.verdict(["no task above 50 ms"] if found["long_tasks"] else [])


if __name__ == "__main__":
    sys.exit(main())
