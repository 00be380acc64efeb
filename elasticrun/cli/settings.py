"""The user's settings: parsers for values with a grammar, and the value and source of each flag.
Pure; the parsers raise `UsageError`.

`cli.place` chooses a scheduler's values for flags that were not given. It is separate, because most
commands run without a scheduler and must not wait for the import of detection.
"""

from __future__ import annotations

import argparse
import re
import signal
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from elasticrun import config
from elasticrun.cli.table import FLAGS, Flag
from elasticrun.wire.messages import MAX_NODES, CheckSpec, JobSpec, SaveSpec, WatchSpec
from elasticrun.wire.types import MAX_NAME, MAX_SECONDS

if TYPE_CHECKING:
    from elasticrun.cli.detection.found import Found, Given


C10D_PORT: Final = 29400
"""Default port of an endpoint (torchrun's, for c10d)."""

STATIC_PORT: Final = 29500
"""Default --master-port (torchrun's)."""

_HOST = re.compile(r"(?!:\Z)[\w.:%-]+\Z")
_JOB_NAME = re.compile(r"[\w.+=@,%][\w.+=@,%-]{,127}")
_MODULE = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*\Z")


class UsageError(Exception):
    """One sentence for the user: what is impossible, and what to do instead.

    `exit_code` is 2, because the same command fails at every try, unless the cause is not the
    command line. With --exit-codes=scheduler, `for_scheduler` replaces it.
    """

    usual = config.EXIT_USAGE
    for_scheduler = config.EXIT_USAGE

    def __init__(self, sentence: str, exit_code: int | None = None) -> None:
        super().__init__(sentence)
        self.exit_code = self.usual if exit_code is None else exit_code


class NotHere(UsageError):
    """Something is missing on this machine; another machine, or a later try, may have it."""

    usual = config.EXIT_FAILED
    for_scheduler = config.EXIT_FAILED


class NoProgram(UsageError):
    """The script or program does not exist or cannot be run."""

    for_scheduler = config.EXIT_FINAL


class NothingToDo(Exception):
    """This process has no part in the job, which is not a failure."""


def nodes(text: str, flag: str = "--nnodes") -> tuple[int, int]:
    """Parse `N` or `MIN:MAX`: the minimum and maximum number of nodes."""
    parts = text.split(":")
    try:
        numbers = [int(part) for part in parts]
    except ValueError:
        numbers = []
    if len(numbers) not in (1, 2):
        raise UsageError(f"{flag}={text} is neither a number of nodes nor MIN:MAX")
    low, high = numbers[0], numbers[-1]
    if not 0 < low <= high:
        raise UsageError(f"{flag}={text}: the smallest number of nodes must be at least 1, and "
                         "not above the largest")  # fmt: skip
    if high > MAX_NODES:
        raise UsageError(f"{flag}={text}: more than {MAX_NODES} nodes are not supported")
    return low, high


def name(text: str, flag: str) -> str:
    """A name sent over the wire: printable, at most MAX_NAME characters."""
    if len(text) > MAX_NAME:
        raise UsageError(f"{flag}: a name has at most {MAX_NAME} characters, not {len(text)}")
    if not text.isprintable():
        raise UsageError(f"{flag}={text!r} contains a character that cannot be printed")
    return text


def job_name(given: str, otherwise: str) -> str:
    """The job's name: --name, else derived from `otherwise`. Printed commands contain it, so a
    shell must read it as one word."""
    if not given:
        return re.sub(r"\A-|[^\w.+=@,%-]", "_", otherwise)[:128]
    if not _JOB_NAME.fullmatch(given):
        raise UsageError(
            f"--name={given!r}: a job's name may only contain letters, digits and . _ - + = @ , "
            "%; at "
            "most 128 characters, and no - at the start",
            config.EXIT_USAGE,
        )
    return given


def endpoint(text: str, default_port: int | None, flag: str) -> tuple[str, int]:
    """Parse `HOST`, `HOST:PORT` or `[IPv6]:PORT`: the host without brackets, and the port.

    The last group of an IPv6 address without brackets is the port, as under torchrun.
    """
    text = text.strip()
    before, colon, after = text.rpartition(":")
    if not colon or text.endswith("]") or before.endswith(":"):
        named, port_text = text, None
    else:
        named, port_text = before, after
    host = host_name(named, flag)
    if port_text is None:
        if default_port is None:
            raise UsageError(f"{flag}={text} has no port: write HOST:PORT")
        return host, default_port
    if not re.fullmatch(r"[0-9]{1,5}", port_text) or int(port_text) > 65535:
        raise UsageError(f"{flag}={text}: the port must be a number from 0 to 65535")
    return host, int(port_text)


def host_name(text: str, flag: str) -> str:
    """A host name or an address; an IPv6 address may be in brackets."""
    text = text.strip()
    bare = text[1:-1] if text.startswith("[") and text.endswith("]") else text
    if not _HOST.match(bare):
        raise UsageError(f"{flag}: {text!r} is neither a host name nor an address")
    return bare


def data(text: str) -> dict[str, str]:
    """Parse `NAME:/PATH,...` of --data: paths by name."""
    found: dict[str, str] = {}
    for item in filter(None, map(str.strip, text.split(","))):
        label, _, path = item.partition(":")
        named = re.fullmatch(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?", label)
        if not named or not re.fullmatch("/[^:]*[^:/][^:]*", path):
            raise UsageError(
                f"--data={item}: write NAME:/PATH, with a name of lower case letters, digits "
                "and -, and no colon in the path",
                config.EXIT_USAGE,
            )
        if path in found.values() or label in found:
            raise UsageError(f"--data={item} is given twice", config.EXIT_USAGE)
        found[label] = path
    return found


def port(number: int, flag: str) -> int:
    """A TCP port."""
    if not 0 <= number <= 65535:
        raise UsageError(f"{flag}={number}: a port is a number from 0 to 65535")
    return number


def pairs(text: str) -> dict[str, str]:
    """Parse `key=value,key=value` of --rdzv-conf."""
    found: dict[str, str] = {}
    if not text.strip():
        return found
    for item in text.split(","):
        key, _, value = (part.strip() for part in item.partition("="))
        if not key or not value:
            raise UsageError(f"--rdzv-conf={text}: {item!r} is not KEY=VALUE")
        found[key] = value
    return found


def seconds(text: str, name: str, *, zero: bool = False) -> float:
    """Parse a time in seconds, above 0 (or 0 if `zero` allows it); it may be fractional."""
    try:
        value = float(text)
    except ValueError:
        value = float("nan")
    if not (value > 0 or (zero and value == 0)) or value == float("inf"):
        expected = "neither 0 nor" if zero else "not"
        raise UsageError(f"{name}={text} is {expected} a positive number of seconds")
    if value > MAX_SECONDS:
        raise UsageError(f"{name}={text}: the maximum is {MAX_SECONDS:g} s")
    return value


def boolean(text: str, name: str) -> bool:
    """Parse 1/0, true/false, yes/no, t/f, y/n."""
    word = text.lower()
    if word in ("1", "true", "t", "yes", "y"):
        return True
    if word in ("0", "false", "f", "no", "n"):
        return False
    raise UsageError(f"{name}={text} is neither 1 nor 0")


def streams(text: str, flag: str) -> tuple[int, dict[int, int]]:
    """Parse the value of -r and -t: one digit for all ranks, or `LOCAL_RANK:DIGIT,...`.

    Digits: 0 none, 1 stdout, 2 stderr, 3 both. Returns the digit for ranks that are not named, and
    the digits of named local ranks.
    """
    if re.fullmatch(r"[0-3]", text):
        return int(text), {}
    if re.fullmatch(r"[0-9]+:[0-3](,[0-9]+:[0-3])*", text):
        items = (item.split(":") for item in text.split(","))
        return 0, {int(rank): int(value) for rank, value in items}
    raise UsageError(
        f"{flag}={text} is neither 0, 1, 2 or 3 nor a list like 0:3,1:1 of local ranks and streams"
    )


def ranks(text: str, flag: str) -> tuple[int, ...] | None:
    """Parse comma-separated local ranks: sorted, or None for an empty text, which means all."""
    if not text:
        return None
    try:
        return tuple(sorted({int(item) for item in text.split(",")}))
    except ValueError:
        raise UsageError(
            f"{flag}={text} is not a comma-separated list of local ranks, like 0,1,2"
        ) from None


def signals(text: str) -> tuple[str, ...]:
    """Parse the comma-separated names of signals, which a process must be able to handle."""
    names = tuple(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    for name in names:
        if name not in signal.Signals.__members__:
            raise UsageError(f"--signals-to-handle: {name} is not a signal on this system")
        if name in ("SIGKILL", "SIGSTOP"):
            raise UsageError(f"--signals-to-handle: {name} cannot be handled by any process")
    return names


def modules(text: str) -> tuple[str, ...]:
    """Parse --preload: names of modules. "" and `off` mean none."""
    words = [word.strip() for word in text.split(",") if word.strip()]
    for word in words:
        if not _MODULE.match(word):
            raise UsageError(f"--preload: {word!r} is not the name of a module", config.EXIT_USAGE)
    if "off" in words:
        if len(words) > 1:
            raise UsageError("--preload: off cannot be combined with modules", config.EXIT_USAGE)
        return ()
    if "learn" in words:
        raise UsageError(
            "--preload: learn was removed, because extra imports can change a script's behaviour; "
            "name the modules (see docs/warm.md for the cost)",
            config.EXIT_USAGE,
        )
    return tuple(dict.fromkeys(words))


def standby(text: str) -> float:
    """Parse --standby: seconds after the start of ranks, -1 for none."""
    named = {"off": -1.0, "auto": config.STANDBY_AFTER}
    return named[text] if text in named else seconds(text, "--standby", zero=True)


SCHEDULER_PREFIXES: Final = (
    "SLURM_JOB",
    "KUBERNETES_SERVICE_HOST",
    "JOB_COMPLETION_INDEX",
    "LWS_",
    "VC_TASK_INDEX",
    "VK_TASK_INDEX",
    "DLROVER_MASTER_ADDR",
    "SKYPILOT_",
)
"""Prefixes of variable names; without any such variable no scheduler can be detected."""


@dataclass(frozen=True, slots=True)
class DetectedPlace:
    """The scheduler's values for this command.

    found: what was detected. filled: values for flags, by dest. shown: values to display by dest,
    which apply without being flags. note: one line about what was detected and how it is used, ""
    for none. idle: why this process has nothing to do, "" if it has. by: the flag or variable that
    names the rendezvous, "" for none."""

    found: Found | None = None
    filled: Mapping[str, Given] = field(default_factory=dict)
    note: str = ""
    idle: str = ""
    by: str = ""
    shown: Mapping[str, Given] = field(default_factory=dict)


NOT_DETECTED: Final = DetectedPlace()


_BY_DEST: dict[str, Flag] = {flag.dest: flag for flag in FLAGS}


@dataclass
class FlagValues:
    """A namespace of parsed flags, and the environment.

    The namespace may be torch's or accelerate's: a flag that it lacks has our default. `filled`:
    values from detection for flags that were not given.
    """

    ns: argparse.Namespace
    environ: Mapping[str, str]
    filled: Mapping[str, Given] = field(default_factory=dict)

    def value(self, dest: str) -> Any:
        """The value of a flag, whatever its type."""
        if dest in self.filled:
            return self.filled[dest].value
        flag = _BY_DEST[dest]
        default = False if flag.kind is None else flag.default
        return getattr(self.ns, dest, default)

    def text(self, dest: str) -> str:
        """The value of a text flag ("" if unset)."""
        value = self.value(dest)
        return "" if value is None else str(value)

    def number(self, dest: str) -> int:
        """The value of an integer flag."""
        return int(self.value(dest))

    def switch(self, dest: str) -> bool:
        """Whether a switch is on."""
        return bool(self.value(dest))

    def source(self, dest: str) -> str:
        """The source of a value: the flag as typed, a variable, the scheduler's variable, "the
        caller" for another parser's namespace, or "default"."""
        if dest in self.filled:
            return self.filled[dest].source
        given: Mapping[str, str] = getattr(self.ns, "given", {})
        if dest in given:
            return given[dest]
        flag = _BY_DEST[dest]
        name = flag.variable_in(self.environ)
        if name and self.environ[name]:
            return f"${name}"
        default: Any = list(flag.default) if isinstance(flag.default, tuple) else flag.default
        if self.value(dest) != (bool(default) if flag.kind is None else default):
            return "the caller"  # a namespace from another parser
        return "default"

    def is_given(self, dest: str) -> bool:
        """Whether the value was given: by a flag or a variable, by another parser's namespace, or
        by the scheduler."""
        return self.source(dest) != "default"


class Setting(NamedTuple):
    """A row for display: a flag without its dashes, its value as text, and the source."""

    name: str
    value: str
    source: str


def setting(flags: FlagValues, dest: str) -> Setting:
    """The row of a flag; a value of None or an empty list is shown as ""."""
    value = flags.value(dest)
    shown = "" if value is None or value == [] else str(value)
    return Setting(_BY_DEST[dest].name[2:], shown, flags.source(dest))


CALLED: Final = {
    "job_id": "rdzv_id",
    "min_nodes": "nnodes",
    "max_nodes": "nnodes",
    "scheduler_codes": "exit_codes",
    "network": "network_check",
    "perf": "comm_perf_test",
    "perf_floor": "comm_perf_threshold",
    "exclude_stragglers": "exclude_straggler",
    "slow_ratio": "straggler_ratio",
    "slow_for": "straggler_time",
    "probe_limit": "probe_timeout",
    "at_breakpoint": "save_at_breakpoint",
    "limit": "save_limit",
}
"""Fields of the job's spec whose flag, or key of --rdzv-conf, has another name."""


def sources(flags: FlagValues, conf: Mapping[str, str]) -> dict[str, str]:
    """The source of each field of the job's spec that was given, by the field's name."""
    found = {}
    for kind in (JobSpec, CheckSpec, SaveSpec, WatchSpec):
        for name in kind.__struct_fields__:
            dest = CALLED.get(name, name)
            if dest in _BY_DEST and flags.is_given(dest):
                found[name] = flags.source(dest)
            elif dest in conf:
                found[name] = "--rdzv-conf"
    return found
