"""`elasticrun submit ... -- train.py`: starts a job that outlives this terminal, on this host, over
ssh, in Slurm or in Kubernetes.

It first validates everything as the launcher does, and only then creates anything.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
import secrets
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final

from msgspec.structs import replace

from elasticrun.cli import settings
from elasticrun.cli.devices import shared_folder, this_machine
from elasticrun.cli.flags import PROG, Parser, add_group, get_args_parser
from elasticrun.cli.resolve import entry_of, resolve
from elasticrun.cli.settings import FlagValues, NotHere, UsageError
from elasticrun.cli.settings_file.find import for_verb, use
from elasticrun.cli.table import FLAGS
from elasticrun.cli.trust import GIT_SECRETS, TOKEN_VARIABLE, withdraw
from elasticrun.config import ELASTIC_RESTARTS, EXIT_FAILED, EXIT_OK, EXIT_USAGE
from elasticrun.host.runs.claim import claimed
from elasticrun.host.runs.index import all_runs, make_run, prune, run_path, runs_root
from elasticrun.host.runs.layout import CONSOLE, ENDED, RESULT, JobRecord, RunFolder, RunResult
from elasticrun.host.runs.opening import RankProgram, RunRefused, already_succeeded, archive
from elasticrun.host.system.processes import user_name
from elasticrun.jobs import backends
from elasticrun.jobs.backend import (
    TOKEN,
    RequestFailed,
    Submission,
    Target,
    make_token,
    write_submission,
)
from elasticrun.jobs.cluster.submit import kubernetes_submission
from elasticrun.jobs.kubernetes import record_replaced
from elasticrun.jobs.local import rendezvous_flags, starter_fields
from elasticrun.jobs.manage import arena
from elasticrun.jobs.manage.code import pinned
from elasticrun.jobs.manage.jobs import exit_code_of
from elasticrun.jobs.render import checks, slurm
from elasticrun.jobs.render.checks import Invalid
from elasticrun.jobs.rows import DoneRow, as_json
from elasticrun.jobs.verbs import render, render_flags
from elasticrun.wire.env import ON

SAVE_FLAG: Final = "--save-at-breakpoint"
"""Every submitted job has this flag, so `elasticrun stop` saves before it ends a job."""

REDIRECT_FLAG: Final = "--redirects=3"
"""Default: ranks print only to their own files, because nobody watches a terminal."""

USAGE: Final = f"write `{PROG} submit [flags] -- train.py [its arguments]`"

HOSTS_FLAGS: Final = ("hosts", "hostfile", "ssh")
"""Launcher flags that `submit` accepts only with --on ssh."""

Submitter = Callable[
    [argparse.Namespace, Sequence[str], Path, Callable[[str], None]], tuple[Submission, Target]
]
"""Reads the command line for one backend: arguments, program, run folder, and a function that
prints notes."""


def main(words: Sequence[str], notify: Callable[[str], None]) -> int:
    """Run `submit`. `notify` prints notes for the user. Returns the exit code. Raises
    UsageError."""
    try:
        typed = render.split_at_dashes(words)[0]
        on, hosts = _read_placement(typed)
        file = for_verb(typed, {} if on == "k8s" else os.environ, notify)
        hosts = hosts or (file is not None and not {"hosts", "hostfile"}.isdisjoint(file.found))
        where = backends.choose_backend(on, os.environ, hosts=hosts)
        flags, program = render.split_at_dashes(arena.translate(words, where, notify))
        made = parser(where)
        ns, extra = made.parse_known_args(use(file, flags, made, notify))
        _with_restarts(ns)
        if extra:
            _refuse(extra, made, where)
        if program and program[0].startswith("-"):
            raise Invalid(f"{program[0]} comes after --, where the script belongs: {USAGE}")
        if not program:
            raise Invalid(f"nothing to run: put the script after --; {USAGE}")
        if ns.rdzv_id and where != "slurm":
            raise Invalid("--rdzv-id: nodes of a submitted job find each other by its --name")
        submission = _SUBMISSIONS[where]
        return exit_code_of(lambda: _submit(where, ns, program, submission, notify))
    except RunRefused as other:
        raise UsageError(str(other), EXIT_FAILED) from None
    except (Invalid, UsageError, RequestFailed) as wrong:
        code = EXIT_FAILED if isinstance(wrong, NotHere) else EXIT_USAGE
        raise UsageError(str(wrong), code) from None


def _with_restarts(ns: argparse.Namespace) -> None:
    """Give the job a default restart budget, because nobody watches it."""
    flag = next(flag for flag in FLAGS if flag.dest == "max_restarts")
    if flag.dest not in ns.given and not flag.variable_in(os.environ):
        ns.max_restarts, ns.given = ELASTIC_RESTARTS, {**ns.given, "max_restarts": "submit"}


def _refuse(extra: Sequence[str], made: Parser, where: str) -> None:
    """Raise Invalid for the first unknown word before --."""
    word = extra[0].partition("=")[0]
    theirs = [one for one in backends.PLACES if word in parser(one)._option_string_actions]
    if theirs:
        raise Invalid(f"{word} is for --on {' or '.join(theirs)}, not for --on {where}")
    render.refuse_extra(extra, made, where)


def _read_placement(flags: Sequence[str]) -> tuple[str, bool]:
    """The value of --on ("" if absent), and whether hosts are named. Read first, because the parser
    depends on both."""
    first = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    for flag in ("--on", "--hosts", "--hostfile"):
        first.add_argument(flag, default="")
    try:
        found = first.parse_known_args(list(flags))[0]
    except argparse.ArgumentError:
        return "", False
    return str(found.on), bool(found.hosts or found.hostfile)


def parser(where: str) -> Parser:
    """The parser for one backend: its options, and the launcher's flags."""
    made = Parser(
        prog=f"{PROG} submit",
        usage=f"{PROG} submit [--on local|ssh|slurm|k8s] [options] -- script [arguments ...]",
        description="Start a job that outlives this terminal: on this host, over ssh, in Slurm "
        "or in Kubernetes. With --on, this page shows the flags of that backend.",
        epilog="Flags of the launcher (see elasticrun --help-all) are passed to every node.",
        allow_abbrev=False,
    )
    text = f"Where to run it. [default: ${ON}, else local]"
    made.add_argument("--on", choices=(*backends.PLACES, "kubernetes"), default="", help=text)
    if where != "k8s":
        text = "The job's run folder. [default: a new one; with Slurm on a shared disk]"
        made.add_argument("--run-dir", "--run_dir", metavar="DIR", default="", help=text)
    text = "json: what was created, for programs"
    made.add_argument("-o", "--output", choices=("text", "json"), default="text", help=text)
    render_flags.add_job(made, script=True)
    if where == "slurm":
        render_flags.add_slurm(made)
    elif where == "k8s":
        render_flags.add_pods(made)
        text = "Context in the kubeconfig. [default: the current one]"
        made.add_argument("--context", metavar="NAME", default="", help=text)
        text = "Create an Indexed Job even if the cluster has ElasticJobs."
        made.add_argument("--plain", action="store_true", help=text)
    elif where == "ssh":
        rows = [flag for flag in FLAGS if flag.dest in HOSTS_FLAGS]
        add_group(made, "the hosts", rows, os.environ)
    if where == "k8s":
        made.set_defaults(fresh=False)  # a pod that starts later would start the job over
        render_flags.add_launcher_flags(made, ("fresh",))
        return made
    text = "With --run-dir: start over; existing files move to previous/."
    made.add_argument("--fresh", action="store_true", help=text)
    render_flags.add_launcher_flags(made, ("run_dir", "fresh"))
    return made


def _submit(
    where: str,
    ns: argparse.Namespace,
    program: Sequence[str],
    submission: Submitter,
    notify: Callable[[str], None],
) -> int:
    root = runs_root(os.environ)
    ns.name = settings.job_name(ns.name, Path(program[0]).name.removesuffix(".py"))
    here = where != "k8s"  # run folder and working directory are on this host; else in the pods
    at = Path(ns.run_dir).absolute() if here and ns.run_dir else None
    ns.launch_id = (RunFolder(at).id if at else "") or secrets.token_hex(4)
    run = RunFolder(at or run_path(root, ns.name, ns.launch_id))
    if here and ns.working_dir:
        try:
            os.chdir(ns.working_dir)
        except OSError as wrong:
            raise RequestFailed(f"--working-dir={ns.working_dir}: {wrong.strerror}") from None
    if ns.git:
        ns.git = pinned(ns.git, withdraw(*GIT_SECRETS))
    if at and not ns.fresh and (message := _already_succeeded(at, ns, program)):
        if ns.output == "json":
            _print(ns, run, where, message)
        else:
            notify(message)
        return EXIT_OK
    known, place = submission(ns, program, run.path, notify)
    if not here:  # the cluster rejects a name in use
        message = _start(run, ns, known, place, root)
        record_replaced(all_runs(root), run)
    else:
        with claimed(root, ns.name), claimed(root, str(run.path)):
            if run.job() is not None and run.state() not in ENDED:
                raise RequestFailed(
                    f"another job runs in {run.path}: choose another folder (--run-dir)"
                )
            backends.refuse_taken_name(root, ns.name, withdraw())
            message = _start(run, ns, known, place, root)
    _print(ns, run, where, message)
    return EXIT_OK


def _already_succeeded(at: Path, ns: argparse.Namespace, program: Sequence[str]) -> str:
    """The message if this program has already succeeded in its run folder. Raises RunRefused,
    UsageError."""
    words = [*render_flags.launcher_words(ns), *program]
    entry = entry_of(FlagValues(get_args_parser().parse_args(words), os.environ))
    return already_succeeded(at, RankProgram(entry.words(), os.getcwd()))


def _start(
    run: RunFolder, ns: argparse.Namespace, known: Submission, place: Target, root: Path
) -> str:
    """Create the run folder and submit. Returns the backend's sentence. Raises RequestFailed."""
    here = known.on != "k8s"
    try:
        make_run(root, ns.name, ns.launch_id, run.path)
        if here and ns.fresh:
            archive(run.path)
        (run.path / RESULT).unlink(missing_ok=True)
        write_submission(run, replace(known, **starter_fields()))
        run.write_job(_record(known, ns))
        if known.on == "slurm":
            make_token(run)
    except OSError as wrong:
        if not (here and ns.run_dir):
            shutil.rmtree(run.path, ignore_errors=True)
        raise RequestFailed(
            f"the run folder {run.path} cannot be created: {wrong.strerror}"
        ) from None
    try:
        return place.submit(run, known)
    except RequestFailed as why:
        _discard(run, str(why), fresh=not (here and ns.run_dir))
        raise


def _discard(run: RunFolder, why: str, *, fresh: bool) -> None:
    """Record a job that its backend rejected as failed, so that its name is free again, and remove
    its run folder if it is `fresh`."""
    with contextlib.suppress(OSError):
        ended = RunResult(state="failed", exit_code=EXIT_FAILED, reason=why, ended=time.time())
        run.write_result(ended)
        if fresh:
            prune(run.path.parent, -86400.0, only={run.path})


def _local_submission(
    ns: argparse.Namespace, program: Sequence[str], run: Path, notify: Callable[[str], None]
) -> tuple[Submission, Target]:
    """Read the arguments as the launcher on this host will. Raises UsageError."""
    from elasticrun.cli.main import check_data, check_program

    environ = withdraw()
    low, high = settings.nodes(ns.nnodes, ns.given.get("nnodes", ""))
    env = render.env(ns)
    for key, value in env.items():
        checks.setting(key, value, "run folder", "export it for this command, or use --token-file")
    flags = render_flags.launcher_words(ns)
    flags += [f"--nproc-per-node={ns.nproc_per_node}"] if ns.nproc_per_node else []
    flags += [REDIRECT_FLAG] if _redirects_to_files(ns) else []
    known = Submission(
        name=ns.name,
        on="local",
        host=os.uname().nodename,
        flags=tuple(dict.fromkeys((*flags, SAVE_FLAG))),
        program=tuple(program),
        workdir=os.getcwd(),
        env=env,
        min_nodes=low,
        max_nodes=high,
    )
    seen = {**environ, **known.env}
    words = [*rendezvous_flags(known, "node0", 29400), *known.flags, *program]
    found = resolve(get_args_parser(seen).parse_args(words), seen, this_machine(seen, notify))
    check_data(settings.data(ns.data))
    hint = "" if ns.git else check_program(found.launch.entry)  # the code is not checked out yet
    for note in (*found.notes, hint):
        if note and not (high > 1 and TOKEN_VARIABLE in note):
            notify(note)
    gpus = _gpus(seen) if high > 1 else ()
    if gpus and len(gpus) < high:
        raise UsageError(
            f"--nodes={ns.nnodes}: nodes on one host share its GPUs, and it has {len(gpus)}",
            EXIT_USAGE,
        )
    return replace(known, gpus=gpus), backends.backend("local", environ)


def _hosts_submission(
    ns: argparse.Namespace, program: Sequence[str], run: Path, notify: Callable[[str], None]
) -> tuple[Submission, Target]:
    """Read the arguments as the launcher reads --hosts. Raises UsageError."""
    from elasticrun.jobs.hosts.launching import plan_of
    from elasticrun.jobs.hosts.ssh import is_here

    environ = withdraw()
    flags = render_flags.launcher_words(ns)
    flags += [f"--nproc-per-node={ns.nproc_per_node}"] if ns.nproc_per_node else []
    flags += [f"--nnodes={ns.nnodes}"] if ns.nnodes != "1" else []
    flags += [f"--{dest}={value}" for dest in HOSTS_FLAGS if (value := getattr(ns, dest))]
    words = [*flags, f"--rdzv-id={ns.name}", SAVE_FLAG, *program]
    seen = {**environ, **render.env(ns)}
    plan = plan_of(words, FlagValues(get_args_parser(seen).parse_args(words), seen), seen)
    if not all(map(is_here, plan.hosts)) and not shared_folder(str(run.parent), os.environ):
        notify(_not_shared(run.parent, "hosts"))
    known = Submission(
        name=ns.name,
        on="ssh",
        host=os.uname().nodename,
        flags=tuple(dict.fromkeys((*flags, SAVE_FLAG))),
        program=tuple(program),
        workdir=os.getcwd(),
        env=render.env(ns),
        min_nodes=plan.least,
        max_nodes=len(plan.hosts),
        hosts=tuple(host.for_ssh for host in plan.hosts),
        ssh=plan.ssh,
    )
    return known, backends.backend("ssh", environ)


def _redirects_to_files(ns: argparse.Namespace) -> bool:
    return not {"tee", "redirects", "logs_specs"} & set(ns.given)


def _not_shared(folder: Path, who: str) -> str:
    return (
        f"{folder} is not on a known network file system: if the {who} do not share it, "
        "use --run-dir with a folder that they share"
    )


def _gpus(environ: Mapping[str, str]) -> tuple[str, ...]:
    """This host's GPUs, as CUDA_VISIBLE_DEVICES names them."""
    from elasticrun.host.accelerators.nvidia import Nvidia

    count, listed = Nvidia().count(environ), environ.get(Nvidia.visible_variable)
    if listed:
        return tuple(listed.split(",")[:count])
    return tuple(map(str, range(count or 0)))


def _slurm_submission(
    ns: argparse.Namespace, program: Sequence[str], run: Path, notify: Callable[[str], None]
) -> tuple[Submission, Target]:
    """Read the arguments as `render slurm` does; nodes find the run folder by its path. Raises
    UsageError, Invalid."""
    if ns.array:
        raise Invalid("--array: submit creates one job; `elasticrun render slurm` supports arrays")
    filled = argparse.Namespace(**{**vars(ns), "output": str(run / CONSOLE), "run_dir": str(run)})
    given = dict.fromkeys(("run_dir", "save_at_breakpoint"), "")
    filled.save_at_breakpoint = True
    if "token_file" not in ns.given:
        filled.token_file, given["token_file"] = str(run / TOKEN), ""
    if _redirects_to_files(ns):
        filled.redirects, given["redirects"] = REDIRECT_FLAG.partition("=")[2], ""
    filled.given = {**ns.given, **given}
    batch, notes = render.batch_of(filled, program)
    command = batch.launch
    named = dataclasses.replace(command, flags=(*command.flags, f"--name={ns.name}"))
    for note in notes:
        notify(note)
    if not shared_folder(str(run.parent), os.environ):
        notify(_not_shared(run.parent, "nodes"))
    known = Submission(
        name=ns.name,
        on="slurm",
        flags=named.flags,
        program=tuple(program),
        workdir=os.getcwd(),
        min_nodes=command.min_nodes,
        max_nodes=command.max_nodes,
        script=slurm.script(dataclasses.replace(batch, launch=named)),
    )
    return known, backends.backend("slurm", withdraw())


_SUBMISSIONS: Final[Mapping[str, Submitter]] = {
    "local": _local_submission,
    "ssh": _hosts_submission,
    "slurm": _slurm_submission,
    "k8s": kubernetes_submission,
}


def _record(known: Submission, ns: argparse.Namespace) -> JobRecord:
    """The record of a job that has not begun."""
    low, high = known.min_nodes, known.max_nodes
    return JobRecord(
        name=known.name,
        id=known.name,
        user=user_name(),
        host=os.uname().nodename,
        began=time.time(),
        command=(PROG, *known.flags, *known.program),
        workdir=known.workdir,
        git_commit=ns.git.rpartition("@")[2],
        where=known.on,
        nodes=f"{low}:{high}",
        nproc=ns.nproc_per_node,
        launch=ns.launch_id,
    )


def _print(ns: argparse.Namespace, run: RunFolder, where: str, sentence: str) -> None:
    name = ns.name
    if ns.output == "json":
        print(as_json(DoneRow(name=name, done=sentence, run_dir=str(run.path), on=where)))
        return
    print(f"{sentence}; run folder: {run.path}")
    print(f"its output: {PROG} logs {name} -f")
    print(f"its status: {PROG} status {name}")
