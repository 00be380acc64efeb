"""`elasticrun status [ENDPOINT]`: the job as one page, asked of its master by gRPC.

Without an endpoint every master of this user on this host is asked; their addresses stand in the
user's run folder. Exit code 0 if each asked one answered, 1 if one did not or there is none.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Final

from elasticrun.wire.ids import Endpoint

if TYPE_CHECKING:
    from rich.table import Table

    from elasticrun.wire.messages import JobStatus, NodeStatus

ANSWER_LIMIT: Final = 5.0
"""Seconds to wait for a master; one on the other side of the world answers within one."""

DEFAULT_PORT: Final = 29400
"""torchrun's port for a rendezvous endpoint without one."""


class NoStatus(Exception):
    """Nothing can be shown; the text is a sentence."""


def print_status(endpoint: str | None, *, as_json: bool = False) -> int:
    """Print the page of the master at `endpoint` (host:port), or of all masters on this host."""
    try:
        endpoints = [parse_endpoint(endpoint)] if endpoint else _here()
    except NoStatus as nothing:
        print(f"elasticrun status: {nothing}", file=sys.stderr)
        return 1
    pages, silent = _ask(endpoints)
    for sentence in silent:
        print(f"elasticrun status: {sentence}", file=sys.stderr)
    if as_json:
        shown = [asdict(page) for page in pages]
        print(json.dumps(shown[0] if endpoint and shown else shown, indent=1))
    else:
        for page in pages:
            _show(page)
    return 1 if silent else 0


def parse_endpoint(text: str) -> Endpoint:
    """`host`, `host:port`, `[ipv6]:port` or `[ipv6]`; NoStatus if it is none of these."""
    host, colon, port = text.rpartition(":")
    if not colon or text.endswith("]"):
        host, port = text, str(DEFAULT_PORT)
    host = host.removeprefix("[").removesuffix("]")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise NoStatus(f"{text!r} is no endpoint: write host:port")
    return Endpoint(host, int(port))


def _here() -> list[Endpoint]:
    """The endpoints that masters of this user have left in the run folder."""
    from elasticrun.wire import published

    try:
        masters = published.published(published.run_folder(os.environ))
    except OSError as wrong:
        raise NoStatus(f"the run folder cannot be read: {wrong}") from None
    if not masters:
        raise NoStatus("no master of yours runs on this host: name an endpoint (host:port)")
    return [master.endpoint for master in masters]


def _ask(endpoints: list[Endpoint]) -> tuple[list[JobStatus], list[str]]:
    """The pages of those who answer, and a sentence for each who does not."""
    # Late: grpc takes longer to import than everything else here together.
    from elasticrun.wire.channel import LinkError, get_status

    async def ask_all() -> list[JobStatus | BaseException]:
        return await asyncio.gather(
            *(get_status(where, ANSWER_LIMIT) for where in endpoints), return_exceptions=True
        )

    pages: list[JobStatus] = []
    silent: list[str] = []
    for where, answer in zip(endpoints, asyncio.run(ask_all()), strict=True):
        if isinstance(answer, LinkError):
            silent.append(f"no master answers at {where}: {answer}")
        elif isinstance(answer, BaseException):
            raise answer
        else:
            pages.append(answer)
    return pages, silent


# ---------------------------------------------------------------- the page


def _show(page: JobStatus) -> None:
    from rich.console import Console
    from rich.text import Text

    console = Console(highlight=False)
    console.print(Text.assemble(("job ", "dim"), (page.job_id, "bold"), f"  {page.phase}"))
    for line in _lines(page):
        console.print(Text(line), soft_wrap=True)
    if page.nodes:
        console.print(_table(page))


def _lines(page: JobStatus) -> list[str]:
    """What is true of the job as a whole, one sentence each."""
    nodes = (
        f"{page.min_nodes}"
        if page.min_nodes == page.max_nodes
        else f"{page.min_nodes} to {page.max_nodes}"
    )
    placed = sum(node.group_rank >= 0 for node in page.nodes)
    number = f"round {page.round.number}" if page.round else "no round yet"
    lines = [
        f"{number}, {page.world_size} ranks on {placed} nodes (wanted: {nodes})",
        f"{page.restart_count} restarts, {page.restarts_left} of {page.max_restarts} left",
    ]
    if page.reason:
        lines.append(f"waits: {page.reason}")
    if page.last_failure:
        lines.append(f"last failure: {page.last_failure}")
    if page.outcome:
        lines.append(f"outcome: {page.outcome}")
    return lines


def _table(page: JobStatus) -> Table:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in ("node", "host", "state", "does", "group rank", "ranks", "pids", "reason"):
        table.add_column(title, overflow="fold")
    for node in page.nodes:
        # Text, not markup: a name may hold square brackets.
        table.add_row(*map(Text, _row(node)))
    return table


def _row(node: NodeStatus) -> tuple[str, ...]:
    placed = node.group_rank >= 0
    last = node.first_rank + node.local_world_size - 1
    ranks = f"{node.first_rank}" if last == node.first_rank else f"{node.first_rank}-{last}"
    pids = " ".join(map(str, node.pids[:8])) + (" ..." if len(node.pids) > 8 else "")
    return (
        node.node,
        node.host,
        node.state,
        node.activity,
        str(node.group_rank) if placed else "-",
        ranks if placed else "-",
        pids or "-",
        node.reason,
    )


# ---------------------------------------------------------------- the verb


def main(argv: Sequence[str]) -> int:
    """`elasticrun status` with its own arguments."""
    parser = argparse.ArgumentParser(
        prog="elasticrun status", description="Show a job: nodes, round, ranks, restarts, reasons."
    )
    parser.add_argument(
        "endpoint",
        nargs="?",
        metavar="ENDPOINT",
        help="host:port of the job's master; without it all of yours on this host",
    )
    parser.add_argument("--json", action="store_true", help="print JSON in the place of a table")
    asked = parser.parse_args(argv)
    return print_status(asked.endpoint, as_json=asked.json)
