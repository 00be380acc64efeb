"""The verbs `suspend`, `resume`, `delete` and `exec` for submitted jobs on any backend."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final

from elasticrun.agent.logs.log_index import find_run, no_node_message, runs_of
from elasticrun.cli.flags import PROG, Parser
from elasticrun.cli.trust import withdraw
from elasticrun.config import EXIT_FAILED, EXIT_OK
from elasticrun.host.runs.claim import Claimed, claimed
from elasticrun.host.runs.index import NoRun, find, prune, runs_root
from elasticrun.host.runs.layout import ENDED, RunFolder
from elasticrun.jobs.backend import RequestFailed
from elasticrun.jobs.backends import backend_name_of, backend_of, refuse_taken_name
from elasticrun.jobs.manage.listing import add_output
from elasticrun.jobs.rows import DoneRow, as_json
from elasticrun.jobs.running.master_lookup import JOB

if TYPE_CHECKING:
    import argparse

    from elasticrun.jobs.backend import Backend

DOES: Final = {
    "suspend": "Save a job's state, stop it and free its nodes.",
    "resume": "Resume a job that was suspended or has failed, in the same run folder.",
    "delete": "End a job, if it runs, and remove its run folder.",
}


def main(verb: str, argv: Sequence[str]) -> int:
    """Run one of DOES. Returns the exit code."""
    made = Parser(prog=f"{PROG} {verb}", description=DOES[verb])
    text = "its full name, or its run folder" if verb == "delete" else JOB
    made.add_argument("job", metavar="JOB", help=text)
    add_output(made)
    if verb == "delete":
        text = "keep the run folder: only end the job"
        made.add_argument("--keep-files", action="store_true", help=text)
    ns = made.parse_args(argv)
    return exit_code_of(lambda: _run_verb(verb, ns), made.prog)


def _run_verb(verb: str, ns: argparse.Namespace) -> int:
    run = run_of(ns.job, "delete" if verb == "delete" else "")
    job, where, place = run.job(), str(run.place), backend_of(run, withdraw())
    if verb == "suspend":
        with claimed(runs_root(os.environ), job.name if job else ns.job):  # blocks a resume
            done = place.suspend(run)
    elif verb == "resume":
        done = _resume(run, place)
    else:
        done = _delete(run, place, keep=ns.keep_files)
    name = job.name if job else ns.job
    print(as_json(DoneRow(name=name, done=done, run_dir=where)) if ns.output == "json" else done)
    return EXIT_OK


def _resume(run: RunFolder, place: Backend) -> str:
    """Resume a job, unless another job that has not ended, or another verb, holds its name."""
    job, root = run.job(), runs_root(os.environ)
    if job is None or job.where == "k8s":
        return place.resume(run)
    with claimed(root, job.name):
        if run.state() in ENDED:
            refuse_taken_name(root, job.name, withdraw(), run)
        return place.resume(run)


def _delete(run: RunFolder, place: Backend, *, keep: bool) -> str:
    job = run.job()
    name = job.name if job is not None else run.path.name
    with claimed(runs_root(os.environ), name):  # blocks a concurrent resume
        place.terminate(run)
        return _remove_folder(run, name, keep=keep)


def _remove_folder(run: RunFolder, name: str, *, keep: bool) -> str:
    if keep:
        return f"job {name} is ended; its run folder stays: {run.place}"
    if run.path.is_symlink():
        whole = f"; {run.place}, which you have chosen, stays"
    else:
        whole = f", and {run.path} is removed"
    if not prune(run.path.parent, -86400.0, only={run.path}):
        raise RequestFailed(
            f"job {name} is ended, but its state is {run.state()}: its run folder {run.path} stays"
        )
    return f"job {name} is deleted{whole}"


def execute(argv: Sequence[str]) -> int:
    """Run `exec JOB [--node X] -- command`. Returns the command's exit code, 128 + N if signal N
    killed it."""
    made = exec_parser(
        "Run a command on a node of a job, in its working directory and environment.",
        "its name, its host's name, or its index; default: the first node",
    )
    ns, command = exec_words(made, argv)

    def run_it() -> int:
        run = run_of(ns.job)
        node, known, place = ns.node, runs_of(run.path), backend_name_of(run)
        if node and known and place != "ssh":  # ssh knows the hosts as the user typed them
            meant = find_run(known, node)
            if meant is None:
                raise RequestFailed(no_node_message(node, known))
            alone = len({one.node for one in known}) == 1
            node = meant.host if place == "slurm" else "" if alone else meant.node
        code = backend_of(run, withdraw()).execute(run, node, command)
        return code if code >= 0 else 128 - code  # killed by a signal: as a shell reports it

    return exit_code_of(run_it, made.prog)


def exec_parser(does: str, node: str) -> Parser:
    """The parser of `exec` for any backend. `node`: the help text of NODE there."""
    usage = f"{PROG} exec JOB [--node NODE] -- command [arguments ...]"
    made = Parser(prog=f"{PROG} exec", usage=usage, description=does)
    made.add_argument("job", metavar="JOB", help=JOB)
    made.add_argument("-i", "--node", "--instance", default="", metavar="NODE", help=node)
    return made


def exec_words(made: Parser, argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """The arguments before the first --, and the command after it."""
    at = list(argv).index("--") if "--" in argv else len(argv)
    command = list(argv[at + 1 :])
    if not command and not {"-h", "--help"} & {*argv}:
        made.error("put the command after --, as in `elasticrun exec JOB -- nvidia-smi`")
    return made.parse_args(argv[:at]), command


def run_of(job: str, whole: str = "") -> RunFolder:
    """The run folder of the named job, as `find` defines it. Raises RequestFailed."""
    try:
        return find(runs_root(os.environ), job, whole=whole)
    except (NoRun, OSError) as wrong:
        raise RequestFailed(str(wrong)) from None


def exit_code_of(do: Callable[[], int], prog: str = f"{PROG} submit") -> int:
    """The exit code of `do`. If it fails, prints a sentence and returns 1; raises OSError only if
    it cannot write to standard output."""
    try:
        return do()
    except (RequestFailed, Claimed) as why:
        print(f"{prog}: {why}", file=sys.stderr)
    except OSError as wrong:
        if not wrong.filename:  # standard output
            raise
        print(f"{prog}: {wrong.filename}: {wrong.strerror}", file=sys.stderr)
    return EXIT_FAILED
