"""--git: resolves the commit, checks it out, and changes to its folder."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from elasticrun.agent.workers import checkout
from elasticrun.cli.flags import get_args_parser
from elasticrun.cli.rendezvous import without_flags
from elasticrun.cli.settings import NotHere


def pinned(text: str, environ: Mapping[str, str]) -> str:
    """The value of --git, with the commit that its ref currently names. Raises NotHere."""
    try:
        return str(checkout.pin_source(checkout.parse_source(text), environ))
    except checkout.GitError as wrong:
        raise NotHere(str(wrong)) from None


def with_commit(
    words: Sequence[str], ns: argparse.Namespace, environ: Mapping[str, str]
) -> list[str]:
    """The launcher's words with the commit in place of the ref, so that all nodes use the same
    commit and the job's record names it. Updates `ns` too. Raises NotHere."""
    ns.git = pinned(ns.git, environ)
    at = get_args_parser().script_at(words)
    return [f"--git={ns.git}", *without_flags(words[:at], ("--git",)), *words[at:]]


def enter(git: str, environ: Mapping[str, str], notify: Callable[[str], None]) -> None:
    """Check the code out and change to its folder, as if the command had been typed there. Raises
    NotHere."""
    source, workdir = checkout.parse_source(git), Path.cwd()
    folder = source.folder(workdir)
    notify(f"--git: the ranks run {source.url} at {source.ref[:12]}, in {folder}")
    try:
        checkout.check_out(source, workdir, environ)  # held until this process exits
    except checkout.GitError as wrong:
        raise NotHere(str(wrong)) from None
    os.chdir(folder)
