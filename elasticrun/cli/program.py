"""Whether the user's program can be run at all, before anything is started for it."""

from __future__ import annotations

import os

from elasticrun.cli.values import NoProgram
from elasticrun.wire.entry import Entry, EntryKind


def check_program(entry: Entry) -> str:
    """Raise `NoProgram` where the program cannot be run here; else a hint for the user, or "".

    A module is not looked for: finding it may mean importing its packages.
    """
    if entry.kind in (EntryKind.SCRIPT, EntryKind.RUN_PATH):
        return _check_script(entry.target)
    if entry.kind is EntryKind.COMMAND:
        _check_command(entry.target)
    return ""


def _check_script(path: str) -> str:
    if path == "-":  # python reads it from standard input
        return ""
    if not os.path.exists(path):
        hint = "; for a module write -m" if _like_a_module(path) else ""
        raise NoProgram(f"there is no script {path} (from {os.getcwd()}){hint}")
    if os.path.isdir(path):
        if not os.path.exists(os.path.join(path, "__main__.py")):
            raise NoProgram(f"{path} is a folder without __main__.py, and no script")
        return ""
    try:
        with open(path, "rb") as file:
            start = file.read(256)
    except OSError as error:
        raise NoProgram(f"the script {path} cannot be read: {error.strerror}") from None
    if start.startswith(b"\x7fELF"):
        raise NoProgram(f"{path} is a program and no Python script: add --no-python")
    if start.startswith(b"#!") and b"python" not in start.splitlines()[0]:
        first = start.splitlines()[0][2:].decode(errors="replace").strip()
        return f"{path} is meant for {first}; if it is not Python, add --no-python"
    return ""


def _like_a_module(path: str) -> bool:
    return "/" not in path and not path.endswith(".py") and path.replace(".", "_").isidentifier()


def _check_command(command: str) -> None:
    import shutil

    if shutil.which(command) is not None:
        return
    if os.path.isfile(command):
        raise NoProgram(f"{command} may not be executed: chmod +x it, or leave out --no-python")
    raise NoProgram(f"there is no program {command} to run (--no-python)")
