"""Parses words of a command line that have their own grammar. The functions raise `Invalid`."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

from elasticrun.jobs.render import checks
from elasticrun.jobs.render.checks import Invalid
from elasticrun.jobs.render.settings import Toleration, Volume

VOLUME_FORM: Final = (
    "NAME=KIND:SOURCE:/MOUNT[:ro], where KIND:SOURCE is pvc:CLAIM, csi:DRIVER,KEY=VALUE,..., "
    "host:/PATH, empty:SIZE, secret:NAME or configmap:NAME"
)

_DURATION = re.compile(
    r"(?:(?P<days>\d+)-(?P<dh>\d+)(?::(?P<dm>\d+)(?::(?P<ds>\d+))?)?"
    r"|(?P<h>\d+):(?P<hm>\d+):(?P<hs>\d+)|(?P<m>\d+)(?::(?P<s>\d+))?)"
)


def pairs(items: Iterable[str], flag: str) -> dict[str, str]:
    """Parse `KEY=VALUE` items; the value may be empty or contain equals signs."""
    found: dict[str, str] = {}
    for item in items:
        key, equals, value = item.partition("=")
        if not key or not equals:
            raise Invalid(f"{flag} {item!r} is not KEY=VALUE")
        if key in found:
            raise Invalid(f"{flag} {key} is given twice")
        found[key] = value
    return found


def volume(text: str) -> Volume:
    """Parse one volume in the form VOLUME_FORM."""
    name, equals, rest = text.partition("=")
    read_only = rest.endswith(":ro")
    rest = rest.removesuffix(":ro")
    where, colon, mount = rest.rpartition(":/")
    kind, second_colon, source = where.partition(":")
    if not (name and equals and colon and second_colon and source) or kind not in _SOURCES:
        raise Invalid(f"--volume {text!r} is not {VOLUME_FORM}")
    return Volume(name, f"/{mount}", _SOURCES[kind](source, f"--volume {name}"), read_only)


def _csi(text: str, what: str) -> Mapping[str, Any]:
    # Two commas stand for one inside a value, as in --duplicate-stdout-filters, because mount
    # options contain commas.
    words = [word.replace("\0", ",") for word in text.replace(",,", "\0").split(",")]
    driver = checks.subdomain(words[0], f"{what}: the driver")
    attributes = pairs(words[1:], f"{what}: the attribute")
    for key, value in attributes.items():
        checks.plain(value, f"{what}: {key}")
    return {"csi": {"driver": driver, **({"volumeAttributes": attributes} if attributes else {})}}


_SOURCES: Final[Mapping[str, Callable[[str, str], Mapping[str, Any]]]] = {
    "pvc": lambda t, what: {"persistentVolumeClaim": {"claimName": checks.subdomain(t, what)}},
    "csi": _csi,
    "host": lambda t, what: {"hostPath": {"path": checks.path(t, what)}},
    "empty": lambda t, what: {"emptyDir": {"sizeLimit": checks.quantity(t, what, memory=True)}},
    "secret": lambda t, what: {"secret": {"secretName": checks.subdomain(t, what)}},
    "configmap": lambda t, what: {"configMap": {"name": checks.subdomain(t, what)}},
}


def toleration(text: str) -> Toleration:
    """Parse `KEY` or `KEY=VALUE`, either with `:EFFECT`; or `all`."""
    if text == "all":
        return Toleration("")
    taint, _, effect = text.partition(":")
    key, equals, value = taint.partition("=")
    if not key:
        raise Invalid(f"--toleration {text!r} is neither KEY[=VALUE][:EFFECT] nor all")
    return Toleration(key, value if equals else None, effect)


def duration(text: str, flag: str) -> int:
    """Seconds of a time limit in Slurm's form (minutes, H:M:S, D-H, D-H:M:S, ...)."""
    match = _DURATION.fullmatch(text)
    if not match:
        raise Invalid(f"{flag} {text!r} is not a Slurm time: write MINUTES, H:MM:SS or D-HH:MM:SS")
    part = {key: int(value or 0) for key, value in match.groupdict().items()}
    if part["dh"] > 23 or max(part["dm"], part["hm"], part["ds"], part["hs"], part["s"]) > 59:
        raise Invalid(f"{flag} {text}: an hour has 60 minutes, a minute 60 seconds, a day 24 hours")
    seconds = part["days"] * 86400
    seconds += (part["dh"] + part["h"]) * 3600 + (part["dm"] + part["hm"] + part["m"]) * 60
    seconds += part["ds"] + part["hs"] + part["s"]
    if not 0 < seconds <= 10 * 366 * 86400:
        raise Invalid(f"{flag} {text}: it must be above 0 and below ten years")
    return seconds
