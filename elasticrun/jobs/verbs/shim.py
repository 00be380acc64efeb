"""`elasticrun shim -- CMD`: runs a command below which torchrun is elasticrun.

The shim is a temporary folder: `bin/torchrun` is on the command's PATH, and `python/torch` is on
its PYTHONPATH (`shim_torch`). It ends with the command.
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from elasticrun.cli.flags import PROG, Parser
from elasticrun.cli.settings import NoProgram, NotHere, UsageError
from elasticrun.cli.trust import SHIM_ENTRIES, SHIM_USED, leave_shim
from elasticrun.config import EXIT_USAGE
from elasticrun.host.system.processes import die_with_parent
from elasticrun.wire.env import SHIM

ABOUT: Final = """\
Run a command in which every call of torchrun, python -m torch.distributed.run and python -m
torch.distributed.launch starts elasticrun, also in the scripts and programs that it calls.
Settings of elasticrun come from the settings file (docs/settings.md) or from ELASTICRUN_ variables.
"""

FORWARDED: Final = (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)

NOT_EXECUTABLE: Final = 126
MISSING: Final = 127
"""Exit codes of a command that cannot be started, as a shell reports them."""


def main(words: Sequence[str], notify: Callable[[str], None]) -> int:
    """Run the command. Returns its exit code, as a shell reports it. Raises UsageError."""
    made = Parser(prog=f"{PROG} shim", usage=f"{PROG} shim -- CMD [ARGS ...]", description=ABOUT)
    made.add_argument("command", nargs=argparse.REMAINDER, metavar="CMD", help="the command")
    command = made.parse_args(words).command
    command = command[1:] if command[:1] == ["--"] else command
    if not command:
        raise UsageError(f"nothing to run: write `{PROG} shim -- CMD [ARGS ...]`", EXIT_USAGE)
    leave_shim()  # an outer one
    folder = _make()
    try:
        code = _run(command, folder)
        if not (folder / SHIM_USED).exists():
            saw = f"shim: {shlex.join(command)[:200]} started no torchrun that the shim could see"
            notify(saw + _hint(command))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return code


def _hint(command: Sequence[str]) -> str:
    """Why this command may have started no torchrun, and what to do, as a clause; or ""."""
    words = [os.path.basename(word) for word in command]
    if {"accelerate", "accelerate.commands.launch"}.isdisjoint(words) or "--multi_gpu" in words:
        return ""
    return (
        ": accelerate launch calls torchrun only with --multi_gpu, or if its configuration says so"
    )


def _make() -> Path:
    """Create the shim's folder. Raises NotHere."""
    try:
        folder = Path(tempfile.mkdtemp(prefix="elasticrun-shim-"))
        launcher, package = folder / "bin/torchrun", folder / "python/torch"
        for each in (launcher.parent, package):
            each.mkdir(parents=True)
        launcher.write_text(
            f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -P -m {PROG} "$@"\n', encoding="utf-8"
        )
        launcher.chmod(0o700)
        shutil.copyfile(Path(__file__).with_name("shim_torch.py"), package / "__init__.py")
    except OSError as error:
        raise NotHere(f"shim: its temporary folder cannot be made: {error.strerror}") from None
    if not os.access(launcher, os.X_OK):
        shutil.rmtree(folder, ignore_errors=True)
        raise NotHere(f"shim: programs cannot run in {folder.parent}: set TMPDIR to another folder")
    return folder


def _run(command: Sequence[str], folder: Path) -> int:
    """Run the command to its end, and forward signals to it. Returns its exit code."""
    environ = {**os.environ, SHIM: str(folder)}
    for name, entry in SHIM_ENTRIES.items():
        rest = [environ[name]] if environ.get(name) else []
        environ[name] = os.pathsep.join([str(folder / entry), *rest])
    try:
        child = subprocess.Popen(
            command, env=environ, preexec_fn=lambda: die_with_parent(signal.SIGTERM)
        )
    except OSError as error:
        code = MISSING if isinstance(error, FileNotFoundError) else NOT_EXECUTABLE
        raise NoProgram(f"shim: {command[0]} cannot be started: {error.strerror}", code) from None
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal sends it to the command too
    for number in FORWARDED:
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, lambda each, _: child.send_signal(each))
    code = child.wait()
    return 128 - code if code < 0 else code
