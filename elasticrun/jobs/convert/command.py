"""Rewrites a container's command so that elasticrun replaces the launcher that it names.

Settings that the operator gives every agent (number of nodes, rendezvous endpoint, node rank) are
removed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

SHELLS: Final = ("sh", "bash", "dash", "zsh")

FIXED_FLAGS: Final = (
    "nnodes", "node-rank", "group-rank", "master-addr", "master-port", "rdzv-backend",
    "rdzv-endpoint", "rdzv-id", "standalone", "local-addr", "use-env",
)  # fmt: skip
"""Launcher flags that the ElasticJob's operator sets, or that have no meaning here."""

SWITCHES: Final = (
    "standalone", "no-python", "run-path", "use-env", "network-check", "comm-perf-test",
    "exclude-straggler", "auto-config", "auto-tunning", "save-at-breakpoint", "numa-affinity",
)  # fmt: skip
"""Launcher flags without a value."""

_PYTHON = r"(?:\S*/)?python[0-9.]*"

LAUNCHER = re.compile(
    rf"(?<![\w./-])(?:(?:\S*/)?(?:torchrun|dlrover-run)|{_PYTHON}(?:\s+-u)?\s+-m\s+"
    r"torch\.distributed\.(?:run|launch))(?=\s|$)"
)
"""A launcher whose flags elasticrun accepts."""

_SCRIPT = re.compile(
    rf"(?<![\w./-]){_PYTHON}(?P<options>(?:\s+-(?!m\s)[a-zA-Z]+)*)\s+"
    r"(?=-m\s+(?!pip\b)\w|[^-\s;&|][^\s;&|]*\.py(?:[\s;&|'\")]|$))"
)
"""Python with a script or a module, as in jobs whose operator starts the ranks itself."""

_FLAG = re.compile(
    rf"\s--(?P<name>{'|'.join(name.replace('-', '[-_]') for name in FIXED_FLAGS)})"
    r"(?:(?=\s|$)|=(?:\"[^\"]*\"|'[^']*'|\S+))"
)

_VALUE = re.compile(r"\s+(?:\"[^\"]*\"|'[^']*'|(?!-)\S+)")


class Converted(NamedTuple):
    """The command, and what changed in it."""

    command: list[str]
    args: list[str]
    dropped: tuple[str, ...] = ()  # flags removed, as written
    known: bool = True  # False: not exactly one launcher or script; nothing was changed


def convert(
    command: Sequence[str],
    args: Sequence[str],
    *,
    ranks: str = "",
    default: str = "",
    restarts: int = -1,
) -> Converted:
    """Convert the command and arguments of a container to run elasticrun. `ranks` per node and
    `restarts` become flags, unless the launcher already has them; `default`: ranks per node for a
    launcher if nothing else sets them."""
    extra = {"nproc-per-node": (ranks, default)}
    if restarts >= 0:
        extra["max-restarts"] = (str(restarts), str(restarts))
    words = [*command, *args]
    if _is_shell(words):
        at = next(n for n, word in enumerate(words) if n and re.fullmatch(r"-[a-z]*c", word)) + 1
        text, dropped = _convert_text(words[at], extra) if at < len(words) else ("", None)
        if dropped is None:
            return Converted(list(command), list(args), known=False)
        words[at] = text
        return Converted(words[: len(command)], words[len(command) :], dropped)
    return _convert_words(words, extra) or Converted(list(command), list(args), known=False)


_Extra = Mapping[str, tuple[str, str]]
"""By flag: the value that the job sets, and the value for a launcher if nothing else sets one."""


def _flags_to_add(extra: _Extra, own: str | None) -> list[str]:
    """Flags to add. `own`: the launcher's flags, None without a launcher."""
    made = []
    for name, (given, default) in extra.items():
        value = given or (default if own is not None else "")
        if value and not re.search(rf"(?:^|\s)--{name.replace('-', '[-_]')}[=\s]", own or ""):
            made.append(f"--{name}={value}")
    return made


def _is_shell(words: Sequence[str]) -> bool:
    named = bool(words) and words[0].rpartition("/")[2] in SHELLS
    return named and any(re.fullmatch(r"-[a-z]*c", word) for word in words[1:-1])


def _convert_words(words: Sequence[str], extra: _Extra) -> Converted | None:
    """Convert a command without a shell; None if its first word is no known launcher or Python."""
    name, rest = words[0].rpartition("/")[2] if words else "", list(words[1:])
    if re.fullmatch(r"python[0-9.]*", name):
        rest = rest[1:] if rest[:1] == ["-u"] else rest
        if not rest:
            return None
        if rest[0].startswith("-") and rest[0] != "-m":  # Python's own options
            return Converted(["elasticrun", *_flags_to_add(extra, None), "--no-python", *words], [])
        if rest[0] != "-m" or rest[1:2] not in (
            ["torch.distributed.run"],
            ["torch.distributed.launch"],
        ):
            return Converted(["elasticrun", *_flags_to_add(extra, None), *rest], [])
        rest = rest[2:]
    elif name not in ("torchrun", "dlrover-run"):
        return None
    script = script_at(rest)
    kept, dropped = [], []
    own = iter(rest[:script])
    for word in own:
        flag, equals, _ = word.partition("=")
        if flag[:2] != "--" or flag[2:].replace("_", "-") not in FIXED_FLAGS:
            kept.append(word)
            continue
        valued = not equals and flag[2:].replace("_", "-") not in SWITCHES
        dropped.append(f"{word} {next(own, '')}".strip() if valued else word)
    added = _flags_to_add(extra, " ".join([*kept, ""]))
    return Converted(["elasticrun", *added, *kept, *rest[script:]], [], tuple(dropped))


def script_at(words: Sequence[str]) -> int:
    """The index at which the launcher's own flags end. Not all flags are known, so this is an
    estimate: the first `-m`, word that ends in `.py`, or word that is neither a flag nor its
    value."""
    is_value = False
    for at, word in enumerate(words):
        if word.endswith(".py") or word in ("-m", "--module"):
            return at
        if not word.startswith("-") and not is_value:
            return at
        bare = "=" in word or word.lstrip("-").replace("_", "-") in SWITCHES
        is_value = word.startswith("-") and not bare
    return len(words)


def _convert_text(text: str, extra: _Extra) -> tuple[str, tuple[str, ...] | None]:
    """Convert the only launcher in shell text or, if there is none, the only Python script. Returns
    the new text and the removed flags; the text unchanged and None if there is not exactly one."""
    found = list(LAUNCHER.finditer(text))
    if not found:
        found = list(_SCRIPT.finditer(text))
        if len(found) != 1:
            return text, None
        bare = found[0]["options"].split() in ([], ["-u"])
        before, after = (
            text[: found[0].start()],
            text[found[0].end() if bare else found[0].start() :],
        )
        flags = [*_flags_to_add(extra, None), *([] if bare else ["--no-python"])]
        return " ".join([f"{before}elasticrun", *flags, after]), ()
    if len(found) != 1:
        return text, None
    before, rest = text[: found[0].start()], text[found[0].end() :]
    rest, dropped = _without_fixed_flags(rest)
    added = _flags_to_add(extra, rest[: _flags_end(rest)] + " ")
    return " ".join([f"{before}elasticrun", *added]) + rest, dropped


def _without_fixed_flags(rest: str) -> tuple[str, tuple[str, ...]]:
    """Remove FIXED_FLAGS before the script; later flags are the script's. Returns the text and
    the removed flags."""
    dropped = []
    end = _flags_end(rest)
    own, others = rest[:end], rest[end:]
    while found := _FLAG.search(own):
        stop = found.end()
        valued = "=" not in found[0] and found["name"].replace("_", "-") not in SWITCHES
        if valued and (value := _VALUE.match(own, stop)):
            stop = value.end()
        dropped.append(own[found.start() : stop].strip())
        own = own[: found.start()] + own[stop:]
    return own + others, tuple(dropped)


def _flags_end(rest: str) -> int:
    """An estimate of where the script begins: the first word that ends in `.py`, else `-m`, else
    the end of the simple command."""
    for pattern in (r"\s[^-\s]\S*\.py(?=[\s'\"]|$)", r"\s(?:-m|--module)\s", r"\n(?<!\\\n)|[;&|]"):
        if found := re.search(pattern, rest):
            return found.start()
    return len(rest)
