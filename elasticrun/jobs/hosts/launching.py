"""--hosts and --hostfile: decides what starts on which host; `hosts.fleet` carries it out."""

from __future__ import annotations

import os
import re
import secrets
import shlex
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from elasticrun.cli import settings, trust
from elasticrun.cli.detection.found import port_of_name
from elasticrun.cli.flags import get_args_parser
from elasticrun.cli.rendezvous import RENDEZVOUS_FLAGS, fresh_id, job_stem, without_flags
from elasticrun.cli.settings import FlagValues, UsageError
from elasticrun.config import EXIT_OK, EXIT_USAGE
from elasticrun.jobs.hosts import fleet, hostfile, ssh

_NOT_PASSED_ON: Final = ("--hosts", "--hostfile", "--ssh", "--dry-run", "--token-file")
_OF_ONE_HOST: Final = ("standalone", "srun", "node_rank", "node_id", "local_addr")
"""Flags that apply to one host only."""

_JOB_VARIABLES: Final = re.compile(
    r"(ELASTICRUN_|PET_|PYTHON|OMP_|NCCL_|GLOO_|TORCH|GIT_SYNC_)|LOGLEVEL\Z"
)
_HOST_VARIABLES: Final = re.compile(
    r"ELASTICRUN_(TOKEN(_FILE)?|SSH|WARM_SERVER|TEST_.*)\Z|.*_(NODE_RANK|NODE_ID|LOCAL_ADDR)\Z"
)
"""Variables that are settings of the job, and the exceptions that belong to one host."""


def launch(
    words: Sequence[str],
    flags: FlagValues,
    environ: Mapping[str, str],
    notify: Callable[[str], None],
) -> int:
    """Start the job on its hosts and follow it to its end; with --dry-run, only print the commands.
    Returns the exit code. Raises UsageError."""
    plan = plan_of(words, flags, environ)
    if not flags.switch("dry_run"):
        return fleet.run(plan, notify)
    meet = fleet.rendezvous_flags(plan.hosts[0].name, plan.port) if plan.port else ()
    print(f"in the folder {os.getcwd()} of each host:")
    for host, argv in zip(plan.hosts, plan.argv, strict=True):
        print(f"{host.name}: {shlex.join(ssh.command(host, plan.ssh))}")
        print(f"{host.name}: elasticrun {shlex.join((*meet, *argv))}")
    return EXIT_OK


def plan_of(words: Sequence[str], flags: FlagValues, environ: Mapping[str, str]) -> fleet.HostsPlan:
    """What these words start on which host. Raises UsageError."""
    hosts = _hosts(flags)
    for dest in _OF_ONE_HOST:
        if flags.is_given(dest):
            raise UsageError(
                f"{flags.source(dest)} is for one host: leave it out with --hosts", EXIT_USAGE
            )
    given = flags.is_given("nnodes")
    low, high = settings.nodes(flags.text("nnodes") if given else str(len(hosts)))
    if len(hosts) < low:
        raise UsageError(
            f"--nnodes={flags.text('nnodes')} needs more hosts than the {len(hosts)} given",
            EXIT_USAGE,
        )
    named = flags.is_given("rdzv_id")
    job = flags.text("rdzv_id") if named else f"{job_stem(flags)}-{fresh_id()[:8]}"
    meets = not any(map(flags.is_given, RENDEZVOUS_FLAGS))
    common = [] if named else [f"--rdzv-id={job}"]
    common += [] if named or flags.is_given("name") else [f"--name={job_stem(flags)}"]
    common += [] if given else [f"--nnodes={len(hosts)}"]
    at = get_args_parser().script_at(words)
    behind = [*without_flags(words[:at], _NOT_PASSED_ON), *words[at:]]
    slots = not flags.is_given("nproc_per_node")
    argv = []
    for number, host in enumerate(hosts):
        own = [f"--node-rank={number}"] if number < high else []
        own += [f"--nproc-per-node={host.slots}"] if slots and host.slots else []
        argv.append((*common, *own, *behind))
    return fleet.HostsPlan(
        job=re.sub(r"[^\w.-]", "_", job)[:60],
        hosts=hosts,
        argv=tuple(argv),
        least=low,
        port=port_of_name(job) if meets else 0,
        variables={
            name: value
            for name, value in environ.items()
            if _JOB_VARIABLES.match(name) and not _HOST_VARIABLES.match(name)
        },
        ssh=_ssh(flags.text("ssh")),
        token=trust.token(flags) or secrets.token_hex(32),
    )


def _ssh(text: str) -> tuple[str, ...]:
    """The words of --ssh. Raises UsageError."""
    try:
        return tuple(shlex.split(text)) or ("ssh",)
    except ValueError as wrong:  # an unclosed quote
        raise UsageError(f"--ssh={text}: {wrong}", EXIT_USAGE) from None


def _hosts(flags: FlagValues) -> tuple[hostfile.NamedHost, ...]:
    text, path = flags.text("hosts"), flags.text("hostfile")
    if text and path:
        raise UsageError("--hosts and --hostfile exclude each other: leave one out", EXIT_USAGE)
    try:
        if not path:
            found = hostfile.parse_hosts(text)
        else:
            with open(path, encoding="utf-8") as file:
                found = hostfile.parse_hostfile(file.read(hostfile.MAX_CHARS + 1), path)
    except hostfile.HostsError as wrong:
        raise UsageError(str(wrong), EXIT_USAGE) from None
    except (OSError, UnicodeDecodeError) as wrong:
        why = wrong.strerror if isinstance(wrong, OSError) else "it is not text"
        raise UsageError(f"--hostfile={path} cannot be read: {why}", EXIT_USAGE) from None
    if not found:
        given = "--hosts" if flags.is_given("hosts") else "--hostfile"
        raise UsageError(f"{path or given} contains no host", EXIT_USAGE)
    return found
