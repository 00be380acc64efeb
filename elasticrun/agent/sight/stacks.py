"""Finds the user's own line in the stacks of a node's ranks, and groups threads with equal stacks.

A frame is (file, line, function); a stack is its frames, innermost first. Frames of the user's
source keep their line numbers, and library frames become module and function. The inside of torch's
collectives is left out. So ranks on different hosts that do the same have equal stacks.
"""

from __future__ import annotations

import re
import sysconfig
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Final

from elasticrun.wire import messages as m
from elasticrun.wire.types import MAX_NAME, MAX_TEXT, write_ranges

Frame = tuple[str, int, str]
"""File, line, function."""

MAIN: Final = ("", "main", "MainThread")
"""Names of the main thread: on the wire, from ranks, and in Python."""

MAX_FRAMES: Final = 20
"""Maximum frames shown per group, the innermost."""

MAX_LINE: Final = 200
"""Maximum characters of a frame."""

_OURS: Final = str(Path(__file__).resolve().parents[2]) + "/"
_STANDARD: Final = tuple(
    str(path) + "/"
    for name in ("stdlib", "platstdlib")
    for path in {Path(sysconfig.get_path(name)), Path(sysconfig.get_path(name)).resolve()}
)
_PACKAGES: Final = re.compile(r"/(?:site|dist)-packages/(.+)")
_ANY_STANDARD: Final = re.compile(r"/(?:lib|lib64)/python3\.\d+t?/(.+)")
_TYPED: Final = ("<string>", "<stdin>", "<ipython", "<console>")
"""Sources without a file that are still the user's."""

_PREFERRED: Final = (
    "torch._dynamo",
    "torch._inductor",
    "triton",
    "torch.serialization",
    "torch.distributed.checkpoint",
    "safetensors",
    "torch.utils.data",
)
"""Libraries whose calls indicate how long a rank may wait; `place_of` prefers them."""

_JOINING: Final = frozenset({"init_process_group", "new_group", "_create_c10d_store", "rendezvous"})
"""Functions of torch.distributed that wait for other processes to join."""

_WRAPPERS: Final = frozenset(
    {"contextlib", "functools", "torch.utils._contextlib", "torch.distributed.c10d_logger"}
)
"""Modules whose frames only forward a call."""

_IDLE: Final = frozenset(
    {
        "asyncio.base_events",
        "concurrent.futures.thread",
        "multiprocessing.connection",
        "queue",
        "selectors",
        "threading",
    }
)
"""Modules in which idle helper threads wait."""

_DIGITS: Final = re.compile(r"0x[0-9a-fA-F]+|\d+")


def place_of(frames: Sequence[Frame]) -> tuple[str, str]:
    """The innermost line of the user's source, such as "train.py:88 load_shard", and the library
    that it has called, such as "torch.serialization". That is the outermost called library in
    _PREFERRED, else the outermost. "" if unknown."""
    at = _own(frames)
    if at is None:
        return "", ""
    return _cut(_line(frames[at]), MAX_NAME), _library(frames[:at])


def group_stacks(
    by_rank: Mapping[int, Mapping[str, Sequence[Frame]]],
) -> tuple[m.StackGroup, ...]:
    """The groups of equal threads among these ranks' stacks.

    `by_rank` has stacks by thread name (a name in MAIN for the main thread). Main threads come
    first, then the rarest; MAX_STACKS groups at most. Idle threads of libraries are left out.

    A key depends only on the frames and the masked thread name. So groups of several nodes can be
    merged by key (`ranks` and `count`) into the job's groups."""
    found: dict[tuple[str, str], list[tuple[int, str]]] = {}
    for rank, threads in by_rank.items():
        for name, frames in threads.items():
            thread = "" if name in MAIN else name
            text = "\n".join(_lines(frames))
            if text and not (thread and _is_idle(frames)):
                found.setdefault((_masked(thread), text), []).append((rank, thread))
    groups = [_group(*what, who) for what, who in found.items()]
    groups.sort(key=lambda group: (group.thread != "", group.count, group.key))
    return tuple(groups[: m.MAX_STACKS])


def _group(masked: str, text: str, who: list[tuple[int, str]]) -> m.StackGroup:
    key = blake2b(f"{masked}\n{text}".encode(errors="replace"), digest_size=8).hexdigest()
    threads = {thread for _, thread in who}
    thread = _printable(threads.pop() if len(threads) == 1 else masked)
    ranks = {rank for rank, _ in who}
    return m.StackGroup(
        key,
        _cut(write_ranges(ranks, pairs=True), MAX_NAME),
        len(ranks),
        _cut(thread, MAX_NAME),
        text,
    )


def _lines(frames: Sequence[Frame]) -> list[str]:
    """The shown lines of a stack; stacks with the same lines are equal."""
    shown = list(frames[_first(frames) :])
    while shown and (
        _is_ours(shown[-1][0]) or _module(shown[-1][0]) == "runpy"
    ):  # the script's caller
        shown.pop()
    lines: list[str] = []
    room = MAX_TEXT
    for frame in shown:
        if _module(frame[0]) in _WRAPPERS or _is_ours(frame[0]):
            continue
        line = _cut(_line(frame), MAX_LINE)
        room -= len(line) + 1
        if room < 0 or len(lines) == MAX_FRAMES:
            break
        lines.append(line)
    return lines


def _first(frames: Sequence[Frame]) -> int:
    """Index of the innermost frame shown: the call into torch.distributed, if the user's line made
    one."""
    own = _own(frames)
    below = range(len(frames) if own is None else own)
    calls = [at for at in below if _is_collective_call(frames[at])]
    return max(calls, default=0)


def _is_collective_call(frame: Frame) -> bool:
    module = _module(frame[0])
    return module.startswith("torch.distributed.") and module not in _WRAPPERS


def _own(frames: Sequence[Frame]) -> int | None:
    """Index of the innermost frame of the user's source. For training code that is installed as a
    package, a frame of that package, if the outermost frame belongs to it."""
    for at, (file, _, _) in enumerate(frames):
        if not _module(file) and not _is_ours(file):
            return at
    tops = [_top(file) for file, _, _ in frames]
    outermost = next((top for top in reversed(tops) if top), "")
    return tops.index(outermost) if outermost and outermost != "torch" else None


def _top(file: str) -> str:
    """The installed package of a file; "" if none."""
    found = _PACKAGES.search(file)
    return found[1].split("/")[0].removesuffix(".py") if found and not _is_ours(file) else ""


def _library(below: Sequence[Frame]) -> str:
    """The library for `place_of`."""
    modules = [_module(file) for file, _, _ in reversed(below)]
    for module, (_, _, function) in zip(modules, reversed(below), strict=True):
        for known in _PREFERRED:
            if f"{module}.".startswith(f"{known}."):
                return known
        if module.startswith("torch.distributed.") and function in _JOINING:
            return f"torch.distributed.{function}"
    installed = [
        module
        for module, (file, _, _) in zip(modules, reversed(below), strict=True)
        if module not in _WRAPPERS and not _is_standard(file)
    ]
    name = next((n for n in (*installed, *modules) if n and n not in _WRAPPERS), "")
    return _cut(_printable(".".join(name.split(".")[:2])), MAX_NAME)


def _is_idle(frames: Sequence[Frame]) -> bool:
    return _own(frames) is None and _module(frames[0][0]) in _IDLE


def _line(frame: Frame) -> str:
    file, line, function = frame
    module = _module(file)
    if module:
        return _printable(f"{module} {function}")
    name = "/".join(Path(file).parts[-2:]) if file.endswith("__init__.py") else Path(file).name
    return _printable(f"{name}:{line} {function}")


def _module(file: str) -> str:
    """The dotted name of a library's module; "" for the user's source and for ours."""
    if file.startswith("<frozen "):
        return file[8:].rstrip(">")
    if "/torchinductor_" in file or file.startswith("<eval_with_key"):
        return "torch._inductor"
    if file.startswith("<"):
        return "" if file.startswith(_TYPED) else "generated"
    if _is_ours(file):
        return ""
    inside = _PACKAGES.search(file) or _ANY_STANDARD.search(file)
    path = inside[1] if inside else _standard_path(file)
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def _is_standard(file: str) -> bool:
    inside = _ANY_STANDARD.search(file) is not None or _standard_path(file) != ""
    return file.startswith("<frozen ") or (inside and _PACKAGES.search(file) is None)


def _standard_path(file: str) -> str:
    found = next((path for path in _STANDARD if file.startswith(path)), "")
    return file[len(found) :] if found else ""


def _is_ours(file: str) -> bool:
    return file.startswith(_OURS)


def _masked(thread: str) -> str:
    return _DIGITS.sub("*", thread)


def _printable(text: str) -> str:
    return "".join(c if c.isprintable() else "?" for c in text)


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else text[: most - 3] + "..."
