"""The command of every node, as `elasticrun render` puts it down: read as a node will read it.

Files of the nodes (token, certificates) and their plug-ins are not here, and are not looked at.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from typing import Final, NamedTuple

from elasticrun.cli import render_flags, trust, values
from elasticrun.cli.asked import Asked
from elasticrun.cli.devices import Machine
from elasticrun.cli.flags import get_args_parser
from elasticrun.cli.resolve import resolve, shutdown_timeout
from elasticrun.render.batch import SIGNALS
from elasticrun.render.checks import Invalid
from elasticrun.render.wanted import Launch

ELSEWHERE: Final = ("token_file", "tls_cert", "tls_key", "tls_ca", "logs_specs")
"""Flags whose values are files or plug-ins of the nodes."""


class Read(NamedTuple):
    """The command, and what the user should know of it."""

    launch: Launch
    notes: list[str]


def read(ns: argparse.Namespace, program: Sequence[str], *, gpus: int, signal: str) -> Read:
    """What flags and program come to. `gpus`: GPUs that each node is asked for, 0 for none said;
    `signal`: the one by which the scheduler has nodes leave, "" for none. UsageError, Invalid."""
    low, high = values.nodes(ns.nnodes)
    given = render_flags.handed_on(ns)
    asked = Asked(get_args_parser({}).parse_args([*given, "script"]), {})
    ranks, notes = _ranks(ns.nproc_per_node, gpus)
    launch = Launch(
        script=program[0],
        args=tuple(program[1:]),
        min_nodes=low,
        max_nodes=high,
        nproc_per_node=ranks,
        job_id=values.name(ns.rdzv_id, "--rdzv-id"),
        by_etcd=bool(asked.text("master_store")),
        flags=(*given, *_heard(asked, signal), *_codes(asked)),
        leaving=float(asked.value("departure_grace")) + shutdown_timeout(asked),
    )
    if bool(asked.text("tls_cert")) != bool(asked.text("tls_key")):
        raise Invalid("--tls-cert and --tls-key belong together: give both")
    return Read(launch, [*notes, *_understood(launch)])


def gpus_in(text: str) -> int:
    """The number in Slurm's [TYPE:]N; 0 where there is none."""
    match = re.fullmatch(r"(?:[^:]*:)?(\d+)", text)
    return int(match[1]) if match else 0


def _ranks(asked: str, gpus: int) -> tuple[str, list[str]]:
    """Ranks of a node: as many as GPUs, where nobody says."""
    if not asked:
        ranks = max(gpus, 1)
        note = f"{ranks} ranks on each node, one for each GPU, as no --nproc-per-node is given"
        return str(ranks), [note] if ranks > 1 else []
    if gpus and asked.isdecimal() and int(asked) > gpus:
        return asked, [f"{asked} ranks on each node (--nproc-per-node) share its {gpus} GPU(s)"]
    return asked, []


def _heard(asked: Asked, signal: str) -> list[str]:
    """The flag without which agents would hand this signal on to the ranks, and not leave."""
    name = f"SIG{signal}"
    handled = asked.text("signals_to_handle")
    if signal not in SIGNALS or name in values.signals(handled):
        return []
    if asked.explicitly("signals_to_handle"):
        raise Invalid(
            f"--signals-to-handle={handled}: add {name}, or nodes would not save and leave when "
            "the scheduler sends it"
        )
    return [f"--signals-to-handle={handled},{name}"]


def _codes(asked: Asked) -> list[str]:
    """The flag by which a job that cannot succeed ends for its scheduler, too."""
    return [] if asked.explicitly("exit_codes") else ["--exit-codes=scheduler"]


def _understood(launch: Launch) -> list[str]:
    """Have the launcher read the command as a node will; what it has to say. Raises what it raises
    there."""
    files = tuple(f"--{dest.replace('_', '-')}=" for dest in ELSEWHERE)
    words = [f"--nnodes={launch.nodes}", f"--nproc-per-node={launch.nproc_per_node}"]
    words += [f"--rdzv-id={launch.job_id or 'id'}"]
    words += [] if launch.by_etcd else ["--rdzv-backend=c10d", "--rdzv-endpoint=head:29400"]
    words += [word for word in launch.flags if not word.startswith(files)]
    machine = Machine(lambda: 1, lambda word: 1, lambda group: ())
    ns = get_args_parser({}).parse_args([*words, *launch.program])
    # OMP_NUM_THREADS and tokens are the nodes' own: each says what it lacks when it starts.
    config = resolve(ns, {"OMP_NUM_THREADS": "1"}, machine)
    silent = trust.notes(config.rendezvous, config.spec.max_nodes, config.token, config.tls)
    return [note for note in config.notes if note not in silent]
