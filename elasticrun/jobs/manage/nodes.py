"""`elasticrun top nodes`: what the ranks of all of this user's jobs use on each host, and the
capacity of this host.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Final

import psutil
from msgspec import Struct

from elasticrun.cli.flags import PROG, Parser
from elasticrun.cli.verbs.columns import lines, table_width
from elasticrun.cli.verbs.masters import NoStatus, published_here
from elasticrun.core.sight.picture import Picture
from elasticrun.host.accelerators.base import cores
from elasticrun.host.accelerators.nvidia import Nvidia
from elasticrun.host.runs.index import all_runs, runs_root
from elasticrun.host.runs.layout import ENDED, RunFolder
from elasticrun.host.system.network import names_this_host_only
from elasticrun.jobs.connection import JobConnection, JobMaster, NotAnswered, master_of
from elasticrun.jobs.manage.listing import add_output, has_ended
from elasticrun.jobs.rows import as_json

TITLES: Final = ("NODE", "JOBS", "RANKS", "CPU", "MEMORY", "GPUS BUSY", "ALLOCATED")

BUSY: Final = 5
"""Per cent utilization at which a GPU counts as busy."""


class HostRow(Struct, kw_only=True):
    """What `elasticrun top nodes -o json` prints of a host. Memory in MiB; -1: not known here."""

    node: str
    jobs: list[str] = []
    ranks: int = 0
    cpu: float = 0.0  # cores that the ranks keep busy
    cores: int = -1
    memory: int = 0  # used by the ranks
    memory_total: int = -1
    gpus_busy: int = 0
    gpus_allocated: int = 0  # in use by ranks
    gpus: int = -1


def main(argv: Sequence[str]) -> int:
    """Run `elasticrun top nodes`. Returns 1 if a master does not answer."""
    made = Parser(prog=f"{PROG} top nodes", description="Show the usage of each host by your jobs.")
    add_output(made)
    ns = made.parse_args(argv)
    pictures, silent = _pictures()
    rows = host_rows(pictures, _this_host())
    for sentence in silent:
        print(f"{made.prog}: {sentence}", file=sys.stderr)
    drawn = (
        [] if ns.output == "json" else lines(TITLES, [_cells(row) for row in rows], table_width())
    )
    print("\n".join(drawn) or as_json(rows))
    return 1 if silent else 0


def host_rows(pictures: Iterable[tuple[str, Picture]], here: HostRow) -> list[HostRow]:
    """One row per host, this host first. `pictures`: pairs of a job's name and its picture."""
    rows = {here.node: here}
    for job, picture in pictures:
        hosts = {node.node: node.host for node in picture.status.nodes}
        for rank in picture.ranks:
            host = hosts.get(rank.node) or rank.node
            host = here.node if names_this_host_only(host) else host
            row = rows.setdefault(host, HostRow(node=host))
            row.jobs += [job] if job not in row.jobs else []
            row.ranks += 1
            row.cpu += rank.cpu
            row.memory += rank.rss
            row.gpus_allocated += rank.gpu >= 0
            row.gpus_busy += rank.gpu >= BUSY
    return list(rows.values())


def _pictures() -> tuple[list[tuple[str, Picture]], list[str]]:
    """Each job's name and live picture, and a sentence for each master that does not answer."""
    found, silent = [], []
    with asyncio.Runner() as runner:
        for name, master in _masters():
            try:
                found.append((name, JobConnection(master, runner).picture(live=True)))
            except NotAnswered as why:
                silent += [] if has_ended(master.run) else [f"{name}: {why}"]
    return found, silent


def _masters() -> Iterator[tuple[str, JobMaster]]:
    """The names and masters of all this user's running jobs, here or elsewhere."""
    here = set()
    with contextlib.suppress(NoStatus):
        for one in published_here():
            here.add(os.path.realpath(one.run) if one.run else "")
            yield (
                one.name or one.job_id,
                JobMaster(one.endpoint, one.reader, one.operator, run=one.run),
            )
    folders: list[RunFolder] = []
    with contextlib.suppress(OSError):
        folders = all_runs(runs_root(os.environ))
    for folder in folders:
        job = folder.job()
        is_over = os.path.realpath(folder.path) in here or folder.state() in ENDED
        if job is None or job.where == "local" or is_over:
            continue
        with contextlib.suppress(NotAnswered):
            yield job.name, master_of(folder)


def _this_host() -> HostRow:
    gpus = Nvidia().count(os.environ)
    return HostRow(
        node=os.uname().nodename,
        cores=cores(),
        memory_total=psutil.virtual_memory().total // 2**20,
        gpus=-1 if gpus is None else gpus,
    )


def _cells(row: HostRow) -> tuple[str, ...]:
    def of(part: str, whole: str, known: int) -> str:
        return f"{part}/{whole}" if known >= 0 else part

    return (
        row.node,
        (",".join(row.jobs) or "-") if len(row.jobs) < 3 else str(len(row.jobs)),
        str(row.ranks),
        of(f"{row.cpu:.1f}", str(row.cores), row.cores),
        of(_size(row.memory), _size(row.memory_total), row.memory_total),
        str(row.gpus_busy),
        of(str(row.gpus_allocated), str(row.gpus), row.gpus),
    )


def _size(mib: int) -> str:
    return f"{mib}M" if mib < 10_000 else f"{mib / 1024:.0f}G"
