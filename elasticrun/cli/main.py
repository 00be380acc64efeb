"""The command: a verb, or a script to run as ranks.

Every error is one sentence. The script is checked before anything is started.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import ModuleType
from typing import Any, Final

from elasticrun.cli import settings
from elasticrun.cli.flags import PROG, get_args_parser, write_last_word
from elasticrun.cli.settings import FlagValues, NoProgram, NotHere, NothingToDo, UsageError
from elasticrun.cli.trust import GIT_SECRETS, notes, withdraw
from elasticrun.config import EXIT_FAILED, EXIT_OK, EXIT_USAGE, Launch, Place
from elasticrun.core.words import did_you_mean
from elasticrun.wire import debugger
from elasticrun.wire.types import EntryKind, Entrypoint


def check_program(entry: Entrypoint) -> str:
    """Raise `NoProgram` if the program cannot run here; else return a hint for the user, or "".

    Modules are not checked: finding one may import its packages.
    """
    if entry.kind in (EntryKind.SCRIPT, EntryKind.RUN_PATH):
        return _check_script(entry.target)
    if entry.kind is not EntryKind.COMMAND:
        return ""
    import shutil

    if shutil.which(entry.target) is None:
        if os.path.isfile(entry.target):
            raise NoProgram(
                f"{entry.target} is not executable: run chmod +x, or leave out --no-python"
            )
        raise NoProgram(f"there is no program {entry.target} to run (--no-python)")
    return ""


def _check_script(path: str) -> str:
    if path == "-":  # python reads it from standard input
        return ""
    if not os.path.exists(path):
        module = path.replace(".", "_").isidentifier() and not path.endswith(".py")
        hint = "; for a module use -m" if module else ""
        raise NoProgram(f"there is no script {path} (from {os.getcwd()}){hint}")
    if os.path.isdir(path):
        if not os.path.exists(os.path.join(path, "__main__.py")):
            raise NoProgram(f"{path} is a folder without __main__.py, not a script")
        return ""
    try:
        with open(path, "rb") as file:
            start = file.read(256)
    except OSError as error:
        raise NoProgram(f"the script {path} cannot be read: {error.strerror}") from None
    if start.startswith(b"\x7fELF"):
        raise NoProgram(f"{path} is a program, not a Python script: add --no-python")
    if start.startswith(b"#!") and b"python" not in (first := start.splitlines()[0]):
        program = first[2:].decode(errors="replace").strip()
        return f"{path} is meant for {program}; if it is not Python, add --no-python"
    return ""


def check_data(folders: Mapping[str, str]) -> None:
    """Raise `NotHere` if a folder of --data does not exist or cannot be read on this host.
    `folders`: paths by name."""
    for name, path in folders.items():
        if not os.path.isdir(path):
            what = "is not a folder" if os.path.exists(path) else "does not exist"
        elif not os.access(path, os.R_OK | os.X_OK):
            what = "is not readable"
        else:
            continue
        raise NotHere(f"--data={name}:{path}: {path} {what} on this host ({os.uname().nodename})")


READ_VERBS: Final = ("stacks", "top", "events", "incidents")
ORDER_VERBS: Final = ("stop", "restart", "exclude", "include", "scale")
SUBMITTED_VERBS: Final = ("suspend", "resume", "delete")
CLUSTER_VERBS: Final = (
    *("list", "status", "logs", "exec"),
    *SUBMITTED_VERBS,
    *READ_VERBS,
    *ORDER_VERBS,
)
"""Verbs that also work for jobs in Kubernetes."""

_VERB_MODULES: Final = {
    "doctor": "cli.verbs.doctor",
    "replay": "cli.verbs.replay",
    "warm": "cli.verbs.warm",
    "demo": "testing.demo.show",
    "join": "jobs.hosts.join",
    "status": "jobs.running.status",
    "logs": "jobs.running.logs",
    "top": "jobs.running.top",
    "stacks": "jobs.running.listing:stacks",
    "events": "jobs.running.listing:events",
    "incidents": "jobs.running.incidents",
    "ckpt": "jobs.running.checkpoints",
    "list": "jobs.manage.listing",
    "prune": "jobs.manage.listing:prune",
    "submit": "jobs.manage.submit",
    "exec": "jobs.manage.jobs:execute",
    "render": "jobs.verbs.render",
    "convert": "jobs.verbs.convert",
    "operator": "jobs.verbs.operator",
    "completion": "jobs.verbs.completion",
    "shim": "jobs.verbs.shim",
    **dict.fromkeys(ORDER_VERBS, "jobs.running.orders"),
    **dict.fromkeys(SUBMITTED_VERBS, "jobs.manage.jobs"),
}
"""The module of each verb, imported when it is used, and the function's name if it is not `main`.
Outside `elasticrun/jobs`, only this table and calls of `_module` refer to modules of that folder;
likewise for `elasticrun/testing`."""

_WITH_NOTIFY: Final = ("submit", "render", "convert", "warm", "join", "shim")
"""Verbs whose functions take `notify`, which prints a line for the user."""

VERBS: Final = ("master", *_VERB_MODULES)
"""All verbs. A verb as the first word is not the name of a script, unless `verb_of` finds one."""

OTHER_TOOLS_VERBS: Final = {
    **dict.fromkeys(("ls", "ps", "jobs", "queue"), "list"),
    **dict.fromkeys(("get", "describe", "info"), "status"),
    **dict.fromkeys(("cancel", "kill", "down"), "stop"),
    "rm": "delete",
    "attach": "exec",
    "run": "submit",
    "log": "logs",
    "dump": "stacks",
}
"""Other tools' names for the verbs."""


def verb_hint(word: str) -> str:
    """A hint that ends an error message, if the word is another tool's verb; else ""."""
    return f"; did you mean {OTHER_TOOLS_VERBS[word]}?" if word in OTHER_TOOLS_VERBS else ""


SIGPIPE_EXIT: Final = 128 + 13
"""The exit code if the reader of standard output has exited, as a shell reports SIGPIPE (13)."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line (default: sys.argv) and return the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    verb = verb_of(words)
    if os.getpid() == 1:
        _handle_signals()
    try:
        return _dispatch(verb, words)
    except UsageError as error:
        mistyped = isinstance(error, NoProgram) and not words[0].startswith("-")
        hint = (verb_hint(words[0]) or did_you_mean(words[0], VERBS)) if mistyped else ""
        notify(f"error: {error}{hint}")
        if not verb:
            write_last_word(f"{error}{hint}")
        return EXIT_USAGE if hint else error.exit_code
    except KeyboardInterrupt:  # before the agent has installed its handler
        return 130


def _dispatch(verb: str, words: Sequence[str]) -> int:
    try:
        if verb == "master":
            return _master(words[1:])
        if words[:2] == ["top", "node"]:  # kubectl and Arena accept both
            words = ["top", "nodes", *words[2:]]
        return _verb(verb, words[1:]) if verb else _launch(words)
    except SystemExit as end:  # argparse has printed help
        if end.code or not (code := _run_printing(lambda: EXIT_OK)):
            raise
        return code


def _handle_signals() -> None:
    """Install signal handlers that raise SystemExit, until the agent installs its own, which may
    take seconds on a slow disk. Process 1 of a container needs them because the kernel ignores
    signals to it that have no handler; a process that fetches code, because it has to clean up."""
    import signal

    def leave(number: int, _frame: object) -> None:
        raise SystemExit(128 + number)

    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGINT):
        if signal.getsignal(number) == signal.SIG_DFL:
            signal.signal(number, leave)


def verb_of(words: Sequence[str]) -> str:
    """The verb that a command line begins with, "" for none. A file of that name is a script, and
    so is a folder that Python can run; other folders, such as `logs`, are not."""
    if not words or words[0] not in VERBS:
        return ""
    name = words[0]
    if os.path.isdir(name) and not os.path.lexists(os.path.join(name, "__main__.py")):
        return name
    return "" if os.path.lexists(name) else name


def notify(sentence: str) -> None:
    """Print one line for the user on standard error; a full disk or a closed pipe there is
    ignored."""
    if sys.stderr is None:  # the caller has closed it
        return
    with contextlib.suppress(OSError):
        sys.stderr.write(f"{PROG}: {sentence}\n")
        sys.stderr.flush()


def _launch(words: Sequence[str]) -> int:
    from elasticrun.cli.settings_file.find import for_launch

    ns = get_args_parser().parse_args(words)
    try:
        words, ns = for_launch(words, ns, notify)
        return _run(words, ns)
    except UsageError as error:
        if ns.exit_codes == "scheduler":
            error.exit_code = error.for_scheduler
        raise


def _run(words: Sequence[str], ns: argparse.Namespace) -> int:
    from elasticrun.cli.devices import facts, this_machine
    from elasticrun.cli.resolve import resolve

    environ = withdraw(*(GIT_SECRETS if ns.git else ()))
    if ns.git:
        code = _module("jobs.manage.code")
        _handle_signals()
        words = code.with_commit(words, ns, environ)
    if ns.srun:
        from elasticrun.cli.place import become_srun

        return _run_printing(lambda: become_srun(words, ns.dry_run, environ, notify))
    flags = FlagValues(ns, environ)
    if flags.is_given("hosts") or flags.is_given("hostfile"):  # perhaps as an empty text
        launching = _module("jobs.hosts.launching")
        launched: int = launching.launch(words, flags, environ, notify)
        return launched
    machine = this_machine(notify=notify)._replace(
        facts=lambda: facts(environ), debugged=debugger.is_following()
    )
    try:
        found = resolve(ns, environ, machine, (PROG, *words))
    except NothingToDo as why:
        notify(str(why))
        return EXIT_OK
    done = _already_succeeded(found.launch)
    if ns.dry_run:
        from elasticrun.cli.place import detect_place
        from elasticrun.cli.verbs.dry_run import show

        if done:
            notify(done)
        return _run_printing(
            lambda: show(found, ns, environ, detect_place(FlagValues(ns, environ), machine))
        )
    if done:
        notify(done)
        return EXIT_OK
    check_data(settings.data(ns.data))
    if ns.git:
        code.enter(ns.git, environ, notify)
    hint = _check_or_defer(found.launch)
    for note in (*found.notes, hint):
        if note:
            notify(note)
    if found.delegate:
        return _exec_torchrun(found.delegate, words, ns)
    from elasticrun.agent.main import run

    return run(found.launch, found.place, found.identity)


def _already_succeeded(launch: Launch) -> str:
    """The message if this program has already succeeded in its run folder, else "". In a job of
    several nodes, a node that may host the master does not check: its master reports it to nodes
    that may lack the folder. Raises UsageError if another program has succeeded there."""
    plan = launch.master.run
    alone = launch.spec.max_nodes == 1 or launch.node_rank > 0
    if not plan.folder or plan.fresh or not alone:
        return ""
    from pathlib import Path

    from elasticrun.host.runs.opening import RankProgram, RunRefused, already_succeeded

    try:
        return already_succeeded(
            Path(plan.folder).absolute(),
            RankProgram(launch.entry.words(), plan.workdir or os.getcwd()),
        )
    except RunRefused as other:
        raise UsageError(str(other), EXIT_FAILED) from None


def _check_or_defer(launch: Launch) -> str:
    """Raise UsageError if the program cannot run, else return a hint or "". With several nodes,
    return the error and let the rank fail: then the job ends everywhere, instead of waiting for
    this node."""
    try:
        return check_program(launch.entry)
    except UsageError as error:
        if launch.spec.max_nodes == 1:
            raise
        return str(error)


def _exec_torchrun(plugin: str, words: Sequence[str], ns: argparse.Namespace) -> int:
    """Replace this process with torchrun, which alone supports rendezvous plug-ins. Never returns;
    raises UsageError if torchrun cannot be started. The `--` prevents torchrun from parsing the
    script's words as abbreviated flags."""
    from elasticrun.cli.flags import torchrun_variables
    from elasticrun.cli.rendezvous import without_flags

    notify(f"--rdzv-backend={plugin} is a torchrun plug-in: handing over to torchrun")
    os.environ.update(torchrun_variables(os.environ))
    # -P, because the console script torchrun has no working directory on its path either
    command = [sys.executable, "-P", "-m", "torch.distributed.run"]
    ours = [word for word in words[: get_args_parser().script_at(words)] if word != "--"]
    ours = without_flags(ours, ("--no-config",))
    command += [*ours, "--", ns.training_script, *ns.training_script_args]
    try:
        os.execv(command[0], command)
    except OSError as error:
        why = f"torchrun cannot be started: {error.strerror}"
        raise UsageError(why, EXIT_FAILED) from None


def _master(words: Sequence[str]) -> int:
    from elasticrun.cli.verbs.master import configure

    config = configure(words, withdraw())
    where, ours = Place("elastic", config.host, config.port), config.identity
    for note in notes(where, config.spec.max_nodes if config.spec else 0, ours.token, ours.tls):
        notify(note)
    from elasticrun.master.main import main as run_master

    return run_master(config)


def _verb(verb: str, words: Sequence[str]) -> int:
    """Run a verb, on this host or for a cluster. Returns the exit code."""
    if verb in CLUSTER_VERBS:
        words, run_there = _module("jobs.placing").resolve_verb(verb, words, notify)
        if run_there is not None:
            return (_run_piped if verb == "exec" else _run_printing)(run_there)
    run = _function_of(verb)
    if verb in ("operator", "shim") or (verb == "join" and "--new" not in words):
        return run(words)
    if verb == "exec" or (verb == "warm" and "--list" not in words):
        return _run_piped(lambda: run(words))
    return _run_printing(lambda: run(words))


def _module(name: str) -> ModuleType:
    """A module of this package, imported by name: the launcher also runs without `elasticrun/jobs`.
    Raises UsageError if that folder is not installed."""
    try:
        return importlib.import_module(f"elasticrun.{name}")
    except ModuleNotFoundError as missing:
        if missing.name not in ("elasticrun.jobs", f"elasticrun.{name}"):
            raise
        why = "this installation has no elasticrun.jobs: reinstall elasticrun"
        raise UsageError(why, EXIT_FAILED) from None


def _function_of(verb: str) -> Callable[[Sequence[str]], int]:
    """The function that runs the verb; its argument is the verb's words."""
    module, _, name = _VERB_MODULES[verb].partition(":")
    does = getattr(_module(module), name or "main")
    if verb in (*ORDER_VERBS, *SUBMITTED_VERBS):
        return partial(does, verb)
    more: dict[str, Any] = {"notify": notify} if verb in _WITH_NOTIFY else {}
    more |= {"verbs": VERBS, "run": _verb} if verb == "completion" else {}
    more |= {"launch": _launch} if verb == "join" else {}
    return partial(does, **more)


def _run_printing(show: Callable[[], int]) -> int:
    """Run a function whose only OSErrors are those of standard output, and return its exit code.
    Such an error becomes a UsageError; a reader that has exited is no error, as in `_run_piped`."""
    try:
        return _run_piped(show)
    except OSError as error:
        _discard_stdout()
        raise UsageError(f"cannot write to standard output: {error.strerror}", 1) from None


def _run_piped(show: Callable[[], int]) -> int:
    """Run a function that writes to standard output, and return its exit code. A reader that has
    exited (`| head -1`) is no error: the exit code is then SIGPIPE_EXIT."""
    try:
        code = show()
        if sys.stdout is not None:
            sys.stdout.flush()
    except BrokenPipeError:
        _discard_stdout()
        return SIGPIPE_EXIT
    return code


def _discard_stdout() -> None:
    """Redirect stdout to /dev/null, because the interpreter's flush at exit would fail again."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
