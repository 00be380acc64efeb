"""`elasticrun doctor`: problems of this machine, and how to fix them.

With --rdzv-endpoint it also queries the job's master: whether the master can dial this host, how
far their clocks differ, and whether another node uses this host's name. A second table lists the
settings that place this node in its job, each with its source. The exit code is 1 if a check
failed, else 0.
"""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Final

from elasticrun import __version__
from elasticrun.cli import resolve, settings, trust
from elasticrun.cli.detection.found import as_int
from elasticrun.cli.flags import Parser, add_group
from elasticrun.cli.place import PLACE_FLAGS, detect_place, explain
from elasticrun.cli.settings import DetectedPlace, FlagValues, Setting, UsageError, setting
from elasticrun.cli.table import FLAGS, TRUST
from elasticrun.cli.verbs import masters
from elasticrun.cli.verbs.columns import print_table
from elasticrun.cli.verbs.masters import MasterQuery, NoStatus
from elasticrun.config import EXIT_FAILED
from elasticrun.host.doctor import checkup, disk, names
from elasticrun.host.doctor.checkup import Subject
from elasticrun.host.doctor.verdict import failed, failures, ok
from elasticrun.host.system.network import names_this_host_only
from elasticrun.wire.messages import MAX_RANKS
from elasticrun.wire.types import Finding, Level

if TYPE_CHECKING:
    from elasticrun.wire.rpc.channel import LinkError


ALWAYS: Final = ("nnodes", "nproc_per_node", "node_rank", "rdzv_id", "rdzv_endpoint")
"""Flags that are shown whenever any is, even at their defaults: a missing value is informative
too."""

_OTHERS: Final = tuple(dest for dest in PLACE_FLAGS if dest not in ALWAYS)

ROWS: Final = (*ALWAYS, *_OTHERS, "log_dir", "data", "accelerator")
"""The launcher's flags that `doctor` accepts: this node's place in its job, and what its ranks
use."""

MASTER: Final = "master"
"""The name of the check that the master answers."""

STYLES: Final = {Level.OK: "green", Level.WARNING: "yellow", Level.FAILED: "bold red"}


def main(argv: Sequence[str], environ: Mapping[str, str] | None = None) -> int:
    """Run `elasticrun doctor`. Returns the exit code. Raises UsageError for invalid settings."""
    variables = trust.withdraw() if environ is None else environ
    ns = parser(variables).parse_args(argv)
    flags = FlagValues(ns, variables)
    # Read before the scheduler fills in values: no master runs yet at a scheduler's endpoint.
    where = flags.text("rdzv_endpoint")
    master = _master(flags, where) if where else None
    place = _place(flags)
    flags = FlagValues(ns, variables, place.filled)
    subject = _subject(flags, place, ns.ckpt_dir, master)
    software, *others = asyncio.run(examine(subject, master))
    found = [software, ok("scheduler", explain(place)), *others]
    settings = _settings(FlagValues(ns, variables, {**place.shown, **place.filled}), place)
    if ns.json:
        shown = {
            "host": socket.gethostname(),
            "version": __version__,
            "findings": [asdict(finding) for finding in found],
            "settings": [one._asdict() for one in settings],
        }
        print(json.dumps(shown, indent=1))
    else:
        _show(found, settings)
    return 1 if failures(found) else 0


def parser(environ: Mapping[str, str]) -> Parser:
    """The flags of `elasticrun doctor`; most are the launcher's."""
    made = Parser(
        prog="elasticrun doctor",
        description="Check this machine, with advice for each problem.",
    )
    made.add_argument("--json", action="store_true", help="print JSON instead of a table")
    made.add_argument(
        "--ckpt-dir", "--ckpt_dir", default="", metavar="DIR",
        help="The script's checkpoint folder.",
    )  # fmt: skip
    rows = [flag for flag in FLAGS if flag.dest in ROWS]
    add_group(made, "the job", rows, environ)
    add_group(made, "for a job with a token or TLS", TRUST, environ)
    return made


def _master(flags: FlagValues, where: str) -> MasterQuery:
    try:
        return masters.query_with(
            masters.parse_endpoint(where), trust.token(flags), trust.tls(flags)
        )
    except NoStatus as wrong:
        raise UsageError(f"--rdzv-endpoint: {wrong}") from None


def _subject(
    flags: FlagValues, place: DetectedPlace, checkpoints: str, master: MasterQuery | None
) -> Subject:
    from elasticrun.cli.devices import this_machine
    from elasticrun.cli.resolve import ranks_per_node

    nproc = 0
    if flags.is_given("nproc_per_node"):
        nproc = ranks_per_node(flags, this_machine(flags.environ), [])
    nodes = _nodes(flags, place)
    alone = master is None or names_this_host_only(master.endpoint.host)
    folders = disk.folders(flags.environ, log_dir=flags.value("log_dir"), checkpoints=checkpoints)
    return Subject(
        nproc=nproc,
        ranks=min(MAX_RANKS, nodes * max(1, nproc)),
        several=nodes > 1 or not alone,
        folders=tuple(folders),
        data=settings.data(flags.text("data")),
        accelerator=resolve.accelerator(flags),
        # Checks run external tools, which need not know the job's secret.
        environ={k: v for k, v in flags.environ.items() if k != trust.TOKEN_VARIABLE},
    )


def _nodes(flags: FlagValues, place: DetectedPlace) -> int:
    """The maximum number of nodes of the job; without --nnodes, the number that the scheduler
    allocated: a bare command in a batch script is a job of one node, but the checks should cover
    the other allocated nodes too."""
    _, nodes = settings.nodes(flags.text("nnodes"))
    if flags.is_given("nnodes") or flags.switch("standalone") or place.found is None:
        return nodes
    return max(nodes, as_int(place.found.nodes))


def _place(flags: FlagValues) -> DetectedPlace:
    """Where a scheduler placed this node; explicit flags take precedence."""
    from elasticrun.cli.devices import facts, this_machine

    machine = this_machine(flags.environ)._replace(facts=lambda: facts(flags.environ))
    return detect_place(flags, machine)


def _settings(flags: FlagValues, place: DetectedPlace) -> list[Setting]:
    """The settings that place this node; empty if neither the user nor a scheduler sets any."""
    given = [dest for dest in _OTHERS if flags.is_given(dest)]
    if place.found is None and not given and not any(map(flags.is_given, ALWAYS)):
        return []
    return [setting(flags, dest) for dest in (*ALWAYS, *given)]


async def examine(subject: Subject, master: MasterQuery | None) -> list[Finding]:
    """The findings about this machine, then those about the master."""
    # Late import: grpc takes longer to import than everything else here together.
    from elasticrun.agent.runtime import in_thread

    local = asyncio.ensure_future(in_thread(lambda: checkup.run(checkup.checks(subject))))
    of_master = [] if master is None else await _master_findings(master)
    return [*await local, *of_master]


async def _master_findings(master: MasterQuery) -> list[Finding]:
    from elasticrun.agent.checkup import ask
    from elasticrun.agent.runtime import in_thread
    from elasticrun.wire import auth
    from elasticrun.wire.rpc.channel import LinkError, get_status

    where, files = master.endpoint, master.files
    try:
        answers, dialled = await ask(where, master.reader, files)
        pem = None if files is None else auth.read_pem(files)
        page = await get_status(
            where, masters.ANSWER_LIMIT, token=master.reader, tls=pem, version=__version__
        )
    except LinkError as wrong:
        return [await _no_answer(master, wrong)]
    except auth.TlsError as wrong:
        raise UsageError(str(wrong), EXIT_FAILED) from None
    except OSError as wrong:
        todo = "free some ports of this host, or raise ulimit -n"
        return [failed("ports", f"no port can be opened here: {wrong.strerror}", todo)]
    return [
        ok(MASTER, f"the master of job {page.job_id!r} answers at {where}"),
        *checkup.reachability(answers, dialled),
        *await in_thread(
            lambda: names.duplicate_name(page, (socket.gethostname(), socket.getfqdn()))
        ),
    ]


async def _no_answer(master: MasterQuery, wrong: LinkError) -> Finding:
    """The finding about a master that does not answer or refuses, such as for TLS on one side
    only."""
    from elasticrun.agent.link.answering import PortAnswer, probe

    where = master.endpoint
    if wrong.rejected:
        todo = "check --rdzv-endpoint and the token"
        return failed(MASTER, f"the master at {where} refuses to answer: {wrong}", todo)
    answer, why = await probe(where, masters.ANSWER_LIMIT, master.files)
    if answer is PortAnswer.INSECURE:
        todo = "use the same --tls-ca, --tls-cert and --tls-key as the job's nodes, or none"
        return failed(MASTER, f"the master at {where} refuses to answer: {why}", todo)
    todo = "check --rdzv-endpoint, and that the job runs"
    return failed(MASTER, f"the master at {where} does not answer: {wrong}", todo)


# ---------------------------------------------------------------- the table


def _show(findings: Sequence[Finding], settings: Sequence[Setting]) -> None:
    from rich.text import Text

    # Text, not markup: findings may contain square brackets.
    rows = [
        [
            Text(one.state.value, style=STYLES[one.state]),
            *map(Text, (one.check, one.seen, one.todo)),
        ]
        for one in findings
    ]
    print_table(("state", "check", "seen", "what to do"), rows)
    if settings:
        print()
        print_table(("setting", "value", "source"), [tuple(map(Text, one)) for one in settings])
    counts = [(state, sum(f.state is state for f in findings)) for state in Level]
    words = ", ".join(f"{count} {state.value}" for state, count in counts)
    print(f"\n{socket.gethostname()}, elasticrun {__version__}: {words}")
