"""Attaches thousands of idle sessions to one master: their cost, and whether any counts as dead.

    python benchmarks/idle_sessions.py [--sessions N] [--seconds S] [--json FILE]

A real master process serves N real sessions of agents' links from a few load processes. They attach
at a steady rate, join, and train (that is, only send heartbeats) for S seconds. Then a rank fails,
the round is reopened and all join again. Measured: the idle master's CPU use, how long the
broadcast of Start takes (from the last Join sent to the last Start received), broken sessions, and
nodes that the master considers suspect or dead.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import report
from crowd import Crowd, Master, serving, wire
from load import HEARTBEAT

PER_SECOND = 250.0
"""Sessions that attach per second. Each connection costs both ends some milliseconds of CPU."""

SETTLE = 15.0
"""Seconds after the last Start within which every session has sent a heartbeat and received its
interval."""

MAX_CPU = 40.0
"""Target: percent of one core that an idle master may use with 5,000 sessions."""

BROADCAST = 1.0
"""Target: seconds within which the Start of a round must reach all of 5,000 nodes."""


def measure(sessions: int, seconds: float, processes: int, heartbeat: float) -> dict[str, float]:
    """One complete run; see the module docstring."""
    with serving(sessions, processes, heartbeat=heartbeat) as (master, crowd):
        busy = master.cpu()
        crowd.send(do="attach", every=processes / PER_SECOND)
        attach = master.cpu() - busy
        crowd.send(do="join")
        crowd.send(do="started")
        time.sleep(SETTLE)
        found = idle(master, crowd, seconds)
        found["attach"] = 1000 * attach / sessions
        busy = master.cpu()
        crowd.send(do="anew")
        crowd.send_to_first(do="fail")
        again = crowd.send(do="started")
        found["broadcast"] = again["last_start"] - again["last_join"]
        found["all back"] = again["last_start"] - again["first_join"]
        found["round cpu"] = 1000 * (master.cpu() - busy) / sessions
        found["rss"] = master.rss()
        found["sessions"] = float(sessions)
        return found


def idle(master: Master, crowd: Crowd, seconds: float) -> dict[str, float]:
    """Let the sessions idle for some seconds. Returns the cost of that time, and what went
    wrong."""
    before, carried = crowd.send(do="tally"), wire(master.port)
    suspects, deaths = (master.count(word) for word in ("is suspect", "is dead"))
    busy, load, began = master.cpu(), crowd.cpu(), time.monotonic()
    time.sleep(seconds)
    passed = time.monotonic() - began
    after, now = crowd.send(do="tally"), wire(master.port)
    found = {
        "cpu": 100 * (master.cpu() - busy) / passed,
        "load cpu": 100 * (crowd.cpu() - load) / passed,
        "seconds": passed,
        "broken": float(after["lost"] - before["lost"]),
        "dialled again": float(after["orders"]["Welcome"] - before["orders"]["Welcome"]),
        "stopped": float(after["stops"] - before["stops"]),
        "suspect": float(master.count("is suspect") - suspects),
        "dead": float(master.count("is dead") - deaths),
    }
    if carried is not None and now is not None:
        found["bytes"] = (now.total - carried.total) / crowd.nodes / passed
    return found


ROWS = (
    ("cpu", "CPU of the master at rest", "{:.1f} % of a core", MAX_CPU),
    ("broadcast", "last Join said → last Start received", "{:.2f} s", BROADCAST),
    ("all back", "first Join said → last Start received", "{:.2f} s", None),
    ("dead", "nodes taken for dead", "{:.0f}", 0.0),
    ("suspect", "nodes suspected", "{:.0f}", 0.0),
    ("broken", "sessions that broke", "{:.0f}", 0.0),
    ("dialled again", "second connections dialled", "{:.0f}", None),
    ("stopped", "ranks stopped", "{:.0f}", 0.0),
    ("attach", "CPU of the master for one session that attaches", "{:.2f} ms", None),
    ("round cpu", "CPU of the master for one node of a new round", "{:.2f} ms", None),
    ("bytes", "bytes per node and second at rest", "{:.0f}", None),
    ("rss", "RSS of the master", "{:.0f} MB", None),
    ("load cpu", "CPU of the load processes at rest", "{:.1f} %", None),
)


def main() -> int:
    """Measure, print, write. Returns 1 if a target is missed."""
    parser = argparse.ArgumentParser(description="What idle sessions cost their master.")
    parser.add_argument("--sessions", type=int, default=5000)
    parser.add_argument("--seconds", type=float, default=120.0, help="how long they are idle")
    parser.add_argument("--processes", type=int, default=3, help="load processes")
    parser.add_argument("--heartbeat", type=float, default=HEARTBEAT, help="heartbeat_timeout, s")
    parser.add_argument("--json", type=Path, help="write the results to this file")
    options = parser.parse_args()
    about = report.begin()
    found = measure(options.sessions, options.seconds, options.processes, options.heartbeat)
    print(f"{options.sessions} sessions, idle for {found['seconds']:.0f} s\n")
    print("| | measured | wanted | |\n|---|---|---|---|")
    missed = []
    for key, title, form, most in ROWS:
        if key not in found:
            continue
        bar, verdict = "", ""
        if most is not None:
            bar = "≤ " + form.format(most) if most else "0"
            verdict = "met" if found[key] <= most else "**missed**"
        if "missed" in verdict:
            missed.append(title)
        print(f"| {title} | {form.format(found[key])} | {bar} | {verdict} |")
    report.write("idle", about, found, options.json)
    return report.verdict(missed)


if __name__ == "__main__":
    sys.exit(main())
