"""`elasticrun completion bash|zsh`: prints a shell completion script for all verbs, their flags,
and job names.

`--print-completion` covers only the launcher, as in torchrun.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Final

from elasticrun.cli.flags import PROG, Described, Parser, get_args_parser
from elasticrun.config import EXIT_OK
from elasticrun.jobs.verbs.render_flags import TARGETS

NAMES: Final = (
    f"""{PROG} list -A -o json 2>/dev/null | sed -n 's/^ *"name": "\\(.*\\)",$/\\1/p' | sort -u"""
)


def _name_completion(function: str, more: str = "") -> dict[str, object]:
    """The completion of a job name; `more`: words allowed in its place."""
    return {
        "bash": function,
        "zsh": function,
        "preamble": {
            "bash": f'{function}() {{ compgen -W "{more}$({NAMES})" -- "$1"; }}',
            "zsh": f'{function}() {{ compadd -- {more}${{(f)"$({NAMES})"}} }}',
        },
    }


JOBS: Final = _name_completion("_elasticrun_jobs")
JOBS_OR_NODES: Final = _name_completion("_elasticrun_top", "nodes ")

JOB_ARGUMENTS: Final = (
    ("status", "endpoint"),
    ("incidents", "words"),
    ("scale", "number"),
    ("ckpt", "folder"),
)
"""Verbs and their arguments that may be a job's name, besides arguments named "job" or "jobs"."""

REQUIRED_WORDS: Final = {"render": ["k8s"], "exec": ["JOB", "--", "true"]}
"""Words that a verb requires before it calls its parser."""


def main(argv: Sequence[str], verbs: Iterable[str], run: Callable[[str, list[str]], int]) -> int:
    """Print the completion script. `run` runs a verb with its words."""
    made = Parser(prog=f"{PROG} completion", description="Print the completion script for a shell. "
                  f"Use it as eval \"$({PROG} completion bash)\" in ~/.bashrc.")  # fmt: skip
    made.add_argument("shell", choices=("bash", "zsh"))
    shell = made.parse_args(argv).shell
    try:
        import shtab
    except ImportError:
        made.error("it needs the package shtab: pip install shtab")
    whole = get_args_parser({})
    for action in [one for one in whole._actions if not one.option_strings]:
        whole._remove_action(action)
    below = whole.add_subparsers(metavar="VERB", parser_class=argparse.ArgumentParser)
    for verb in sorted({*verbs} - {"completion", "master"}):
        below.add_parser(verb, help=verb, add_help=False)
        below.choices[verb] = _parser_of(verb, run)
    text = shtab.complete(whole, shell=shell)
    described = f"_describe '{PROG} commands' _commands"
    files = {"complete -o bash": "complete -o default -o bash", described: f"{described} || _files"}
    for line, instead in files.items():  # complete files too: the first word may be a script
        text = text.replace(line, instead)
    sys.stdout.write(text + "\n")
    return EXIT_OK


def _parser_of(verb: str, run: Callable[[str, list[str]], int]) -> argparse.ArgumentParser:
    """The verb's parser, which the verb is run to obtain, with completion of job names."""
    Parser.describes = True
    try:
        run(verb, REQUIRED_WORDS.get(verb, []))
    except Described as found:
        if verb == "render":  # its parser depends on the target
            found.parser.add_argument("target", choices=tuple(TARGETS))
        _complete_jobs(verb, found.parser)
        return found.parser
    finally:
        Parser.describes = False
    raise AssertionError(f"{verb} parses nothing")


def _complete_jobs(verb: str, parser: argparse.ArgumentParser) -> None:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for below in action.choices.values():
                _complete_jobs(verb, below)
        elif action.dest in ("job", "jobs") or (verb, action.dest) in JOB_ARGUMENTS:
            action.complete = JOBS_OR_NODES if verb == "top" else JOBS  # type: ignore[attr-defined]
