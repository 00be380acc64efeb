"""`elasticrun ckpt ls|verify|prune DIR`: the checkpoints in a folder.

Sizes and hashes come from each checkpoint's manifest; no state is loaded, so torch is not needed.
Snapshots in the memory of a running job do not appear.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Final

from msgspec import Struct, structs

from elasticrun.cli.flags import PROG, Parser
from elasticrun.cli.settings import UsageError
from elasticrun.cli.verbs.columns import lines, table_width, wrapped_on_terminal
from elasticrun.config import EXIT_USAGE
from elasticrun.core.words import plain, plural
from elasticrun.host.doctor.verdict import amount
from elasticrun.host.runs import index
from elasticrun.host.runs.layout import CHECKPOINTS, RunFolder
from elasticrun.jobs.rows import as_json
from elasticrun.snapshots.storage.folder import MAX_STEP, Folder
from elasticrun.snapshots.storage.manifest import ManifestError
from elasticrun.snapshots.storage.retention import sweep
from elasticrun.snapshots.storage.timeline import ListedCheckpoint, restorable_steps
from elasticrun.snapshots.storage.writing import StorageError

TITLES: Final = ("STEP", "WHEN", "SIZE", "RANKS", "REASON", "STATE")
NO_HASHES: Final = "was written by torch alone: there are no sizes and hashes to compare with"
WRITTEN: Final = ": it is being written, or the write was interrupted"
REST: Final = f": the next checkpoint of its job, or `{PROG} ckpt prune`, removes the rest"
LEFT: Final = "is abandoned: training was rewound to an older step, and no start restores it"


class CheckpointRow(Struct, frozen=True, kw_only=True):
    """What `elasticrun ckpt ls -o json` prints of a checkpoint; its fields are a stable schema."""

    step: int
    state: str  # whole, left (superseded timeline), torn (not committed), removing, spoiled
    when: float = 0.0  # time of the commit, else of the last change; seconds since 1970
    size: int = 0  # bytes
    world_size: int = 0  # ranks that wrote it; 0: unknown
    reason: str = ""  # periodic, breakpoint, asked
    manifest: bool = False  # whether sizes and hashes exist for comparison
    faults: tuple[str, ...] = ()  # each completes a sentence that starts with the step
    restart: bool = False  # a restart resumes from it, unless a newer step is in memory


def main(argv: Sequence[str]) -> int:
    """Run `ckpt ls`, `verify` or `prune`. Returns 1 if a checkpoint is bad, if one could not be
    removed, or if the storage does not answer. Raises UsageError."""
    made = _parser()
    ns = made.parse_args(argv)
    try:
        code: int = ns.does(_folder(ns.folder, "ckpt prune" if ns.verb == "prune" else ""), ns)
    except StorageError as wrong:
        print(f"{made.prog}: {wrong}", file=sys.stderr)
        return 1
    return code


def _parser() -> Parser:
    made = Parser(prog=f"{PROG} ckpt", description="List, verify or prune checkpoints.")
    verbs = made.add_subparsers(dest="verb", required=True, metavar="ls|verify|prune")

    def add(name: str, does: Callable[[Folder, argparse.Namespace], int], text: str) -> Parser:
        verb = verbs.add_parser(name, help=text, description=f"{text[0].upper()}{text[1:]}.")
        verb.set_defaults(does=does)
        text = "a folder's path or URL, or the name of a job with checkpoints in its run folder"
        verb.add_argument("folder", metavar="DIR", help=text)
        text = "json: for programs (docs/checkpoints.md)"
        verb.add_argument("-o", "--output", choices=("text", "json"), default="text", help=text)
        return verb

    add("ls", _ls, "list them, whether each is intact, and which one a restart resumes from")
    verify = add("verify", _verify, "compare their sizes and hashes with what was written")
    text = "only this step [all]"
    verify.add_argument("step", nargs="?", metavar="STEP", type=_number, help=text)
    prune = add("prune", _prune, "remove older ones, by the same rule as the Checkpointer's `keep`")
    count = partial(_number, least=1)
    text = "how many of the newest to keep; the newest intact one always stays"
    prune.add_argument("--keep", metavar="N", type=count, required=True, help=text)
    text = "also keep steps that are multiples of M"
    prune.add_argument("--every", metavar="M", type=count, default=0, help=text)
    return made


def _number(text: str, least: int = 0) -> int:
    if not (text.isascii() and text.isdecimal() and least <= int(text[:20]) < MAX_STEP):
        raise argparse.ArgumentTypeError(f"{text!r:.40} is not a whole number of at least {least}")
    return int(text)


def _folder(word: str, whole: str = "") -> Folder:
    """The folder that the user means; `whole` as in `index.find`. Raises UsageError,
    StorageError."""
    if "://" in word:
        return Folder(word)
    path = Path(word).expanduser().absolute()
    run = RunFolder(path)
    if not path.is_dir():
        if "/" in word:
            raise UsageError(f"there is no folder {path}", EXIT_USAGE)
        try:
            run = index.find(index.runs_root(os.environ), word, whole=whole, newest=True)
        except (OSError, index.NoRun) as wrong:
            raise UsageError(f"there is no folder {path}, and {wrong}", EXIT_USAGE) from None
    if (job := run.job()) is None:
        return Folder(str(path))
    path = run.path / CHECKPOINTS
    if not path.is_dir() and job.where == "k8s":
        raise UsageError(
            f"the checkpoints of job {job.name} are in its pods: `{PROG} exec {job.name} -- "
            f"{PROG} ckpt ls DIR` lists them",
            EXIT_USAGE,
        )
    if not path.is_dir():
        raise UsageError(
            f"the job has no checkpoints in its run folder ({path} does not exist): give the "
            "folder that its script passes to its Checkpointer",
            EXIT_USAGE,
        )
    return Folder(str(path))


def _rows(folder: Folder, *, hashes: bool, only: int | None = None) -> list[CheckpointRow]:
    """The rows, ordered by step. `hashes`: also compare the files with their hashes; `only`: just
    this step, if it exists. Raises StorageError."""
    found = folder.survey()
    on_timeline = restorable_steps(found)
    rows = [
        _row(
            folder,
            one,
            left=one.step not in on_timeline,
            hashes=hashes and only in (None, one.step),
        )
        for one in found
    ]
    taken = max((row.step for row in rows if row.state == "whole"), default=-1)
    rows = [structs.replace(row, restart=row.step == taken) for row in rows]
    return [row for row in rows if only in (None, row.step)]


def _row(folder: Folder, one: ListedCheckpoint, *, left: bool, hashes: bool) -> CheckpointRow:
    faults = tuple(fault.clause for fault in folder.faults(one.step, 0, int(hashes)))
    state = "left" if left else "whole"
    if faults:
        state = "spoiled" if one.marker else "removing" if one.removed else "torn"
    if one.condemned and (why := folder.verdict(one.step)):
        faults = (f"{faults[0]}: {why}", *faults[1:])
    elif state == "torn" and not one.ours:
        faults = (faults[0] + WRITTEN, *faults[1:])
    elif state == "removing":
        faults = (faults[0] + REST,)
    try:
        manifest = folder.manifest(one.step)
    except ManifestError:
        manifest = None
    return CheckpointRow(
        step=one.step,
        state=state,
        when=one.marked or one.changed,
        size=sum(folder.files(one.step).values()),
        world_size=manifest.world_size if manifest else 0,
        reason=manifest.reason if manifest else "",
        manifest=one.ours,
        faults=faults,
    )


def _remarks(row: CheckpointRow) -> list[str]:
    """Remarks about a checkpoint besides its state, one per line."""
    remarks = list(row.faults)
    if not remarks and row.state == "left":
        remarks.append(LEFT)
    if not remarks and not row.manifest:
        remarks.append(NO_HASHES)
    return [plain(f"step {row.step} {text}") for text in remarks]


def _ls(folder: Folder, ns: argparse.Namespace) -> int:
    rows = _rows(folder, hashes=False)
    if ns.output == "json":
        print(as_json(rows))
        return 0
    if not rows:
        print(f"there is no checkpoint in {folder.url}")
        return 0
    print(*lines(TITLES, [_cells(row) for row in rows], table_width()), sep="\n")
    for text in wrapped_on_terminal(one for row in rows for one in _remarks(row)):
        print(text)
    taken = [row.step for row in rows if row.restart]
    print(f"a restart resumes from step {taken[0]}" if taken else "a restart starts from scratch")
    return 0


def _cells(row: CheckpointRow) -> tuple[str, ...]:
    return (
        str(row.step),
        time.strftime("%Y-%m-%d %H:%M", time.localtime(row.when)) if row.when else "-",
        amount(row.size),
        str(row.world_size or "-"),
        plain(row.reason)[:12] or "-",
        row.state,
    )


def _verify(folder: Folder, ns: argparse.Namespace) -> int:
    """Returns 1 if a checkpoint is bad. One without marker and manifest may still be being written,
    and one that is being removed is no longer needed: these count as bad only if the user named the
    step."""
    rows = _rows(folder, hashes=True, only=ns.step)
    if not rows:
        raise _missing_error(folder, ns.step)
    if ns.output == "json":
        print(as_json(rows))
    else:
        for row in rows:
            print(*(_remarks(row) or [f"step {row.step} is whole: {amount(row.size)}"]), sep="\n")
    late = [r for r in rows if r.state == "removing" or (r.state == "torn" and not r.manifest)]
    return int(any(row.faults and (row not in late or ns.step is not None) for row in rows))


def _missing_error(folder: Folder, step: int | None = None) -> UsageError:
    steps = ", ".join(map(str, folder.committed()[-8:]))
    if steps and step is not None:
        return UsageError(f"there is no step {step} in {folder.url}: there is {steps}", EXIT_USAGE)
    text = f"{folder.url} is not a folder of checkpoints: it has no step-000000123 or the like"
    return UsageError(text, EXIT_USAGE)


def _prune(folder: Folder, ns: argparse.Namespace) -> int:
    found = folder.survey()
    if not found:
        raise _missing_error(folder)
    if not any(one.ours for one in found):
        raise UsageError(
            f"{folder.url} has no checkpoint with an elasticrun.json, so nothing is removed",
            EXIT_USAGE,
        )
    safe = _newest_verified(folder, found)
    if not safe:
        raise StorageError(f"no checkpoint in {folder.url} is intact, so nothing is removed")
    sizes = {one.step: sum(folder.files(one.step).values()) for one in found}
    done = sweep(folder, keep_last=ns.keep, keep_every=ns.every, in_use=safe)
    kept = folder.committed()
    if ns.output == "json":
        print(as_json({"removed": done.removed, "kept": kept}))
    else:
        for step in done.removed:
            print(f"removed step {step}: {amount(sizes.get(step, 0))}")
        summary = f"{plural(len(done.removed), 'checkpoint')} removed from {folder.url}; kept: "
        print(summary + ", ".join(map(str, kept)))
    for remark in done.remarks:
        print(f"{PROG} ckpt: {remark}", file=sys.stderr)
    return int(bool(done.remarks))


def _newest_verified(folder: Folder, found: Sequence[ListedCheckpoint]) -> list[int]:
    """The newest step without a fault, and the newest that hashes confirm, as far as they exist."""
    safe: list[int] = []
    for step in reversed(restorable_steps(found)):
        if folder.verify(step):
            continue
        hashed = folder.has_manifest(step)
        if hashed or not safe:
            safe.append(step)
        if hashed:
            break
    return safe
