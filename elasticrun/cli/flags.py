"""The command line's grammar: builds the argparse parser from the table.

A flag is data (`table.FLAGS`); this module turns the data into a parser. As in torchrun, every flag
has two spellings, torchrun's flags may be abbreviated, and defaults come from the environment; none
of this needs torch. Words after the script are cut off before parsing: argparse itself matches
every word, and would reject a script's own `--log` as ambiguous.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Final

from elasticrun.cli.table import EPILOG, FLAGS, GROUPS, HELP, NEWER, OURS, TORCHRUN, Flag
from elasticrun.core.words import did_you_mean
from elasticrun.wire.env import LAST_WORDS

PROG = "elasticrun"


class FromEnvironment(str):
    """A flag's default from the environment: the text, and the name of the variable."""

    variable: str


class Parsed(argparse.Namespace):
    """A namespace that records which flags the command line contained, and in which spelling.

    `given` is a slot, so `vars()` shows the same as for argparse's own namespace.
    """

    __slots__ = ("given",)
    given: dict[str, str]

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.given = {}


class Store(argparse.Action):
    """Store a value, or True for a switch, and record that the flag was given."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: Any = None) -> None:
        setattr(namespace, self.dest, self.const if self.nargs == 0 else values)
        if isinstance(namespace, Parsed):
            namespace.given[self.dest] = option_string or self.option_strings[0]


class StoreAll(Store):
    """A comma-separated list; each use of the flag extends it."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: Any = None) -> None:
        if self.dest in getattr(namespace, "given", ()) and (
            before := getattr(namespace, self.dest)
        ):
            values = f"{before},{values}"
        super().__call__(parser, namespace, values, option_string)


def _convert(flag: Flag, kind: Callable[[str], Any], text: str) -> Any:
    """Convert text to a flag's value. Raises ArgumentTypeError, which names the variable if the
    text came from one."""
    where = f" (from {text.variable})" if isinstance(text, FromEnvironment) else ""
    try:
        value = kind(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}{where} is not {flag.expects}") from None
    if where and flag.choices and value not in flag.choices:  # argparse checks only typed values
        words = ", ".join(flag.choices)
        raise argparse.ArgumentTypeError(f"{text!r}{where} is not one of {words}")
    return value


class Described(Exception):
    """Raised instead of parsing, with the parser, for `elasticrun completion`."""

    def __init__(self, parser: Parser) -> None:
        super().__init__(parser.prog)
        self.parser = parser


OTHER_TOOLS_FLAGS: Final = {
    **dict.fromkeys(("-n", "-np", "--np", "--gpus", "--num-gpus"), "--nproc-per-node"),
    **dict.fromkeys(("--num-processes", "--world-size"), "--nproc-per-node"),
    **dict.fromkeys(("--num-machines", "--nodes", "--num-nodes"), "--nnodes"),
    "--machine-rank": "--node-rank",
    **dict.fromkeys(("--main-process-ip", "--master"), "--master-addr"),
    "--main-process-port": "--master-port",
    **dict.fromkeys(("--restarts", "--retries", "--max-retries"), "--max-restarts"),
}
"""Flags of accelerate, DeepSpeed, mpirun and other launchers, and their names here."""


EXPECTED: Final[Mapping[Any, str]] = {int: "a whole number", float: "a number"}
"""What the value of a flag must be, by its `type`; other types say so in their errors."""


def spelled(action: argparse.Action) -> str:
    """A flag as documentation spells it, or the name of a positional argument in help."""
    names = [name for name in action.option_strings if "_" not in name]
    long = [name for name in names if name.startswith("--")]
    return (long or names or [str(action.metavar or action.dest)])[0]


def _wrong(sentence: str) -> argparse.ArgumentError:
    """An error that argparse passes to `Parser.error` as it is."""
    return argparse.ArgumentError(None, sentence)


class Parser(argparse.ArgumentParser):
    """An ArgumentParser whose errors are sentences: what is wrong, and what to do. Only torchrun's
    flags may be abbreviated, so that abbreviations mean the same as in torchrun, whatever flags are
    added here."""

    describes = False
    """Whether all parsers raise `Described` instead of parsing; `elasticrun completion` sets it to
    get the parsers."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**{"formatter_class": FlagHelp, **kwargs})
        self.bad_switches: list[str] = []
        self.torchrun_dests: set[str] = set()
        self.newer_dests: set[str] = set()
        self.all_help = "--help"

    def parse_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> argparse.Namespace:
        found, extra = self.parse_known_args(args, namespace)
        if extra:
            names = [name for name in self._option_string_actions if "_" not in name]
            typed = extra[0].partition("=")[0].replace("_", "-")
            known = OTHER_TOOLS_FLAGS.get(typed, "")
            hint = f"; did you mean {known}?" if known in names else did_you_mean(typed, names)
            if extra[0].startswith("-"):
                self.error(f"there is no flag {extra[0].partition('=')[0]}{hint}")
            self.error(f"{extra[0]!r} is one argument too many{hint}")
        return found

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        if Parser.describes:
            raise Described(self)
        for sentence in self.bad_switches:
            self.error(sentence)
        words = list(sys.argv[1:] if args is None else args)
        needed = [action for action in self._actions if action.required]
        for action in needed:
            if action.option_strings and not {"-h", "--help"} & {*words}:
                self._check_given(action, words)
            action.required = bool(action.option_strings)  # argparse checks the flags again
        try:
            found = super().parse_known_args(words, Parsed() if namespace is None else namespace)
        finally:
            for action in needed:
                action.required = True
        for action in needed:
            if getattr(found[0], action.dest, None) is None:
                self.error(self.missing_sentence(action, words))
        return found

    def _check_given(self, action: argparse.Action, words: Sequence[str]) -> None:
        """End with an error if a flag that must be given is not among the words."""
        if not {word.partition("=")[0] for word in words} & {*action.option_strings}:
            self.error(self.missing_sentence(action, words))

    def missing_sentence(self, action: argparse.Action, words: Sequence[str]) -> str:
        """The error about a required flag or argument that is not among the words."""
        if action.choices:
            return f"name one of {', '.join(map(str, action.choices))}"
        more = (action.help or "").rstrip(".")
        return f"{spelled(action)} is missing{more and f': {more}'}"

    def error(self, message: str) -> Any:
        """Print one line, and exit with code 2."""
        self.exit(2, f"{self.prog}: error: {message} (see {self.prog} {self.all_help})\n")

    # ------------------------------------------------------------ argparse's own errors, reworded

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is None or value in action.choices:
            return
        known = [str(choice) for choice in action.choices]
        given = f"{spelled(action)}={value}" if action.option_strings else repr(value)
        raise _wrong(f"{given}: use one of {', '.join(known)}{did_you_mean(str(value), known)}")

    def _get_value(self, action: argparse.Action, arg_string: str) -> Any:
        try:
            return self._registry_get("type", action.type, action.type)(arg_string)
        except argparse.ArgumentTypeError as error:
            raise _wrong(f"{spelled(action)}: {error}") from None
        except (TypeError, ValueError):
            expected = EXPECTED.get(action.type, "a valid value")
            raise _wrong(f"{spelled(action)}: {arg_string!r} is not {expected}") from None

    def _match_argument(self, action: argparse.Action, arg_strings_pattern: str) -> int:
        try:
            return super()._match_argument(action, arg_strings_pattern)
        except argparse.ArgumentError:
            what = action.metavar or "|".join(map(str, action.choices or [action.dest.upper()]))
            name = spelled(action)
            raise _wrong(f"{name} needs a value, as in {name}={what}") from None

    def _parse_optional(self, arg_string: str) -> Any:
        found: Any = super()._parse_optional(arg_string)
        for action, *_, value in found if isinstance(found, list) else [found or (None, None)]:
            if action is not None and action.nargs == 0 and value and arg_string.startswith("--"):
                name = arg_string.partition("=")[0]
                raise _wrong(f"{name} takes no value: write {name} without ={value}")
        return found

    def _get_option_tuples(self, option_string: str) -> list[Any]:
        found: list[Any] = super()._get_option_tuples(option_string)
        torchrun_dests = [
            match for match in found if match[0].dest in self.torchrun_dests | {"help"}
        ]
        meant = torchrun_dests or [match for match in found if match[0].dest in self.newer_dests]
        if len(meant) > 1 and len({match[0].dest for match in meant}) == 1:
            # torchrun rejects it too, because the two spellings are two flags to argparse.
            typed = option_string.partition("=")[0]
            whole = next(name for name in meant[0][0].option_strings if name.startswith("--"))
            self.error(f"{typed} is ambiguous; did you mean {whole}?")
        if len(meant) > 1 and option_string.startswith("--"):
            names = list(dict.fromkeys(spelled(match[0]) for match in meant))
            self.error(f"{option_string.partition('=')[0]} may mean {', '.join(names)}: write one")
        return meant


def write_last_word(sentence: str) -> None:
    """Write why this launch cannot begin to the file in $ELASTICRUN_LAST_WORDS, if set."""
    if LAST_WORDS in os.environ:  # late import: rarely needed
        from elasticrun.host.runs.last_word import LastWord, write

        write(LastWord(sentence))


class LaunchParser(Parser):
    """The parser of the launcher itself: flags, the script, and the script's arguments."""

    def error(self, message: str) -> Any:
        write_last_word(message)
        super().error(message)

    def missing_sentence(self, action: argparse.Action, words: Sequence[str]) -> str:
        sentence = (
            "there is no script to run: write it after the flags, as in `elasticrun train.py`"
        )
        if len(words) > 1 and self._is_flag(words[-2]) and self._takes_next_word(words[-2]):
            return f"{sentence}; {words[-1]} is the value of {words[-2]} here"
        return sentence

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        words = list(sys.argv[1:] if args is None else args)
        at = self.script_at(words)
        found, extra = super().parse_known_args(words[: at + 1], namespace)
        behind = words[at + 1 :]
        if behind[:1] == ["--"] and "--" not in words[:at]:
            del behind[0]  # as in torchrun, `--` ends the launcher's flags, even after the script
        if behind:
            found.training_script_args = behind
        return found, extra

    def script_at(self, words: Sequence[str]) -> int:
        """The index of the script; without a script, the number of words."""
        at = 0
        while at < len(words):
            if words[at] == "--":
                return at + 1
            if not self._is_flag(words[at]):
                return at
            at += 2 if self._takes_next_word(words[at]) else 1
        return len(words)

    def _is_flag(self, word: str) -> bool:
        """Whether argparse treats the word as a flag. It does not for `-`, a negative number, or an
        unknown word with a space."""
        if not word.startswith("-") or word == "-":
            return False
        known = self._option_string_actions
        if word in known or word.partition("=")[0] in known or self._get_option_tuples(word):
            return True
        return " " not in word and not self._negative_number_matcher.match(word)

    def _takes_next_word(self, word: str) -> bool:
        """Whether the flag's value is the next word. For a flag that argparse rejects, the result
        does not matter."""
        known = self._option_string_actions
        if word in known:
            return known[word].nargs != 0
        if "=" in word:
            return False
        if word.startswith("--"):
            return any(match[0].nargs != 0 for match in self._get_option_tuples(word))
        for at, letter in enumerate(word[1:], start=2):  # combined short flags: -m, -r3, -mr
            flag = known.get(f"-{letter}")
            if flag is None or flag.nargs != 0:
                return flag is not None and at == len(word)
        return False


class FlagHelp(argparse.HelpFormatter):
    """Help that shows each flag once, with dashes, and keeps multi-line text unchanged."""

    def __init__(self, prog: str) -> None:
        import shutil

        columns = max(60, shutil.get_terminal_size().columns - 2)
        super().__init__(prog, max_help_position=32, width=min(columns, 100))

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        if "\n" in text:
            return text
        return "\n".join(indent + line for line in self._split_lines(text, width - len(indent)))

    def _split_lines(self, text: str, width: int) -> list[str]:
        """Broken between words only, so that flags and paths stay whole."""
        import textwrap

        return textwrap.wrap(
            " ".join(text.split()), width, break_long_words=False, break_on_hyphens=False
        )

    def _format_action_invocation(self, action: argparse.Action) -> str:
        if not action.option_strings:
            return super()._format_action_invocation(action)
        names = [name for name in action.option_strings if "_" not in name]
        if action.nargs == 0:
            return ", ".join(names)
        value = self._format_args(action, self._get_default_metavar_for_optional(action))
        return f"{', '.join(names)} {value}"


class _Version(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        import importlib.metadata
        import platform

        from elasticrun import __version__

        try:
            torch = importlib.metadata.version("torch")
        except importlib.metadata.PackageNotFoundError:
            torch = "not installed"
        python = platform.python_version()
        parser._print_message(
            f"{PROG} {__version__} (torch {torch}, Python {python})\n", sys.stdout
        )
        parser.exit(0)


class _Help(argparse.Action):
    """One screen of help; --help-all is argparse's page of everything."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        parser._print_message(HELP, sys.stdout)  # `main` handles a write error
        parser.exit(0)


class _Shells:
    """The shells that shtab supports; looked up only if the flag is given, because the import is
    slow."""

    def __iter__(self) -> Iterator[str]:
        try:
            import shtab
        except ImportError:  # as in torch
            return iter(("bash", "zsh", "tcsh"))
        return iter(shtab.SUPPORTED_SHELLS)


class _PrintCompletion(argparse.Action):
    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: Any = None) -> None:
        try:
            import shtab
        except ImportError:
            parser.error(f"{option_string} needs the package shtab: pip install shtab")
        for action in parser._actions:
            completer = {"training_script": shtab.FILE, "log_dir": shtab.DIRECTORY}.get(action.dest)
            if completer is not None:
                action.complete = completer
        parser._print_message(shtab.complete(parser, shell=values) + "\n", sys.stdout)
        parser.exit(0)


SPECIAL: Mapping[str, type[argparse.Action]] = {
    "version": _Version,
    "print_completion": _PrintCompletion,
}
"""Flags that act at once and exit, instead of storing a value."""


def parse_switch(text: str) -> bool:
    """The value of a switch in the environment: a number as in torchrun, or a word. Raises
    ValueError."""
    word = text.strip().lower()
    if word in ("true", "yes", "on", "t", "y"):
        return True
    if word in ("false", "no", "off", "f", "n", ""):
        return False
    return bool(int(word))


def get_args_parser(environ: Mapping[str, str] | None = None) -> LaunchParser:
    """The launcher's parser, with defaults from `environ`; None: from os.environ."""
    parser = LaunchParser(
        prog=PROG,
        usage=f"{PROG} [options] script [arguments of the script ...]",
        description="Elastic launcher for distributed PyTorch; replaces torchrun.",
        epilog=EPILOG,
        add_help=False,
    )
    parser.all_help = "--help-all"
    options = parser.add_argument_group("options")
    options.add_argument(
        "-h", "--help", action=_Help, nargs=0, default=argparse.SUPPRESS, help="One screen of help."
    )
    options.add_argument(
        "--help-all", action="help", default=argparse.SUPPRESS, help="Print this page."
    )
    for key, title in GROUPS.items():
        rows = [flag for flag in FLAGS if flag.group == key]
        add_group(parser, title, rows, os.environ if environ is None else environ)
    parser.add_argument(
        "training_script", metavar="script", help="The program that every rank runs."
    )
    parser.add_argument(
        "training_script_args",
        nargs=argparse.REMAINDER,
        metavar="...",
        help="The script's arguments; ${local_rank} is replaced.",
    )
    return parser


def torchrun_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """The PET_ variables with which a torchrun that replaces this process sees the values of our
    ELASTICRUN_ variables."""
    rows = [(flag, flag.variable_in(environ)) for flag in FLAGS if flag.origin == TORCHRUN]
    return {
        flag.variable: environ[name] if flag.kind else str(int(parse_switch(environ[name])))
        for flag, name in rows
        if name not in ("", flag.variable)
    }


def add_group(
    parser: Parser, title: str, flags: Iterable[Flag], environ: Mapping[str, str]
) -> argparse._ArgumentGroup:
    """Add rows of the table to a parser, under one title, with defaults from `environ`."""
    group = parser.add_argument_group(title)
    for flag in flags:
        options: dict[str, Any] = {"dest": flag.dest, "help": _help(flag)}
        special = SPECIAL.get(flag.dest)
        if special is not None:
            # torch's parser stores None for the flag that it has too
            none = flag.default if flag.origin == NEWER else argparse.SUPPRESS
            options |= {"action": special, "default": none}
            shells = {"choices": _Shells(), "metavar": flag.metavar}
            options |= shells if flag.kind else {"nargs": 0}
        elif flag.kind is None:
            options |= {"action": Store, "nargs": 0, "const": True}
            options["default"] = _switch_default(parser, flag, environ)
        else:
            is_list = flag.origin == OURS and flag.metavar.endswith(",...")
            options |= {"action": StoreAll if is_list else Store, "choices": flag.choices or None}
            options["type"] = partial(_convert, flag, flag.kind)
            options["metavar"] = flag.metavar or None
            options["default"] = _default(flag, environ)
        group.add_argument(*flag.spellings, **options)
        if flag.origin == TORCHRUN:
            parser.torchrun_dests.add(flag.dest)
        elif flag.origin == NEWER:
            parser.newer_dests.add(flag.dest)
    return group


def _default(flag: Flag, environ: Mapping[str, str]) -> Any:
    name = flag.variable_in(environ)
    if name and (environ[name] or flag.kind is str):
        found = FromEnvironment(environ[name])
        found.variable = name
        return found
    return list(flag.default) if isinstance(flag.default, tuple) else flag.default


def _switch_default(parser: Parser, flag: Flag, environ: Mapping[str, str]) -> bool:
    name = flag.variable_in(environ)
    text = environ[name] if name else "0"
    try:
        return parse_switch(text)
    except ValueError:
        parser.bad_switches.append(
            f"environment variable {name}: {text!r} is not a switch; use 1 or 0"
        )
        return False


def _help(flag: Flag) -> str:
    remarks = []
    is_value = flag.kind is not None and flag.dest not in SPECIAL and "Default:" not in flag.help
    if is_value and flag.default not in (None, "", ()):
        remarks.append(f"default {flag.default}")
    if flag.variable and flag.dest not in SPECIAL:
        remarks.append(f"${flag.variable}")
    tail = f" [{', '.join(remarks)}]" if remarks else ""
    return (flag.help + tail).replace("%", "%%")
