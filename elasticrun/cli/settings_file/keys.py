"""The keys of a settings file: each is a flag without its dashes. Pure.

Every key and value of the file is checked, also those of profiles that are not used.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

from elasticrun.cli import settings
from elasticrun.cli.flags import OTHER_TOOLS_FLAGS, SPECIAL
from elasticrun.cli.settings import UsageError
from elasticrun.cli.table import FLAGS, Flag, comma_separated
from elasticrun.config import EXIT_USAGE
from elasticrun.core.words import did_you_mean

PROFILE: Final = "profile"

_BY_KEY: Final = {flag.name[2:]: flag for flag in FLAGS}

_COMMAND_LINE_ONLY: Final = (
    *("config", "profile", "no_config", "dry_run", "verbose", *SPECIAL),
    *("fresh", "restore_step"),  # for one start
)

_CHECKS: Final[Mapping[str, Callable[[str], object]]] = {
    "nnodes": settings.nodes,
    "rdzv_conf": settings.pairs,
    "redirects": lambda text: settings.streams(text, "--redirects"),
    "tee": lambda text: settings.streams(text, "--tee"),
    "local_ranks_filter": lambda text: settings.ranks(text, "--local-ranks-filter"),
    "signals_to_handle": settings.signals,
    "preload": settings.modules,
    "standby": settings.standby,
    "data": settings.data,
    "name": lambda text: settings.job_name(text, ""),
}
"""What `resolve` requires of values that are texts to the parser."""

_PASSWORD: Final = re.compile(r"://[^/\s@]*:[^/\s@]*@")


class Preset(NamedTuple):
    """A setting of the file. `words`: the words of the command line that set it, none for a switch
    that is off. `source`: the file and the key, for the user."""

    words: tuple[str, ...]
    source: str


def presets(table: Mapping[str, Any], profile: str, path: str) -> dict[str, Preset]:
    """The settings of a file, and of one of its profiles ("": none), by dest. `path`: the file, for
    messages. Raises UsageError."""
    top = {key: value for key, value in table.items() if key != PROFILE}
    found = _presets(top, f"{path}: ")
    profiles = table.get(PROFILE, {})
    if not isinstance(profiles, dict):
        raise _wrong(f"{path}: {PROFILE} is not a table: write [{PROFILE}.NAME]")
    chosen = {}
    for name, keys in profiles.items():
        if not isinstance(keys, dict):
            raise _wrong(f"{path}: {PROFILE}.{name} is not a table: write [{PROFILE}.{name}]")
        chosen[name] = _presets(keys, f"{path}: {PROFILE}.{name}.")
    if profile and profile not in chosen:
        names = f"; it has {', '.join(sorted(chosen))}" if chosen else "; it has none"
        hint = did_you_mean(profile, chosen)
        raise _wrong(f"{path} has no profile {profile}{hint or names}")
    return {**found, **chosen.get(profile, {})}


def _presets(table: Mapping[str, Any], where: str) -> dict[str, Preset]:
    found: dict[str, Preset] = {}
    for key, value in table.items():
        flag = _flag(key, where)
        if flag.dest in found:
            raise _wrong(f"{where}{key} is set twice")
        found[flag.dest] = Preset(_words(flag, value, f"{where}{key}"), f"{where}{key}")
    return found


def _flag(key: str, where: str) -> Flag:
    name = key.replace("_", "-").lstrip("-")
    if name == "token":
        raise _wrong(
            f"{where}{key}: a secret does not belong in a file that others may read or commit: use "
            "token-file = PATH, or set ELASTICRUN_TOKEN"
        )
    flag = _BY_KEY.get(name)
    if flag is None:
        other = OTHER_TOOLS_FLAGS.get(f"--{name}", "")[2:]
        hint = f"; did you mean {other}?" if other else did_you_mean(name, _BY_KEY)
        raise _wrong(f"{where}{key} is not a setting{hint or ' (see elasticrun --help-all)'}")
    if flag.dest in _COMMAND_LINE_ONLY:
        raise _wrong(f"{where}{key} belongs on the command line: {flag.name}")
    return flag


def _words(flag: Flag, value: Any, where: str) -> tuple[str, ...]:
    """The words that give this flag its value. Raises UsageError."""
    if flag.kind is None:
        if not isinstance(value, bool):
            raise _wrong(f"{where} is a switch: write true or false")
        return (flag.name,) if value else ()
    text = _text(flag, value, where)
    if _PASSWORD.search(text):
        raise _wrong(f"{where} contains a password, which others may read in a file: leave it out")
    try:
        converted = flag.kind(text)
    except ValueError:
        raise _wrong(f"{where}: {text!r} is not {flag.expects}") from None
    if flag.choices and converted not in flag.choices:
        raise _wrong(f"{where}: {text!r} is not one of {', '.join(flag.choices)}")
    try:
        if flag.metavar == "SECONDS":
            settings.seconds(text, flag.name, zero=True)
        elif check := _CHECKS.get(flag.dest):
            check(text)
    except UsageError as error:
        raise _wrong(f"{where}: {error}") from None
    return (f"{flag.name}={text}",)


def _text(flag: Flag, value: Any, where: str) -> str:
    """The value as it is typed. A list may be an array, --rdzv-conf a table."""
    if isinstance(value, dict) and flag.metavar.startswith("KEY=VALUE"):
        return ",".join(f"{key}={_word(one, where)}" for key, one in value.items())
    if isinstance(value, list) and flag.metavar.endswith(",..."):
        items = [_word(one, where) for one in value]
        escaped = flag.kind is comma_separated
        return ",".join(item.replace(",", ",,") if escaped else item for item in items)
    return _word(value, where)


def _word(value: Any, where: str) -> str:
    if isinstance(value, bool):
        return str(int(value))
    if not isinstance(value, str | int | float):
        raise _wrong(f"{where} has a value of the wrong type: write a string or a number")
    return str(value)


def _wrong(sentence: str) -> UsageError:
    return UsageError(sentence, EXIT_USAGE)
