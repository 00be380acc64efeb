"""The parts of the check, one function each: python -m benchmarks.gpu.parts NAME.

check.py runs each in a process of its own, and has their time limits and their order.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import time
import urllib.request
import uuid
from collections.abc import Iterable, Mapping, Sequence
from http.cookiejar import CookieJar
from importlib import metadata
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec
import psutil

from benchmarks.gpu import launch
from benchmarks.gpu.launch import ELASTICRUN, NO_BACKOFF, TORCHRUN, Fact, Running, TookTooLong
from benchmarks.gpu.probes import FREED
from benchmarks.gpu.results import CUDA, NCCL, emit, gib, in_gib, median, text, trying
from elasticrun.cli.devices import count_accelerators
from elasticrun.core.health.devices import DeviceJudge, DeviceState
from elasticrun.host.accelerators import accelerator_for, watch_child
from elasticrun.host.accelerators.nvidia import Nvidia

FORMS: Final = ("unset", "0", "", "-1", "1", "0,0", "0,99", "99,0", " 0 ", "0,x", "x", "+0", "00")
"""Values of CUDA_VISIBLE_DEVICES, beside UUIDs."""

NO_UUID: Final = f"GPU-{uuid.UUID(int=0)}"
STAGES: Final = ("script", "imported", "group", "context", "reduced")
TOLD: Final = re.compile(r"(?:hang \((\w+)\)|(still)): (.*)\n")
DIFFERS: Final = re.compile(
    r"rank 1 \(([^)]*)\) differs from ranks 0,2 at step \d+, first in (\S+);"
)
LINK: Final = re.compile(r"https?://[^\s\"',)]+")

DEVICE_LIMIT: Final = 60.0
START_LIMIT: Final = 90.0


# ---------------------------------------------------------------- the device


def device() -> None:
    """Versions, the device, each form of CUDA_VISIBLE_DEVICES, and the doctor."""
    with trying("versions"):
        _versions()
    uuids: Sequence[str] = ()
    if CUDA:
        with trying("nvidia-smi"):
            uuids = _nvidia_smi()
    with trying("CUDA_VISIBLE_DEVICES"):
        one = uuids[0] if uuids else NO_UUID
        _forms([*FORMS, one, one[:12], f" {one}", f"{one},0", f"0,{one}"])
    with trying("devices for --nproc-per-node"):
        environ = dict(os.environ)
        for word in ("gpu", "auto"):
            found = count_accelerators(word, environ, print)
            emit(f"devices for --nproc-per-node={word}", found)
        name = accelerator_for("", environ).name
        emit("accelerator", name, ok=(name == "nvidia") == CUDA)
        loads = Nvidia().loads(environ, 5.0)
        emit("NVML's load of each device", str(loads), ok=bool(loads) == CUDA)
    with trying("doctor"):
        answer = launch.elasticrun("doctor", "--nproc-per-node=1", limit=DEVICE_LIMIT)
        text("elasticrun doctor", answer.said)
        lines = [line for line in answer.said.splitlines() if re.search(r"GPU|NVLink", line)]
        note = f"{answer.seconds:.2f} s; {answer.last_line}"
        emit("doctor", answer.code, "", note, answer.code is not None)
        emit("doctor's lines about GPUs", len(lines), "", "; ".join(lines), bool(lines) or not CUDA)


def _versions() -> None:
    words = (
        "import torch as t; print(t.version.cuda, t.cuda.nccl.version() if t.cuda.is_available() "
        "else 'no NCCL', t.cuda.device_count())"
    )
    more = launch.ask([sys.executable, "-c", words], DEVICE_LIMIT).said.strip()
    python = sys.version.split()[0]
    emit("Python, torch", f"{python}, {metadata.version('torch')}", "", f"CUDA, NCCL: {more}")
    memory, shm = psutil.virtual_memory().available, shutil.disk_usage("/dev/shm").free
    free = f"free: {in_gib(memory):.0f} GiB of memory, {in_gib(shm):.0f} GiB of /dev/shm"
    emit("machine", f"{os.cpu_count()} cores", "", f"{free}; Linux {os.uname().release}")


def _nvidia_smi() -> list[str]:
    """The UUIDs of the devices."""
    answer = launch.ask(["nvidia-smi"], DEVICE_LIMIT)
    text("nvidia-smi", answer.said)
    emit("nvidia-smi", answer.code, "", f"{answer.seconds:.2f} s", answer.code == 0)
    fields = "name,memory.total,driver_version,persistence_mode,mig.mode.current"
    query = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader"]
    emit("device, memory, driver, persistence mode, MIG", launch.ask(query, 30).said.strip())
    listed = launch.ask(["nvidia-smi", "-L"], 30).said
    return re.findall(r"UUID: (GPU-[^)]+)", listed)


def _forms(forms: Sequence[str]) -> None:
    """Compare our count with the driver's."""
    answer = launch.probe("count", *forms, limit=DEVICE_LIMIT)
    driver: Mapping[str, int] = json.loads(answer.last_line)
    plain = {k: v for k, v in os.environ.items() if k != "CUDA_VISIBLE_DEVICES"}
    for form in forms:
        environ = plain if form == "unset" else {**plain, "CUDA_VISIBLE_DEVICES": form}
        ours = Nvidia().count(environ)
        name = f"CUDA_VISIBLE_DEVICES {'unset' if form == 'unset' else repr(form)}"
        emit(name, ours, "devices", f"driver: {driver[form]}", ours == driver[form])


def untouched() -> None:
    """No process of a job holds the device but its rank, and the rank only when it uses it."""
    folder = launch.temporary("words-")
    with launch.ranks("touch", folder) as job:
        fact = job.reach("imported", limit=START_LIMIT)[0]
        touched = fact.more["cuda"] or fact.more["bad_fork"]
        emit(
            "a forked rank finds CUDA not initialized, and no bad fork", not touched, ok=not touched
        )
        took = fact.time - job.reach("script")[0].time
        emit("import torch in a forked rank", took, "s", ok=took < 0.3)
        for when, word in (("before", "go"), ("after", "leave")):
            _holders(job, when, fact.pid)
            (folder / word).touch()
            if word == "go":
                job.reach("touched")
        job.end()


def _holders(job: Running, when: str, rank: int) -> None:
    rows, others = [], []
    for process in job.run.processes():
        with contextlib.suppress(OSError, psutil.Error):
            folder = Path(f"/proc/{process.pid}")
            files = {os.readlink(entry) for entry in (folder / "fd").iterdir()}
            opened = sorted(one for one in files if "nvidia" in one)
            mapped = "libcuda.so" in (folder / "maps").read_text()
            title = " ".join(process.cmdline())[-70:]
            rows.append(f"{process.pid} {title}: {opened or 'none open'}, libcuda mapped: {mapped}")
            if (opened or mapped) and process.pid != rank:
                others.append(process.pid)
    text(f"processes, {when} rank {rank} has used the device", "\n".join(rows))
    name = f"processes besides the rank that have the device open, {when} the rank has used it"
    nvml = _nvml()
    seen = f"NVML lists {dict(nvml.processes)}" if nvml else ""
    emit(name, str(others), "", f"of {len(rows)}; {seen}", not others)


class Nvml(NamedTuple):
    """What NVML says of the first device."""

    used: int  # bytes
    total: int
    processes: Mapping[int, int | None]  # bytes by pid, which may be a pid of the container's host


def _nvml() -> Nvml | None:
    """None without a device."""
    import pynvml

    try:
        pynvml.nvmlInit()
        device = pynvml.nvmlDeviceGetHandleByIndex(0)
        memory = pynvml.nvmlDeviceGetMemoryInfo(device)
        listed = pynvml.nvmlDeviceGetComputeRunningProcesses(device)
    except pynvml.NVMLError:
        return None
    return Nvml(memory.used, memory.total, {one.pid: one.usedGpuMemory for one in listed})


def health() -> None:
    """NVML delivers events, lists our processes, and shows when their memory is free; the agent's
    watch of devices sees a healthy node."""
    with trying("the agent's watch of devices"):
        _watch_of_devices()
    if CUDA:
        answer = launch.probe("nvml", limit=90)
        return emit("the probe of NVML", answer.code, "", answer.last_line, answer.code == 0)
    import pynvml

    used = re.findall(r"\bpynvml\.(\w+)", launch.PROBES.read_text())
    missing = [name for name in used if not hasattr(pynvml, name)]
    return emit("names that pynvml lacks", str(missing), ok=not missing)


def _watch_of_devices() -> None:
    words = [sys.executable, "-P", watch_child.__file__, "1", "/sys", *(["--gpus"] * CUDA)]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        line = child.stdout.readline()
        child.stdin.close()
    state = msgspec.json.decode(line, type=DeviceState)
    fault, notices = DeviceJudge().judge(state)
    told = "; ".join([fault, *notices]) or "a healthy node"
    good = not fault and (not CUDA or all(gpu.uuid for gpu in state.gpus))
    emit("GPUs that the agent's watch sees", len(state.gpus), note=told, ok=good)


# ---------------------------------------------------------------- starts


def start() -> None:
    """From the command to the first all_reduce: one rank on NCCL, two on gloo with tensors of the
    device; torchrun, elasticrun cold, elasticrun warm."""
    took: dict[str, list[float]] = {}
    for number in range(2):
        for ranks, backend in ((1, NCCL), (2, "gloo")):
            for launcher, is_warm in ((TORCHRUN, False), (ELASTICRUN, False), (ELASTICRUN, True)):
                if number and launcher == TORCHRUN:
                    continue  # once is enough for a comparison
                name = f"{ranks} on {backend}, {launcher}{', warm' if is_warm else ''}"
                with trying(name):
                    took.setdefault(name, []).append(
                        _start(name, launcher, ranks, backend, is_warm)
                    )
    for name, samples in sorted(took.items()):
        median(f"{name}: command to the first all_reduce", samples)


def _start(name: str, launcher: str, ranks: int, backend: str, is_warm: bool) -> float:
    how = {"launcher": launcher, "count": ranks, "is_warm": is_warm}
    with launch.ranks("die", backend, 0, **how) as job:  # type: ignore[arg-type]
        job.reach("reduced", ranks, limit=START_LIMIT)
        at = {stage: last(job.run.of(stage)) - job.run.began for stage in STAGES}
        code = job.end()
    stages = ", ".join(f"{stage} {seconds:.2f}" for stage, seconds in at.items())
    emit(f"{name}, a sample", at["reduced"], "s", stages, _ours(launcher, code == 0))
    return at["reduced"]


def _ours(launcher: str, good: bool) -> bool | None:
    """The verdict of a check; None for torchrun, which is not checked."""
    return good if launcher == ELASTICRUN else None


def last(facts: Iterable[Fact]) -> float:
    return max(fact.time for fact in facts)


# ---------------------------------------------------------------- restarts


def restart() -> None:
    """kill -9 to the next all_reduce, by stages; whether the memory of the dead rank is free at
    once; and a context alone."""
    for _ in range(2 if CUDA else 0):
        answer = launch.probe("context", limit=DEVICE_LIMIT)
        emit("a context in a new process", answer.seconds, "s", answer.last_line, answer.code == 0)
    for ranks, backend in ((1, NCCL), (2, "gloo")):
        for launcher, deaths in ((ELASTICRUN, 5), (TORCHRUN, 2)):
            name = f"{ranks} on {backend}, {launcher}"
            with trying(name):
                _restarts(name, launcher, ranks, backend, deaths)


def _restarts(name: str, launcher: str, ranks: int, backend: str, deaths: int) -> None:
    flags = (f"--max-restarts={deaths}", *((NO_BACKOFF,) if launcher == ELASTICRUN else ()))
    with launch.ranks("die", backend, deaths, launcher=launcher, count=ranks, flags=flags) as job:
        with contextlib.suppress(TookTooLong):  # the facts say how far it came
            job.reach("reduced", ranks, life=deaths, limit=START_LIMIT)
        code = job.end(20) if job.run.of("reduced", deaths) else None
        dead = {fact.life: fact.time for fact in job.run.of("dead")}
        gaps: dict[str, list[float]] = {stage: [] for stage in STAGES}
        for life, when in sorted(dead.items()):
            for stage in STAGES:
                if len(found := job.run.of(stage, life + 1)) == ranks:
                    gaps[stage].append(last(found) - when)
        stages = {stage: statistics.median(found) for stage, found in gaps.items() if found}
        note = ", ".join(f"{stage} {seconds:.2f}" for stage, seconds in stages.items())
        survived = len(gaps["reduced"])
        good = _ours(launcher, survived == deaths and code == 0)
        emit(f"{name}: restarts", survived, "", f"of {deaths}; exit {code}", good)
        median(f"{name}: kill -9 to the next all_reduce", gaps["reduced"], note=note)
        if {"group", "context"} <= stages.keys():
            share = stages["context"] - stages["group"]
            emit(f"{name}: the first kernel's share (CUDA context)", share, "s")
        if launcher == ELASTICRUN:
            _memory(name, job)
            text(f"{name}: elasticrun's lines", job.own_lines())


def _memory(name: str, job: Running) -> None:
    """Write whether restarted ranks got their memory at the first attempt."""
    facts = job.run.of("memory")
    refused = [int(fact.more["refused"]) for fact in facts]
    waited = [round(fact.more["seconds"], 3) for fact in facts]
    free = [round(fact.more["free"], 1) for fact in job.run.of("context")]
    note = f"seconds until it had it: {waited}; GiB free with a context: {free}"
    good = bool(facts) and not any(refused)
    emit(f"{name}: times that a restarted rank was refused memory", str(refused), "", note, good)


CRASHES: Final = 50


def soak() -> None:
    """Crashes in a row of a rank that holds memory of the device: each is survived, and nothing is
    left behind."""
    before, shm = _nvml(), _shared_memory()
    flags = (f"--max-restarts={CRASHES}", NO_BACKOFF)
    with launch.ranks("die", NCCL, CRASHES, flags=flags) as job:
        agent = job.run.agents[0]
        files: list[int] = []
        with contextlib.suppress(TookTooLong):
            for life in range(CRASHES + 1):
                job.reach("reduced", life=life, limit=30)
                with contextlib.suppress(OSError):
                    files.append(len(os.listdir(f"/proc/{agent.pid}/fd")))
        ended = len(job.run.of("reduced")) > CRASHES
        code = job.end(30) if ended else None
        dead = {fact.life: fact.time for fact in job.run.of("dead")}
        back = {fact.life: fact.time for fact in job.run.of("reduced")}
        gaps = [back[life + 1] - when for life, when in dead.items() if life + 1 in back]
        good = len(gaps) == CRASHES and code == 0
        emit("crashes survived", len(gaps), "", f"of {CRASHES}; exit {code}", good)
        median("kill -9 to the next all_reduce", gaps)
        _memory("soak", job)
        if ended:
            left = [" ".join(one.cmdline())[-100:] for one in job.run.processes()]
            emit("processes left behind", len(left), "", "; ".join(left), not left)
    if files[5:]:
        grown = files[-1] - files[5]
        emit("descriptors of the agent, grown since life 5", grown, ok=grown <= 0)
    left_shm = sorted(_shared_memory() - shm)
    emit("files left in shared memory", len(left_shm), "", str(left_shm[:5]), not left_shm)
    if before is not None:

        def more() -> int:
            now = _nvml()
            return now.used - before.used if now else 0

        launch.await_true(lambda: more() < FREED, 10)
        emit("device memory in use, more than before", in_gib(more()), "GiB", ok=more() < FREED)


def _shared_memory() -> set[str]:
    return set(os.listdir(os.environ.get("ELASTICRUN_SHM_DIR", "/dev/shm")))


# ---------------------------------------------------------------- snapshots


def corruption() -> None:
    """A bit of one of three replicas on the device flips: the rank, its device and the tensor are
    named, and after a restart the rank has what the others have."""
    folder = launch.temporary("words-")
    flags, said = ("--max-restarts=1", NO_BACKOFF), {"LOGLEVEL": "INFO"}
    with launch.ranks("corrupt", folder, count=3, flags=flags, more=said) as job:
        equal = launch.await_true(lambda: "are equal at step" in job.console(), START_LIMIT)
        emit("replicas on the device are compared, and equal", equal, ok=equal)
        (folder / "flip").touch()
        began = job.reach("flipped", limit=START_LIMIT)[0].time
        launch.await_true(lambda: bool(DIFFERS.search(job.console())), 60)
        found = DIFFERS.search(job.console())
        note = found[0] if found else "it was not found"
        emit("a flipped bit is found after", time.monotonic() - began, "s", note, bool(found))
        if found:
            emit("its tensor is named", found[2], ok=found[2] == "state.t40")
            emit("its device is named", found[1], ok=("cuda" in found[1]) == CUDA)
        (folder / "die").touch()
        job.reach("restored", 3, limit=START_LIMIT)
        (folder / "leave").touch()
        code = job.end()
        emit("the job ended with", code, ok=code == 0)


def copies() -> None:
    """Rates from the device to host memory of each kind; kernels while memory is page-locked."""
    _probe("copies", 100)


def _probe(name: str, limit: float) -> None:
    answer = launch.probe(name, limit=limit)
    print(answer.said)
    emit(f"the probe {name}", answer.code, "", "" if answer.code == 0 else answer.last_line,
         answer.code == 0)  # fmt: skip


def overlap() -> None:
    """Training with snapshots that the host waits for, and with copies that overlap training."""
    with launch.ranks("train", launch.temporary("ckpt-")) as job:
        code = job.end(150)
        text("what was printed", job.console())
        emit("the job ended with", code, ok=code == 0)


def snapshots() -> None:
    """Stalls of Checkpointer.step() at 1 and 10 GiB, waited for and overlapped, beside
    dcp.async_save; a kill; bits compared after a restore of the last overlapped snapshot from
    memory and, at 1 GiB, from storage."""
    for size in (1.0, 10.0):
        _snapshots(size)


def snapshots30() -> None:
    """The same at 30 GiB."""
    _snapshots(30.0)


def _snapshots(size: float) -> None:
    title, folder = f"{size} GiB", launch.temporary("ckpt-")
    if why := _lacks(size):
        return emit(title, None, "", f"left out: {why}")
    with (
        trying(title),
        launch.ranks("snapshot", size, folder, "memory", flags=("--max-restarts=1",)) as job,
    ):
        job.reach("restored", limit=170, life=1)
        killed = job.reach("dead")[0].time
        back = last(job.run.of("restored", 1)) - killed
        emit(f"{title}: kill -9 to restored", back, "s")
        code = job.end(90)
        emit(f"{title}: the job ended with", code, ok=code == 0)
        text(f"{title}: elasticrun's lines", job.own_lines())
    if size <= 1:
        with (
            trying(f"{title}: from storage"),
            launch.ranks("snapshot", size, folder, "storage") as job,
        ):
            code = job.end(90)
            emit(f"{title}: a new job from storage ended with", code, ok=code == 0)
    return shutil.rmtree(folder, ignore_errors=True)


def _lacks(size: float) -> str:
    """Why a state of this size does not fit, "" if it does: on the device once, in shared memory
    twice."""
    wanted = gib(size)
    shm = shutil.disk_usage(os.environ.get("ELASTICRUN_SHM_DIR", "/dev/shm")).free
    memory = psutil.virtual_memory().available
    for name, free in (("memory", memory), ("shared memory", shm)):
        if free < 2.05 * wanted:
            return f"{in_gib(free):.1f} GiB of {name} are free"
    device = _nvml()
    if device is not None and (free := device.total - device.used) < 1.3 * wanted:
        return f"{in_gib(free):.1f} GiB of the device are free"
    return ""


# ---------------------------------------------------------------- sight


STUCK: Final = {"sleep": 1, "kernel": 0}
"""The rank that is stuck. elasticrun takes the first device for that of rank 0, so only this rank
counts as working while a kernel runs there."""


def hang() -> None:
    """A rank that sleeps and one in a kernel that never ends: named by stacks, by top, and in the
    job's line."""
    with contextlib.ExitStack() as stack:
        jobs = {
            how: stack.enter_context(
                launch.ranks("hang", how, rank, count=2, flags=("--on-hang=tell",))
            )
            for how, rank in STUCK.items()
        }
        stuck = {how: job.reach("stuck", limit=START_LIMIT)[0].time for how, job in jobs.items()}
        latest = max(stuck.values())
        launch.await_true(lambda: time.monotonic() > latest + 15, 60)
        for how, job in jobs.items():
            with trying(f"{how}: stacks and top"):
                _seen(how, job)
        limits = {"sleep": 80.0, "kernel": 135.0}
        told: dict[str, str] = {}
        while waiting := [
            how for how in jobs
            if how not in told and time.monotonic() < stuck[how] + limits[how]
        ]:  # fmt: skip
            for how in waiting:
                if found := TOLD.search(jobs[how].console()):
                    told[how] = found[3]
                    after = time.monotonic() - stuck[how]
                    note = f"{found[1] or found[2]}: {found[3]}"
                    emit(f"{how}: told after", after, "s", note, f"rank {STUCK[how]} " in found[3])
            time.sleep(launch.POLL)
        for how in jobs.keys() - told.keys():
            emit(f"{how}: told after", None, "", f"nothing within {limits[how]:g} s", ok=False)


def _seen(how: str, job: Running) -> None:
    for words in (("stacks", job.name), ("top", job.name, "--once")):
        answer = launch.elasticrun(*words)
        text(f"{how}: elasticrun {' '.join(words)}", answer.said)
        named = "stuck" in answer.said
        note = f"exit {answer.code}, {answer.seconds:.2f} s"
        emit(f"{how}: `{words[0]}` shows the location", named, "", note, named)


def recorder() -> None:
    """What torch's flight recorders hold of the device's backend, and what elasticrun reads."""
    with launch.ranks("recorder") as job:
        code = job.end()
        emit("the job ended with", code, "", "" if code == 0 else job.console()[-300:], code == 0)


def sight() -> None:
    """`top`, the page's data and its metrics show the load of the device."""
    with launch.ranks("work", more={"LOGLEVEL": "INFO"}) as job:
        job.reach("works", limit=START_LIMIT)
        with trying("top"):
            rows: list[dict[str, Any]] = []

            def loaded() -> bool:
                said = launch.elasticrun("top", job.name, "--once", "-o", "json").said
                rows[:] = json.loads(said)["ranks"]
                return bool(rows) and (not CUDA or rows[0]["gpu"] > 0)

            launch.await_true(loaded, 20, 1.0)
            text("elasticrun top", launch.elasticrun("top", job.name, "--once").said)
            _judge_load("`top`", rows)
        with trying("the page"):
            link = LINK.search(launch.elasticrun("status", job.name).said) or LINK.search(
                job.console()
            )
            if link is None:
                raise TookTooLong("no link to the page")
            opener = urllib.request.build_opener(urllib.request.HTTPCookieProcessor(CookieJar()))
            page = opener.open(link[0], timeout=20).read()
            emit("the page", len(page), "bytes", ok=b"GPU" in page)
            base = link[0].partition("?")[0].rstrip("/")
            picture = json.loads(opener.open(f"{base}/picture", timeout=20).read())
            _judge_load("the page's data", picture["ranks"])
            figures = opener.open(f"{base}/metrics", timeout=20).read().decode()
            emit("metrics", len(figures.splitlines()), "lines", ok="elasticrun_" in figures)


def _judge_load(name: str, rows: Sequence[Mapping[str, Any]]) -> None:
    load = [(row["gpu"], row["gpu_mib"]) for row in rows]
    good = bool(load) and all((gpu > 0 and mib > 0) == CUDA for gpu, mib in load)
    emit(f"{name}: percent and MiB of the device", str(load), ok=good)


# ---------------------------------------------------------------- recovery


def recovery() -> None:
    """A recoverable function that is called again in the same process keeps its CUDA context and
    its compiled code: one rank on NCCL that is told to restart, and two ranks whose peer dies."""
    with trying("one rank on the device"):
        _called_again()
    with trying("two ranks, one is killed"):
        _peer_dies()


TIMES: Final = 3


def _called_again() -> None:
    folder = launch.temporary("words-")
    with launch.ranks("recover", "device", folder) as job:
        job.reach("entered", limit=START_LIMIT)
        gaps = []
        for time_of in range(1, TIMES + 1):
            began = time.monotonic()
            answer = launch.elasticrun("restart", job.name)
            if answer.code:
                raise TookTooLong(f"restart: {answer.last_line}")
            gaps.append(job.reach("entered", time_of + 1)[-1].time - began)
        (folder / "leave").touch()
        code = job.end()
        median("`elasticrun restart` to the next all_reduce", gaps, note=_built(job))
        _judge_kept("one rank", job.run.of("entered"))
        emit("one rank: the job ended with", code, ok=code == 0)


def _peer_dies() -> None:
    folder = launch.temporary("words-")
    flags = ("--max-restarts=1",)
    with launch.ranks("recover", "mixed", folder, count=2, flags=flags) as job:
        before = {fact.rank: fact for fact in job.reach("entered", 2, limit=START_LIMIT)}
        killed = time.monotonic()
        os.kill(before[1].pid, signal.SIGKILL)
        after = {fact.rank: fact for fact in job.reach("entered", 4)[2:]}
        (folder / "leave").touch()
        code = job.end()
        called = job.run.of("called")
        again = next(one.time for one in called[2:] if one.rank == 0)
        emit("kill -9 of a peer until the survivor is called again", again - killed, "s")
        emit("kill -9 of a peer to the next all_reduce", last(after.values()) - killed, "s",
             _built(job))  # fmt: skip
        _judge_kept("the survivor", [before[0], after[0]])
        emit("two ranks: the job ended with", code, ok=code == 0)


def _built(job: Running) -> str:
    """How long each process took to build what it keeps: survivors wait for a new process."""
    built = [round(fact.more["seconds"], 2) for fact in job.run.of("built")]
    return f"compiled in {built} s, once per process"


def _judge_kept(name: str, facts: Sequence[Fact]) -> None:
    pids = {fact.pid for fact in facts}
    emit(f"{name}: process kept", len(pids) == 1, ok=len(pids) == 1)
    initialized = [bool(fact.more["initialized"]) for fact in facts[1:]]
    kept = all(initialized) == CUDA
    emit(
        f"{name}: CUDA is initialized when the function is called again", str(initialized), ok=kept
    )
    graphs = [int(fact.more["graphs"]) for fact in facts]
    emit(f"{name}: graphs compiled so far", str(graphs), ok=len(set(graphs)) == 1)
    equal = [bool(fact.more["equal"]) for fact in facts]
    emit(f"{name}: a kept tensor has its bits", str(equal), ok=all(equal))


PARTS: Final = {
    one.__name__: one
    for one in (
        device, overlap, copies, snapshots, start, restart, soak, corruption, hang, untouched,
        recorder, recovery, sight, health, snapshots30,
    )
}  # fmt: skip

if __name__ == "__main__":
    PARTS[sys.argv[1]]()
