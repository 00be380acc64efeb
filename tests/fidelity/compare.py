"""What differs between a mode's records and torchrun's.

`INTENDED` lists what may differ, with the reason.
"""

from __future__ import annotations

import fnmatch
import functools
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from tests.fidelity.runner import COMPARED, MODES, Case, Ran, Records, Runs
from tests.harness import LIMIT

MISSING = "(missing)"


@dataclass(frozen=True)
class Intended:
    """A difference that is meant. `path` is a pattern over `state/moment/part: name/key`; `holds`
    gets torchrun's value and ours."""

    path: str
    reason: str
    holds: Callable[[Any, Any], bool] = lambda theirs, ours: True
    modes: tuple[str, ...] = tuple(mode for mode in MODES if mode != "torchrun")


FORKED = ("fork", "warm", "parked")

OUR_VARIABLES = ("ELASTICRUN_*", "DLROVER_*")
"""Variables that a rank has of our launcher alone."""

OF_A_RUN = (
    *("MASTER_PORT", "MASTER_ADDR", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_ERROR_FILE"),
    *("FIDELITY_OUT", "FIDELITY_PARKED", "XDG_RUNTIME_DIR"),
)
"""Variables that differ between any two runs of torchrun itself."""


def _is_ours(name: str) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in OUR_VARIABLES)


def _plus(*names: str) -> Callable[[Any, Any], bool]:
    """Ours is theirs and these, if at all."""
    return lambda theirs, ours: [word for word in ours if word not in names] == theirs


def _signals_caught(theirs: str, ours: str) -> bool:
    """As torchrun's, beside the real-time signal of glibc's threads (number 33)."""
    return int(theirs, 16) | 1 << 32 == int(ours, 16) | 1 << 32


def _descriptors(theirs: dict[str, Any], ours: dict[str, Any]) -> bool:
    """Equal but for the monitor's socket and, in a process group, for connections: torchrun's rank
    0 serves the store, and ours is served by a process of the launcher."""

    def rest(found: dict[str, Any], *, connected: bool) -> list[tuple[str, list[Any]]]:
        kept = [(number, kind) for number, kind in found.items() if int(number) < 1000]
        return [each for each in kept if int(each[0]) <= 2] if connected else kept

    connected = any("eventpoll" in kind[0] for kind in theirs.values())
    return rest(theirs, connected=connected) == rest(ours, connected=connected)


def _saving_threads(theirs: list[Any], ours: list[Any]) -> bool:
    """Theirs has torch's thread for saving: under torchrun a Checkpointer saves by torch's API."""
    return [one for one in theirs if "AsyncCheckpoint" not in str(one)] == ours


@functools.cache
def _of_torchs_save() -> frozenset[str]:
    """The modules that torch imports when it saves a checkpoint. They depend on the environment."""
    save = """
import sys, tempfile, torch.distributed.checkpoint as dcp
before = set(sys.modules)
with tempfile.TemporaryDirectory() as folder:
    dcp.save({}, checkpoint_id=folder, no_dist=True)
print(*sys.modules.keys() - before)
"""
    done = subprocess.run(
        [sys.executable, "-c", save], check=True, stdout=subprocess.PIPE, text=True, timeout=LIMIT
    )
    return frozenset(done.stdout.split())


def _saved_by_torch(theirs: list[str], ours: list[str]) -> bool:
    """Theirs has modules that torch's own save imports; ours are the others."""
    rest = {n for n in {*theirs} ^ {*ours} if not n.startswith(_LATE)}
    return rest <= {*theirs} & _of_torchs_save()


def _put_off(theirs: str, ours: str) -> bool:
    return theirs.startswith("<Handlers.SIG_DFL") and "DeferredSignals" in ours


def _is_new(theirs: str, ours: str) -> bool:
    return theirs == MISSING


_LATE = ("_sysconfigdata", "platform")
"""Modules of the standard library that a function imports at its first call, or that another one
imports on some systems alone."""

INTENDED = (
    *(Intended(f"state/*/library: environ/{n}", "one of each run") for n in OF_A_RUN),
    *(Intended(f"state/*/library: environ/{n}", "our own") for n in OUR_VARIABLES),
    Intended(
        "state/*/process: first environ",
        "our own variables",
        lambda theirs, ours: (
            {n for n in theirs if not _is_ours(n)} == {n for n in ours if not _is_ours(n)}
        ),
    ),
    Intended("state/*/library: environ/_MLFLOW_TELEMETRY_SESSION_ID", "random in each process"),
    Intended("state/*/process: parent death signal", "a rank ends with its fork server"),
    Intended("state/*/interpreter: gc frozen", "what ranks share is kept out of collections"),
    Intended(
        "state/*/interpreter: meta_path", "it gives torch back to a forked rank", _plus("_Finder")
    ),
    Intended(
        "state/*/interpreter: modules",
        "what a module of the standard library imports now and then",
        lambda theirs, ours: (
            [n for n in theirs if not n.startswith(_LATE)]
            == [n for n in ours if not n.startswith(_LATE)]
        ),
        FORKED,
    ),
    Intended(
        "state/*/interpreter: atexit",
        "called last, it lets a rank end without warnings of nanobind",
        lambda theirs, ours: ours in (theirs, theirs + 1),
        FORKED,
    ),
    Intended(
        "state/first/meta_path", "it gives torch back to a forked rank", _plus("_Finder"), FORKED
    ),
    Intended(
        "state/first/modules",
        "the interpreter waits for threads with it",
        _plus("_weakrefset", "threading"),
        FORKED,
    ),
    Intended(
        "state/*/process: tasks",
        "the monitor's thread (docs/hangs.md); OpenBLAS stops its threads at a fork",
        lambda theirs, ours: 1 <= ours <= theirs + 1,
    ),
    Intended(
        "state/*/process: SigCgt", "the monitor's thread is started by glibc", _signals_caught
    ),
    Intended("state/*/process: descriptors", "the monitor's socket; the store", _descriptors),
    Intended(
        "state/*/library: environ/TORCHELASTIC_USE_AGENT_STORE",
        "ranks meet at a store of the launcher, also where torchrun lets rank 0 serve it",
        lambda theirs, ours: (theirs, ours) == ("False", "True"),
    ),
    *(
        Intended(f"state/{when}/library: environ/{name}", "asked of NCCL (docs/hangs.md)", _is_new)
        for when in ("imports", "checkpointer")  # a Checkpointer's module sets them
        for name in ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_ENABLE_TIMING")
    ),
    Intended(
        "state/inductor/library: environ/_TORCHINDUCTOR_PYOBJECT_TENSOR_DATA_PTR",
        "an address",
        lambda theirs, ours: theirs.isdigit() and ours.isdigit(),
    ),
    *(
        Intended(f"state/checkpointer/{path}", reason, holds)
        for path, reason, holds in (
            ("interpreter: modules", "torch's API saves it", _saved_by_torch),
            ("library: threads", "torch's API saves it", _saving_threads),
            (
                "library: finalizers",
                "two belong to each snapshot's memory, and go with it",
                lambda theirs, ours: ours in (theirs, [theirs[0], theirs[1] + 2]),
            ),
            ("library: pool threads", "torch's API saves it", lambda theirs, ours: ours == 0),
            ("log: fsspec*", "torch's API saves it", lambda theirs, ours: ours == MISSING),
            ("library: signals/1", "a signal waits for the end of a save", _put_off),
            ("library: signals/15", "a signal waits for the end of a save", _put_off),
            ("process: SigCgt", "a signal waits for the end of a save", lambda theirs, ours: True),
        )
    ),
)


def alike(runs: Runs, case: Case, *modes: str, at_once: bool = True) -> None:
    """Run the case under torchrun and each mode; fail with all that differs."""
    ran = runs.ran(case, "torchrun", *modes, at_once=at_once)
    assert not (wrong := torchruns(case, ran["torchrun"])), "\n".join(["torchrun:", *wrong])
    lines = {mode: compare(case, mode, ran["torchrun"], ran[mode]) for mode in modes}
    assert not any(lines.values()), "\n".join(
        f"{mode}: {line}" for mode, found in lines.items() for line in found
    )


def torchruns(case: Case, theirs: Ran) -> list[str]:
    """What is wrong with torchrun's own run, with which others are compared."""
    return [*_whole(case, "torchrun", theirs), *_alike(theirs.records)]


def compare(case: Case, mode: str, theirs: Ran, ours: Ran) -> list[str]:
    """What differs without being meant: each pair of values once, with what has it, and where."""
    wrong = [*_whole(case, mode, ours), *_alike(ours.records)]
    found: dict[tuple[str, str], tuple[dict[str, int], dict[str, int]]] = {}
    for place in sorted(ours.records.keys() & theirs.records.keys()):
        mine, others = _compared(ours, place), _compared(theirs, place)
        for path, a, b in differences(others, mine):
            if is_intended(mode, path, a, b):
                continue
            part, _, name = path.partition("/")
            moment, _, name = name.partition("/") if part == "state" else ("", "", name)
            names, where = found.setdefault(in_words(a, b), ({}, {}))
            names[f"{part} {name}"] = where[f"{place[0]}/{place[1]} {moment}".strip()] = 1
    return wrong + [
        f"{short(', '.join(names), 500)}\n    (life/rank, when: {', '.join(where)})\n"
        f"    torchrun: {left}\n    {mode}: {right}"
        for (left, right), (names, where) in found.items()
    ]


def _whole(case: Case, mode: str, ran: Ran) -> list[str]:
    """The run ended well, all ranks of all lives were there and came to be as the mode says."""
    wrong = [] if ran.code == 0 else [f"exit code {ran.code}:\n{ran.console[-3000:]}"]
    expected = {(life, rank) for life in COMPARED for rank in range(case.ranks)}
    if missing := sorted(expected - ran.records.keys()):
        wrong.append(f"no record of (life, rank) {missing}; {ran.printed}")
    how = {place: record["sharers"] for place, record in ran.records.items()}
    may = (*MODES[mode].sharers, *([0] if case.executed else []))
    if not set(how.values()) <= set(may):
        wrong.append(f"ranks were not started by {mode}: {how}\n{ran.console[-3000:]}")
    later = {place: record["parked"] for place, record in ran.records.items() if place[0]}
    if mode == "parked" and not all(later.values()):
        wrong.append(f"ranks were no standbys: {later}\n{ran.console[-3000:]}")
    return wrong


def _alike(records: Records) -> Iterator[str]:
    """Values that no two processes may have in common."""
    for key in sorted({key for record in records.values() for key in record["unique"]}):
        values = {place: record["unique"].get(key) for place, record in records.items()}
        if len(set(map(str, values.values()))) < len(values):
            yield f"unique/{key}: not unlike: {values}"


def _compared(ran: Ran, place: tuple[int, int]) -> dict[str, Any]:
    life, rank = place
    record = ran.records[place]
    parts = {part: record[part] for part in ("state", "generators", "losses", "weights", "said")}
    printed = {name: ran.printed[f"{life}/{rank} {name}"] for name in ("stdout", "stderr")}
    return {**parts, "printed": {name: plain(text) for name, text in printed.items()}}


def plain(text: str) -> list[str]:
    """Lines of a log without moments, durations and process ids."""
    text = re.sub(r"'train_(runtime|\w+_per_second)': '[^']*'", "DURATION", text)
    text = re.sub(r"\b\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d[.,\d]*", "TIME", text)
    text = re.sub(r"\[([A-Z])\d{4} \d\d:\d\d:\d\d\.\d+( \d+)?", r"[\1 TIME", text)
    return re.sub(r"\bpid[= ]\d+", "PID", text).splitlines()


def differences(theirs: Any, ours: Any, path: str = "") -> Iterator[tuple[str, Any, Any]]:
    """The paths at which two records differ, with both values."""
    if theirs == ours:
        return
    if isinstance(theirs, dict) and isinstance(ours, dict) and not path.endswith("descriptors"):
        for key in sorted(theirs.keys() | ours.keys()):
            here = f"{path}/{key}" if path else key
            yield from differences(theirs.get(key, MISSING), ours.get(key, MISSING), here)
    else:
        yield path, theirs, ours


def is_intended(mode: str, path: str, theirs: Any, ours: Any) -> bool:
    """Whether a row of INTENDED covers the difference."""

    def holds(row: Intended) -> bool:
        try:
            return row.holds(theirs, ours)
        except (AttributeError, TypeError, ValueError):  # one of them is missing
            return False

    rows = [row for row in INTENDED if mode in row.modes and fnmatch.fnmatchcase(path, row.path)]
    return any(map(holds, rows))


def in_words(theirs: Any, ours: Any) -> tuple[str, str]:
    """Both for a person; of two lists what is in one of them alone."""
    if isinstance(theirs, list) and isinstance(ours, list):
        alone = [word for word in theirs if word not in ours], [w for w in ours if w not in theirs]
        if any(alone):
            return f"without ours: {short(alone[0])}", f"without theirs: {short(alone[1])}"
    return short(theirs), short(ours)


def short(value: Any, limit: int = 900) -> str:
    text = value if isinstance(value, str) else repr(value)
    return text if len(text) <= limit else text[: limit - 3] + "..."
