"""--git: resolves the commit, and selects the folder in which its code runs."""

from __future__ import annotations

import argparse
import dataclasses
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from elasticrun.agent.workers import checkout
from elasticrun.cli.flags import get_args_parser
from elasticrun.cli.rendezvous import without
from elasticrun.cli.settings import NotHere
from elasticrun.config import AgentConfig


def pinned(text: str, environ: Mapping[str, str]) -> str:
    """The value of --git, with the commit that its ref currently names. Raises NotHere."""
    try:
        return str(checkout.pinned(checkout.parsed(text), environ))
    except checkout.GitError as wrong:
        raise NotHere(str(wrong)) from None


def with_commit(
    words: Sequence[str], ns: argparse.Namespace, environ: Mapping[str, str]
) -> list[str]:
    """The launcher's words with the commit in place of the ref, so that all nodes use the same
    commit and the job's record names it. Updates `ns` too. Raises NotHere."""
    ns.git = pinned(ns.git, environ)
    at = get_args_parser().script_at(words)
    return [f"--git={ns.git}", *without(words[:at], ("--git",)), *words[at:]]


def enter(
    config: AgentConfig, git: str, environ: Mapping[str, str], say: Callable[[str], None]
) -> AgentConfig:
    """Check the code out and change to its folder, as if the command had been typed there. Relative
    paths in flags keep their meaning. Raises NotHere."""
    source, workdir = checkout.parsed(git), Path.cwd()
    folder = source.folder(workdir)
    say(f"--git: the ranks run {source.url} at {source.ref[:12]}, in {folder}")
    try:
        checkout.check_out(source, workdir, environ)  # held until this process exits
    except checkout.GitError as wrong:
        raise NotHere(str(wrong)) from None

    def here(path: str) -> str:
        return str(workdir / path) if path else ""

    tls, log_dir = config.tls, config.logs.log_dir
    if tls is not None:
        tls = dataclasses.replace(tls, cert=here(tls.cert), key=here(tls.key), ca=here(tls.ca))
    run = dataclasses.replace(
        config.run,
        folder=here(config.run.folder),
        tensorboard=here(config.run.tensorboard),
        workdir=str(workdir),
        git_commit=source.ref,
    )
    logs = dataclasses.replace(config.logs, log_dir=log_dir and here(log_dir))
    os.chdir(folder)
    return dataclasses.replace(config, tls=tls, logs=logs, run=run)
