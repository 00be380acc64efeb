"""Checks elasticrun on one GPU: `make gpu`, or

    python -m benchmarks.gpu.check [--parts overlap,start] [--budget 450] [--out DIR]
                                   [--wheels DIR] [--device cuda|cpu] [--list]

Each part runs in a process of its own, is killed with all its processes at its limit, and writes
its results at once: DIR has results.jsonl, report.md (the table of docs/gpu.md), texts.md (longer
answers) and logs.txt (what failing parts have printed). `--wheels`: a folder with wheels of
packages that this Python lacks; they are unpacked into a temporary folder. `--device cpu` rehearses
with a CPU in the place of the GPU. This module imports the standard library only, because it runs
before the wheels are there.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[2]
MARK: Final = "GPU_CHECK_MARK"
NEEDED: Final = (
    "import torch, grpc, msgspec, google.protobuf, pynvml, rich, prometheus_client, uvicorn, "
    "xxhash, fsspec, psutil, elasticrun.wire.rpc.channel"
)
"""What elasticrun imports (`dependencies` in pyproject.toml), and the generated code."""

HAS_CUDA: Final = (
    "import sys; torch.cuda.is_available() or sys.exit('torch finds no CUDA device here; "
    "`make gpu DEVICE=cpu` rehearses without one')"
)

IMPORT_LIMIT: Final = 120.0
LEFT_LIMIT: Final = 3.0
"""Seconds after a part in which its processes may still end by themselves."""

KILL_LIMIT: Final = 5.0
REHEARSED: Final = 2.0
"""Factor of all limits in a rehearsal, whose machine may have few cores."""

CANNOT_RUN: Final = 3
"""Exit code if elasticrun cannot be imported."""


@dataclass(frozen=True)
class Part:
    """A part of parts.py. `most`: seconds after which it is killed; `usual`: seconds that it is
    expected to take on a GPU; with less than half of them left it is not run. `beside`: it measures
    no time that a busy device would falsify, so it runs while `hang` waits."""

    name: str
    most: float
    usual: float
    what: str
    beside: bool = False


HANG: Final = "hang"
PLAN: Final = (
    Part("device", 90, 20, "versions, the device, CUDA_VISIBLE_DEVICES, doctor"),
    Part("overlap", 160, 50, "training with snapshots, waited for and overlapped"),
    Part("copies", 100, 20, "rates from the device to host memory"),
    Part("snapshots", 200, 75, "1 and 10 GiB: stalls, dcp.async_save, bits after a kill"),
    Part("start", 150, 60, "command to the first all_reduce, beside torchrun"),
    Part("restart", 150, 45, "kill -9 to the next all_reduce, and the memory of the dead"),
    Part("soak", 150, 65, "50 crashes in a row"),
    Part("corruption", 150, 40, "a flipped bit in one replica is found"),
    Part(HANG, 180, 145, "a rank that sleeps and a kernel that never ends are named"),
    Part("untouched", 60, 10, "only the rank has the device open", beside=True),
    Part("recorder", 60, 10, "torch's flight recorders, and what is read of them", beside=True),
    Part("recovery", 150, 40, "a function called again keeps its context", beside=True),
    Part("sight", 90, 15, "`top` and the page show the device's load", beside=True),
    Part("health", 100, 20, "NVML: events, processes, freed memory"),
    Part("snapshots30", 200, 100, "30 GiB of state"),
)
"""In the order in which they run: the most valuable first, but those that a busy device would
falsify before `hang`, whose kernel never ends."""


@dataclass
class Running:
    """A part that runs."""

    part: Part
    child: subprocess.Popen[bytes]
    mark: str
    scratch: Path
    shm: Path
    began: float
    limit: float


class Check:
    """One run of the check."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.out = Path(options.out).resolve()
        self.device: str = options.device
        self.budget: float = options.budget
        self.began = time.monotonic()
        self.verdicts: list[tuple[str, str, float]] = []
        self.site = Path(tempfile.mkdtemp(prefix="gpu-site-"))
        self.out.mkdir(parents=True, exist_ok=True)
        for name in ("results.jsonl", "texts.md", "logs.txt", "report.md"):
            (self.out / name).write_text("")

    # ------------------------------------------------------------ before

    def prepare(self, wheels: str) -> str:
        """Unpack the wheels. Returns why elasticrun cannot run, "" if it can."""
        found = sorted(Path(wheels).glob("*.whl")) if wheels else []
        if wheels and not found:
            return f"there are no wheels in {wheels}"
        missing = [wheel for wheel in found if not installed(wheel)]
        why = ""
        # if those that are installed are too old, all of the folder
        for chosen in (missing, found):
            for wheel in chosen:
                with zipfile.ZipFile(wheel) as archive:
                    archive.extractall(self.site)
            why = self._why_not()
            if not why or chosen == found:
                break
        return why

    def _why_not(self) -> str:
        needed = f"{NEEDED}; {HAS_CUDA}" if self.device == "cuda" else NEEDED
        done = subprocess.run(
            [sys.executable, "-c", needed], env=self._environment(), cwd=ROOT, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=IMPORT_LIMIT, check=False,
        )  # fmt: skip
        return done.stdout[-3000:] if done.returncode else ""

    def _environment(self) -> dict[str, str]:
        path = os.pathsep.join([str(ROOT), str(self.site), os.environ.get("PYTHONPATH", "")])
        return {**os.environ, "PYTHONPATH": path.rstrip(os.pathsep), "PYTHONUNBUFFERED": "1"}

    # ------------------------------------------------------------ the parts

    def run(self, chosen: Sequence[Part]) -> None:
        """Run these parts one after the other, and those that may beside `hang`."""
        behind: Running | None = None
        try:
            for part in chosen:
                if behind is not None and not part.beside:
                    self.finish(behind)
                    behind = None
                left = self.budget - (time.monotonic() - self.began)
                if left < part.usual / 2:
                    self._note(part.name, f"not run: {max(0.0, left):.0f} s were left", 0.0)
                    continue
                most = part.most * (REHEARSED if self.device == "cpu" else 1.0)
                running = self.start(part, min(most, left))
                if part.name == HANG:
                    behind = running
                else:
                    self.finish(running)
            if behind is not None:
                self.finish(behind)
                behind = None
        finally:
            if behind is not None:
                sweep(behind.mark)

    def close(self) -> None:
        """Remove the unpacked wheels."""
        shutil.rmtree(self.site, ignore_errors=True)

    def start(self, part: Part, limit: float) -> Running:
        print(f"=== {part.name}: {part.what}; {limit:.0f} s at most", flush=True)
        scratch = Path(tempfile.mkdtemp(prefix="gpu-"))
        shm = Path(tempfile.mkdtemp(prefix="gpu-", dir="/dev/shm"))
        (scratch / "run").mkdir(0o700)
        mark = f"{part.name}-{os.getpid()}-{time.monotonic_ns()}"
        environ = {
            **self._environment(), MARK: mark, "GPU_CHECK_PART": part.name,
            "GPU_CHECK_OUT": str(self.out), "GPU_CHECK_DEVICE": self.device,
            "TMPDIR": str(scratch), "XDG_RUNTIME_DIR": str(scratch / "run"),
            "ELASTICRUN_RUNS": str(scratch / "runs"), "ELASTICRUN_SHM_DIR": str(shm),
        }  # fmt: skip
        with (scratch / "log").open("wb") as log:
            child = subprocess.Popen(
                [sys.executable, "-m", "benchmarks.gpu.parts", part.name], env=environ, cwd=ROOT,
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip
        return Running(part, child, mark, scratch, shm, time.monotonic(), limit)

    def finish(self, running: Running) -> None:
        """Wait for a part until its limit, and end all its processes."""
        name, left = running.part.name, running.began + running.limit - time.monotonic()
        is_killed = False
        try:
            code = running.child.wait(max(0.0, left))
            verdict = "ended" if code == 0 else f"failed with {code}"
        except subprocess.TimeoutExpired:
            is_killed, verdict = True, f"killed after {running.limit:.0f} s"
            running.child.kill()
            running.child.wait()
        except BaseException:
            sweep(running.mark)
            raise
        took = time.monotonic() - running.began
        until = time.monotonic() + (0.0 if is_killed else LEFT_LIMIT)
        while marked(running.mark) and time.monotonic() < until:
            time.sleep(0.1)
        left_behind = sweep(running.mark)
        kept = sum(one.stat().st_size for one in running.shm.rglob("*") if one.is_file()) >> 20
        bad = sum(row["part"] == name and row["ok"] is False for row in self._rows())
        if bad or verdict != "ended":
            log = (running.scratch / "log").read_text(errors="replace")
            with (self.out / "logs.txt").open("a") as file:
                file.write(f"##### {name}: {verdict}, {bad} bad\n{log[-20000:]}\n")
        for folder in (running.scratch, running.shm):
            shutil.rmtree(folder, ignore_errors=True)
        verdict += f", {bad} bad" if bad else ""
        if not is_killed:
            verdict += f", {left_behind} processes left behind" if left_behind else ""
            verdict += f", {kept} MiB left in shared memory" if kept else ""
        self._note(name, verdict, took)

    # ------------------------------------------------------------ the report

    def _note(self, name: str, verdict: str, took: float) -> None:
        print(f"    {name}: {verdict}, {took:.0f} s", flush=True)
        self.verdicts.append((name, verdict, took))
        (self.out / "report.md").write_text("\n".join(self._report()) + "\n")

    def _rows(self) -> list[dict[str, object]]:
        return [json.loads(line) for line in (self.out / "results.jsonl").read_text().splitlines()]

    def _report(self) -> list[str]:
        rows = self._rows()
        bad = sum(row["ok"] is False for row in rows)
        where = "on a GPU"
        if self.device == "cpu":
            where = "rehearsed with a CPU: sizes are a fortieth, and the figures mean nothing"
        when = datetime.now(UTC).date().isoformat()
        seconds = time.monotonic() - self.began
        lines = [
            f"{when}, {where}. {len(rows)} results in {seconds:.0f} s, {bad} of them bad.", "",
            "| part | what | how it went | seconds |", "|---|---|---|--:|",
        ]  # fmt: skip
        what = {part.name: part.what for part in PLAN}
        lines += [f"| {n} | {what[n]} | {said} | {took:.0f} |" for n, said, took in self.verdicts]
        for name, *_ in self.verdicts:
            mine = [row for row in rows if row["part"] == name]
            if mine:
                lines += ["", f"### {name}", "", "| | what | value | more |", "|---|---|---|---|"]
            lines += [f"| {' | '.join(map(cell, cells(row)))} |" for row in mine]
        return lines

    def is_good(self) -> bool:
        """Whether every part that ran has ended well."""
        said = [verdict for _, verdict, _ in self.verdicts]
        return all(one == "ended" or one.startswith("not run") for one in said)


def cells(row: dict[str, object]) -> tuple[object, ...]:
    value = "" if row["value"] is None else row["value"]
    verdict = {True: "ok", False: "**bad**"}.get(row["ok"], "")  # type: ignore[call-overload]
    return verdict, row["name"], f"{value} {row['unit']}".strip(), row["note"]


def cell(words: object) -> str:
    return re.sub(r"\s+", " ", str(words)).replace("|", "/")


def installed(wheel: Path) -> bool:
    """Whether this Python has the wheel's distribution, in any version."""
    try:
        importlib.metadata.version(wheel.name.partition("-")[0])
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def marked(mark: str) -> list[int]:
    """Processes with this mark in their environment."""
    found = []
    for name in filter(str.isdecimal, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            environ = Path("/proc", name, "environ").read_bytes()
            if f"{MARK}={mark}\0".encode() in environ and int(name) != os.getpid():
                found.append(int(name))
    return found


def sweep(mark: str) -> int:
    """Kill the processes with this mark; returns how many there were."""
    seen, end = set[int](), time.monotonic() + KILL_LIMIT
    while (left := marked(mark)) and time.monotonic() < end:
        seen |= set(left)
        for pid in left:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.1)
    return len(seen)


def parsed(argv: Sequence[str] | None) -> tuple[argparse.Namespace, list[Part]]:
    parser = argparse.ArgumentParser(description="Check elasticrun on one GPU.")
    parser.add_argument("--parts", default="", help="these parts only, separated by commas")
    parser.add_argument("--budget", type=float, default=450.0, help="seconds for all of it")
    parser.add_argument("--out", default="build/gpu", help="folder of the results")
    parser.add_argument("--wheels", default="", help="folder with wheels that this Python lacks")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--list", action="store_true", help="print the parts, and run nothing")
    options = parser.parse_args(argv)
    names = [name for name in options.parts.split(",") if name]
    if unknown := [name for name in names if name not in [part.name for part in PLAN]]:
        parser.error(f"no such part: {', '.join(unknown)}")
    return options, [part for part in PLAN if not names or part.name in names]


def main(argv: Sequence[str] | None = None) -> int:
    """0: every part that ran is good; 1: one is not; CANNOT_RUN: elasticrun cannot be imported."""
    options, chosen = parsed(argv)
    if options.list:
        for part in chosen:
            print(
                f"{part.name:12} about {part.usual:3.0f} s, {part.most:.0f} s at most: {part.what}"
            )
        return 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    check = Check(options)
    try:
        if why := check.prepare(options.wheels):
            print(f"elasticrun cannot run here, so nothing was tried:\n{why}")
            (check.out / "report.md").write_text(f"Nothing was tried:\n\n{why}\n")
            return CANNOT_RUN
        check.run(chosen)
    finally:
        check.close()
    print((check.out / "report.md").read_text()[-9000:])
    return 0 if check.is_good() else 1


if __name__ == "__main__":
    sys.exit(main())
