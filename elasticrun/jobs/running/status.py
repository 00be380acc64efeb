"""`elasticrun status [ENDPOINT]`: a line for each job, or one page for a single job, from its
master over gRPC.

If the job's leadership is in etcd (`--master-store`), etcd names the leader. Without an endpoint,
every master of this user on this host is queried: the user's folder contains their addresses and
the credentials for each. `elasticrun list` also shows jobs that have ended. A master on another
host requires the job's token, as it does from nodes. The exit code is 0 if every queried master
answered, or if a job that does not run is shown from its run folder; else 1.

A name is never wrapped or truncated, so that it can be copied. A name too wide for the terminal
gets its own line, as in `df`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

from elasticrun.cli.verbs.columns import Row, duration, lines, width, wrapped_on_terminal
from elasticrun.cli.verbs.masters import (
    NO_JOBS,
    MasterQuery,
    NoStatus,
    is_here,
    parse_endpoint,
    published_here,
    query_all,
    query_to,
    query_with,
)
from elasticrun.config import ETCD_CALL_LIMIT, Tls
from elasticrun.core.words import did_you_mean, plain, plural
from elasticrun.host.runs import index
from elasticrun.host.runs.layout import ENDED, RunFolder
from elasticrun.jobs.connection import NotAnswered, UserJob, find_job, master_of
from elasticrun.jobs.rows import JobPage, live_row, page_of, row_of
from elasticrun.wire.auth import page_key
from elasticrun.wire.messages import JobStatus
from elasticrun.wire.rpc.etcd_place import Keys, PlaceError, leader_from_bytes, parse_place
from elasticrun.wire.types import Endpoint, WireError

if TYPE_CHECKING:
    import argparse

    from elasticrun.wire.messages import NodeStatus


async def find_leader(store: str, job_id: str, files: Tls | None) -> Endpoint:
    """The endpoint of the master that leads `job_id`. Raises NoStatus."""
    # Late import: grpc takes longer to import than everything else here together.
    from elasticrun.wire.messages import End
    from elasticrun.wire.rpc import etcd, protobuf

    tls = files or Tls()
    keys = Keys(job_id)
    try:
        client = etcd.Etcd(
            parse_place(store), ca=tls.ca, cert=tls.cert, key=tls.key, limit=ETCD_CALL_LIMIT
        )
        try:
            there = {item.key: item.value for item in (await client.read(keys.lead)).items}
        finally:
            await client.close()
    except (PlaceError, etcd.EtcdError) as wrong:
        raise NoStatus(str(wrong)) from None
    leader = leader_from_bytes(there.get(keys.master, b""))
    if leader is not None:
        return leader.endpoint
    with contextlib.suppress(KeyError, WireError):
        end = protobuf.order_from_wire(there[keys.outcome])
        if isinstance(end, End):
            raise NoStatus(f"job {job_id!r} has ended: {end.reason}")
    raise NoStatus(f"job {job_id!r} has no master in {store} at the moment")


TITLES: Final = ("JOB", "STATE", "NODES", "STEP", "STEP AGE", "RESTARTS", "AGE")


def name_of(job_id: str, where: str, name: str = "") -> str:
    """The display name: `name` if it differs from the id, else the id. Static jobs have no id: all
    are called "none", as under torchrun."""
    if name not in ("", job_id):
        return name
    return f"of {where}" if job_id in ("", "none") and where else job_id


def job_cells(page: JobStatus, where: str, run: str = "") -> Row:
    """The table row of a job whose master at `where` answered. `run`: its run folder, if known."""
    row = live_row(page, where, run)
    return (
        name_of(page.job_id, where, page.name),
        row.state,
        f"{row.nodes}/{row.max_nodes}",
        str(row.step) if row.step >= 0 else "-",
        duration(page.step_age) if page.step >= 0 else "-",
        f"{row.restarts}/{page.max_restarts}",
        duration(row.age),
    )


INACTIVE: Final = ("dead", "left")
"""Node states in which the last reported activity is out of date."""


def _job_page(endpoint: Endpoint, status: JobStatus, run: str) -> JobPage:
    """All that is known of a job whose master answered, with a fresh link to its page if that
    master published its credentials on this host."""
    link = ""
    with contextlib.suppress(NoStatus):
        for one in published_here():
            same = (one.port, one.job_id) == (endpoint.port, status.job_id)
            if same and one.status_url and is_here(endpoint.host):
                link = f"{one.status_url}?key={page_key(one.operator, time.time())}"
    job = RunFolder(Path(run)).job() if run else None
    row, board = live_row(status, endpoint, run), job.tensorboard if job else ""
    return page_of(row, page=link, tensorboard=board, master=status)


def _query_of(found: UserJob, token: str, files: Tls | None) -> MasterQuery | None:
    """The query to the master of a job, here or elsewhere; None if the job has ended or no master
    is known."""
    if found.master:
        return query_to(found.master, token, files)
    if found.run is not None and found.run.state() not in ENDED:
        with contextlib.suppress(NotAnswered):
            master = master_of(found.run)
            return MasterQuery(master.endpoint, master.reader, files, str(found.run.path))
    return None


def no_job(job: str) -> str:
    """A sentence saying that no job has this name, with the nearest known name."""
    known = []
    with contextlib.suppress(OSError, NoStatus):
        runs = index.all_runs(index.runs_root(os.environ))
        known = [one.name for run in runs if (one := run.job())]
        known += [name for one in published_here() for name in (one.name, one.job_id)]
    hint = did_you_mean(job, sorted({*known} - {""}))
    return f"there is no job {job} here{hint} (for a master elsewhere, give its host:port)"


def _show_run_folder(folder: RunFolder | None, *, as_json: bool, no_reply: bool = False) -> bool:
    """Print what its run folder and backend know of a job without a known master. Returns whether
    anything was printed. `no_reply`: the job's master did not answer; then a job that should be
    running is not printed."""
    from elasticrun.jobs.backends import updated_by_backends
    from elasticrun.jobs.manage.listing import ended_job_lines

    if folder is None:
        return False
    record = folder.job()
    if record is None:
        return False
    (row,) = updated_by_backends([row_of(folder, record)], os.environ)
    if no_reply and row.state in ("waiting", "running"):
        return False
    if as_json:
        result = folder.result()
        page = page_of(row, exit_code=result.exit_code if result else None)
        print(json.dumps(msgspec.to_builtins(page), indent=1))
    else:
        print(*ended_job_lines(folder, record, row), sep="\n")
    return True


def _run_folder_lines(folder: RunFolder) -> list[str]:
    """What the run folder knows of a job whose master does not answer."""
    step, events = folder.last_step(), folder.events(time.time())
    fields = {
        "state in its run folder": folder.state(),
        "progress": folder.newest_metrics() or (f"step {step}" if step >= 0 else ""),
        "last event": f"{events[-1].text} ({duration(events[-1].age)} ago)" if events else "",
        "run folder": str(folder.place),
    }
    return [f"{name}: {plain(text)}" for name, text in fields.items() if text]


def _local_queries(token: str, files: Tls | None) -> list[MasterQuery]:
    """The queries to this user's masters on this host. Raises NoStatus if there are none."""
    masters = published_here()
    if not masters:
        with contextlib.suppress(OSError):
            if index.all_runs(index.runs_root(os.environ)):
                raise NoStatus(
                    "no job of yours runs on this host; `elasticrun list` shows those that have "
                    "ended or run elsewhere"
                )
        raise NoStatus(NO_JOBS)
    return [query_to(master, token, files) for master in masters]


# ---------------------------------------------------------------- the page


def _show(pages: Sequence[tuple[str, JobStatus]], runs: Mapping[str, str] = {}) -> None:
    """Print a line for each job; then the page of a single job, or for several why each waits.
    `runs`: their run folders, by the endpoint of the master."""
    from rich.console import Console
    from rich.text import Text

    console = Console(highlight=False, width=width())
    rows = [job_cells(page, where, runs.get(where, "")) for where, page in pages]
    drawn = lines(TITLES, rows, console.width)
    console.print(Text(drawn[0], "bold"), soft_wrap=True)
    for line in drawn[1:]:
        console.print(Text(line), soft_wrap=True)
    for line in _page(pages[0][1], console.width) if len(pages) == 1 else _brief(pages):
        console.print(Text(plain(line)), soft_wrap=True)


def _page(page: JobStatus, columns: int) -> list[str]:
    table = nodes_table(page, columns) if page.nodes else []
    rows = len(page.nodes) + 1
    facts, remarks = map(plain, _lines(page)), map(plain, [*table[rows:], *_excluded(page)])
    return ["", *wrapped_on_terminal(facts), *table[:rows], *wrapped_on_terminal(remarks)]


def _brief(pages: Sequence[tuple[str, JobStatus]]) -> list[str]:
    """A line for each of several jobs: why it waits, and the command that shows more."""
    sentences, names = [], [page.name for _, page in pages]
    for where, page in pages:
        name = name_of(page.job_id, where, page.name)
        why = f"waits: {page.reason}" if page.reason and not page.outcome else page.outcome
        one = where if name.endswith(where) or names.count(name) > 1 else name
        why = why or (f"held up: {page.verdict}" if page.verdict else "")
        sentences.append(f"{name}: {why + '; ' if why else ''}details: elasticrun status {one}")
    return ["", *sentences] if sentences else []


def _lines(page: JobStatus) -> list[str]:
    """Facts about the whole job, one sentence each."""
    low, high = page.min_nodes, page.max_nodes
    nodes = f"{low}" if low == high else f"{low} to {high}"
    placed = sum(node.group_rank >= 0 for node in page.nodes)
    number = f"round {page.round.number}" if page.round else "no round yet"
    lines = [
        f"{number}, {plural(page.world_size, 'rank')} on {plural(placed, 'node')} "
        f"(wanted: {nodes})",
        f"{plural(page.restart_count, 'restart')}, "
        f"{page.restarts_left} of {page.max_restarts} left",
    ]
    more = {
        "waits: ": page.reason,
        "last failure: ": page.last_failure,
        "": page.check,
        "snapshots: ": page.snapshot,
        "held up: ": page.verdict,
        "time: ": page.goodput,
        "outcome: ": page.outcome,
    }
    return lines + [word + value for word, value in more.items() if value]


def _excluded(page: JobStatus) -> list[str]:
    """The nodes that the job refuses, one sentence each."""
    return [
        f"excluded: {one.node} on {one.host or 'an unknown host'} ({one.kind}, "
        f"for {one.remaining:.0f} s more): {one.reason}"
        for one in page.excluded
    ]


def nodes_table(page: JobStatus, columns: int) -> list[str]:
    """A table of the nodes, then a line for each reason and health remark. Names are never wrapped.
    If the terminal is too narrow, the column of pids is omitted, then that of hosts if these equal
    the node names; --json has both."""
    titles = ("node", "host", "state", "does", "group rank", "ranks", "pids")
    rows = [titles, *map(_row, page.nodes)]
    most = [max(len(row[at]) for row in rows) for at in range(len(titles))]
    shown = list(range(len(titles)))
    named_after = all(node.node == node.host for node in page.nodes)
    for at, spare in ((6, True), (1, named_after)):
        if spare and sum(most[one] + 2 for one in shown) - 2 > columns:
            shown.remove(at)
    lines = ["  ".join(row[at].ljust(most[at]) for at in shown).rstrip() for row in rows]
    lines += [f"{node.node}: {node.reason}" for node in page.nodes if node.reason]
    lines += [f"health of {node.node}: {node.health}" for node in page.nodes if node.health]
    lines += [f"standbys of {node.node}: {node.standby}" for node in page.nodes if node.standby]
    return lines + [f"notice of {one.node}: {why}" for one in page.nodes for why in one.notices]


def _row(node: NodeStatus) -> tuple[str, ...]:
    placed = node.group_rank >= 0
    last = node.first_rank + node.local_world_size - 1
    ranks = f"{node.first_rank}" if last == node.first_rank else f"{node.first_rank}-{last}"
    pids = " ".join(map(str, node.pids[:8])) + (" ..." if len(node.pids) > 8 else "")
    return (
        node.node,
        node.host,
        node.state,
        "-" if node.state in INACTIVE else node.activity,
        str(node.group_rank) if placed else "-",
        ranks if placed else "-",
        pids or "-",
    )


# ---------------------------------------------------------------- the verb


def main(argv: Sequence[str], environ: Mapping[str, str] | None = None) -> int:
    """Run `elasticrun status`. Returns the exit code. Raises UsageError for unreadable TLS or token
    files."""
    from elasticrun.cli import trust
    from elasticrun.cli.settings import FlagValues, UsageError

    variables = trust.withdraw() if environ is None else environ
    ns = _arguments(argv, variables)
    flags = FlagValues(ns, variables)
    store = flags.text("master_store")
    if store and not ns.endpoint and not flags.is_given("rdzv_id"):
        raise UsageError("--master-store needs --rdzv-id")
    files, token = trust.tls(flags), trust.token(flags)
    here = not (ns.endpoint or store)
    try:
        is_name = bool(ns.endpoint) and ":" not in ns.endpoint
        found = find_job(ns.endpoint, newest=True) if is_name else UserJob()
        ours = _query_of(found, token, files)
        with asyncio.Runner() as runner:  # grpc.aio does not support a second loop
            if ours:
                queries = [ours]
            elif _show_run_folder(found.run, as_json=ns.json):
                return 0
            elif "/" in ns.endpoint:
                raise NoStatus(no_job(ns.endpoint))
            elif ns.endpoint:
                queries = [query_with(parse_endpoint(ns.endpoint), token, files)]
            elif store:
                where = runner.run(find_leader(store, flags.text("rdzv_id"), files))
                queries = [query_with(where, token, files)]
            else:
                queries = _local_queries(token, files)
            answers, no_reply = query_all(queries, runner)
    except (NoStatus, NotAnswered) as nothing:
        print(f"elasticrun status: {nothing}", file=sys.stderr)
        return 1
    silent = [one.sentence for one in no_reply]
    if silent and ns.endpoint and ":" not in ns.endpoint:
        if _show_run_folder(found.run, as_json=ns.json, no_reply=True):
            return 0
        if not ours:
            silent = [no_job(ns.endpoint)]
    for sentence in silent:
        print(f"elasticrun status: {sentence}", file=sys.stderr)
    if silent and found.run is not None and not ns.json:
        print(*_run_folder_lines(found.run), sep="\n")
    runs = {str(one.endpoint): one.run for one in queries}
    known = answers if ns.json or len(answers) == 1 else []  # several jobs get a table
    whole = [_job_page(where, page, runs[str(where)]) for where, page in known]
    if ns.json:
        shown = msgspec.to_builtins(whole)
        print(json.dumps(shown[0] if not here and shown else shown, indent=1))
    elif answers:
        _show([(str(where), page) for where, page in answers], runs)
        for one in whole:
            progress = RunFolder(Path(one.run)).newest_metrics() if one.run else ""
            more = {"progress": progress, "page": one.page, "tensorboard": one.tensorboard}
            for word in [word for word, value in more.items() if value]:
                print(f"{word}: {more[word]}")
    return 1 if silent else 0


def _arguments(argv: Sequence[str], environ: Mapping[str, str]) -> argparse.Namespace:
    from elasticrun.cli.flags import Parser, add_group
    from elasticrun.cli.table import FLAGS, TRUST

    parser = Parser(
        prog="elasticrun status", description="Show a job: nodes, round, ranks, restarts, reasons."
    )
    text = (
        "the job's name or a unique prefix, or its master's host:port; default: all your jobs "
        "that run on this host"
    )
    parser.add_argument("endpoint", nargs="?", default="", metavar="JOB", help=text)
    text = "json: instead of a table"
    parser.add_argument("-o", "--output", choices=("text", "json"), default="text", help=text)
    parser.add_argument("--json", action="store_true", help="the same as -o json")
    add_group(parser, "of a job that has a token or TLS", TRUST, environ)
    rows = [flag for flag in FLAGS if flag.dest in ("master_store", "rdzv_id")]
    add_group(parser, "for a job whose master is looked up in etcd", rows, environ)
    ns = parser.parse_args(argv)
    ns.json |= ns.output == "json"
    return ns
