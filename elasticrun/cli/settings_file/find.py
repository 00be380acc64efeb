"""Finds and reads the settings file, and adds its settings to a command.

The file's settings become words before the user's own, together with --no-config. So whatever
passes the command on (ssh, srun, a join command, a submitted job) passes the settings on too, and
no other machine reads the file again.
"""

from __future__ import annotations

import argparse
import os
import stat
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from elasticrun.cli.flags import Parser, get_args_parser
from elasticrun.cli.rendezvous import without_flags
from elasticrun.cli.settings import UsageError
from elasticrun.cli.settings_file.keys import Preset, presets
from elasticrun.cli.table import FLAGS, Flag
from elasticrun.cli.trust import TOKEN_VARIABLE
from elasticrun.config import EXIT_USAGE
from elasticrun.wire import env

OWN: Final = "elasticrun.toml"
PROJECT: Final = "pyproject.toml"

MAX_BYTES: Final = 1 << 20

_OWN_FLAGS: Final = ("--config", "--profile", "--no-config")

_OTHER_VARIABLES: Final = {
    "token_file": TOKEN_VARIABLE,
    "shutdown_timeout": env.SHUTDOWN_TIMEOUT,
    "exit_barrier_timeout": env.EXIT_BARRIER_TIMEOUT,
    "log_line_prefix_template": env.LOG_LINE_PREFIX_TEMPLATE,
}
"""Variables of other names that set the same as a flag; like the flag's own, they take precedence
over the file."""


class FileSettings(NamedTuple):
    """What a settings file means for one command. `path`: the file, as the user knows it;
    `profile`: "" for none; `found`: the settings that apply, by dest; `unused`: the names of those
    that this command does not have."""

    path: str
    profile: str
    found: Mapping[str, Preset]
    unused: tuple[str, ...] = ()

    def sentence(self) -> str:
        """One line that says which settings of which file apply."""
        names = ", ".join(dest.replace("_", "-") for dest in self.found) or "none"
        profile = f" (profile {self.profile})" if self.profile else ""
        unused = f"; not for this command: {', '.join(self.unused)}" if self.unused else ""
        return f"settings from {self.path}{profile}: {names}{unused}"

    def before(self, flags: Sequence[str]) -> list[str]:
        """The flags of a command, after the words that stand for the settings."""
        words = [word for preset in self.found.values() for word in preset.words]
        return ["--no-config", *words, *without_flags(flags, _OWN_FLAGS)]

    def mark(self, ns: argparse.Namespace, typed: argparse.Namespace) -> None:
        """Record the file as the source of its settings, in a namespace parsed from `before`.
        `typed`: the namespace of the user's words."""
        sources = {dest: preset.source for dest, preset in self.found.items()}
        ns.given = {**ns.given, **sources}
        del ns.given["no_config"]
        ns.no_config, ns.config, ns.profile = False, self.path, self.profile
        for dest in ("config", "profile"):
            if dest in typed.given:
                ns.given[dest] = typed.given[dest]
            elif dest == "config" and not typed.config:
                ns.given[dest] = "in this folder"


def for_launch(
    words: Sequence[str], ns: argparse.Namespace, notify: Callable[[str], None]
) -> tuple[list[str], argparse.Namespace]:
    """The launcher's words with the settings of the file, and their namespace; unchanged without a
    file. `ns`: the namespace of `words`. Raises UsageError."""
    file = read(ns, ns.given, os.environ, notify)
    if file is None:
        return list(words), ns
    parser = get_args_parser()
    at = parser.script_at(words)
    words = [*file.before(words[:at]), *words[at:]]
    found = parser.parse_args(words)
    file.mark(found, ns)
    notify(file.sentence())
    return words, found


def fill(ns: argparse.Namespace, notify: Callable[[str], None]) -> None:
    """Set what another launcher's namespace leaves at its default: to the value of an ELASTICRUN_
    variable, which that launcher does not know, else of the file. Raises UsageError."""
    here = argparse.Namespace(config="", profile="", no_config=False)
    file = read(here, (), os.environ, notify)
    words = file.before([]) if file else []
    defaults = vars(get_args_parser({}).parse_args(["script"]))
    values = vars(get_args_parser().parse_args([*words, "script"]))
    ours = [flag.dest for flag in FLAGS if flag.variable_in(os.environ).startswith("ELASTICRUN_")]
    for dest in (*ours, *(file.found if file else ())):
        if getattr(ns, dest, defaults[dest]) == defaults[dest]:
            setattr(ns, dest, values[dest])
    if file:
        notify(file.sentence())


def for_verb(
    flags: Sequence[str], environ: Mapping[str, str], notify: Callable[[str], None]
) -> FileSettings | None:
    """The file's settings for a verb that builds a launch, typed with these flags; None without a
    file. Raises UsageError."""
    typed = {word.partition("=")[0] for word in flags}
    given = {flag.dest for flag in FLAGS if not typed.isdisjoint(flag.spellings)}
    made = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    rows = [flag for flag in FLAGS if flag.name in _OWN_FLAGS]
    for flag in rows:
        made.add_argument(*flag.spellings, action="store" if flag.kind else "store_true")
    try:
        ns = made.parse_known_args(list(flags))[0]
    except argparse.ArgumentError:  # the verb's own parser says what is wrong
        return None
    return read(ns, given, environ, notify)


def use(
    file: FileSettings | None, flags: Sequence[str], made: Parser, notify: Callable[[str], None]
) -> list[str]:
    """A verb's flags with those settings of the file that its parser accepts."""
    if file is None:
        return list(flags)
    accepted = {action.dest for action in made._actions}
    found = {dest: preset for dest, preset in file.found.items() if dest in accepted}
    unused = tuple(dest.replace("_", "-") for dest in file.found if dest not in accepted)
    file = file._replace(found=found, unused=unused)
    notify(file.sentence())
    return file.before(flags)


def read(
    ns: argparse.Namespace,
    given: Collection[str],
    environ: Mapping[str, str],
    notify: Callable[[str], None],
) -> FileSettings | None:
    """The settings that neither a flag nor a variable overrides; None without a file. `given`: the
    dests of the flags on the command line. Raises UsageError."""
    if ns.no_config:
        if typed := {"config", "profile"} & set(given):
            raise _wrong(f"--no-config and --{min(typed)} contradict each other: leave one out")
        return None
    named = ns.config or environ.get("ELASTICRUN_CONFIG", "")
    profile = ns.profile or environ.get("ELASTICRUN_PROFILE", "")
    path, table = _named_file(named) if named else _file_here(notify)
    if table is None:
        if profile:
            raise _wrong(
                f"profile {profile}: this folder has neither {OWN} nor a {PROJECT} with "
                f"[tool.elasticrun] ({os.getcwd()})"
            )
        return None
    found = presets(table, profile, path)
    for flag in FLAGS:
        if flag.dest in found and (flag.dest in given or _set_by_variable(flag, environ)):
            del found[flag.dest]
    return FileSettings(path, profile, {dest: each for dest, each in found.items() if each.words})


def _set_by_variable(flag: Flag, environ: Mapping[str, str]) -> bool:
    name = flag.variable_in(environ)
    by_its_own = bool(name) and (flag.kind in (None, str) or environ[name] != "")
    return by_its_own or bool(environ.get(_OTHER_VARIABLES.get(flag.dest, "")))


def _named_file(path: str) -> tuple[str, Mapping[str, Any]]:
    """The settings of --config. Raises UsageError."""
    try:
        data = _read(Path(path))
    except OSError as error:
        raise _wrong(f"--config={path} cannot be read: {error.strerror}") from None
    table = _parse(data, path)
    if os.path.basename(path) != PROJECT:
        return path, table
    own = table.get("tool", {}).get("elasticrun")
    if own is None:
        raise _wrong(f"--config={path} has no [tool.elasticrun]")
    return path, own


def _file_here(notify: Callable[[str], None]) -> tuple[str, Mapping[str, Any] | None]:
    """The settings of the working folder's file; None without one. Raises UsageError."""
    for name in (OWN, PROJECT):
        try:
            data = _read(Path(name))
        except OSError as error:
            if name == OWN and not isinstance(error, FileNotFoundError):
                raise _wrong(f"{name} cannot be read: {error.strerror} (or: --no-config)") from None
            continue
        if b"elasticrun" not in data and name == PROJECT:
            continue  # most projects: not even parsed
        table: Any = _parse(data, name)
        if name == PROJECT:
            table = table.get("tool", {}).get("elasticrun")
        if table is None:
            continue
        if _may_be_planted(name):
            notify(
                f"{name} is ignored: it belongs to another user, and everyone can write to this "
                f"folder; --config={name} uses it"
            )
            continue
        return name, table
    return "", None


def _may_be_planted(name: str) -> bool:
    """Whether a stranger may have put this file into a folder such as /tmp."""
    everyone = bool(os.stat(".").st_mode & stat.S_IWOTH)
    return everyone and os.stat(name).st_uid not in (0, os.getuid())


def _read(path: Path) -> bytes:
    with path.open("rb") as file:
        data = file.read(MAX_BYTES + 1)
    if len(data) > MAX_BYTES:
        raise _wrong(f"{path} has more than {MAX_BYTES >> 20} MiB, too many for settings")
    return data


def _parse(data: bytes, path: str) -> dict[str, Any]:
    import tomllib  # late: most commands have no file

    try:
        return tomllib.loads(data.decode())
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        why = "it is not UTF-8" if isinstance(error, UnicodeDecodeError) else str(error)
        raise _wrong(f"{path} is not valid TOML: {why}") from None


def _wrong(sentence: str) -> UsageError:
    return UsageError(sentence, EXIT_USAGE)
