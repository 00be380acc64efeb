"""Validates names, quantities and versions for Kubernetes and Slurm, one function each.

A validator returns its text (or the parsed value), or raises `Invalid` with one sentence that says
what is wrong and what is allowed. `what` names the setting in that sentence.
"""

from __future__ import annotations

import re
from typing import Final

from elasticrun.wire.env import GIT_PASSWORDS

MAX_LABEL: Final = 63
MAX_SUBDOMAIN: Final = 253
MAX_TEXT: Final = 128 * 1024
"""Longest argument or value in characters: the kernel's limit for one word of a command line."""

_LABEL = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?")
_SUBDOMAIN = re.compile(rf"{_LABEL.pattern}(\.{_LABEL.pattern})*")
_QUALIFIED = re.compile(r"[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?")
_QUANTITY = re.compile(r"([0-9]+(?:\.[0-9]+)?)(m|k|M|G|T|P|E|Ki|Mi|Gi|Ti|Pi|Ei)?")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_VERSION = re.compile(r"v?(\d{1,3})\.(\d{1,3})(\.\d+)?(\D.*)?")
_DIGEST = re.compile(r"[a-z0-9]+(?:[.+_-][a-z0-9]+)*:[0-9a-fA-F]{32,}")
_TAG = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}")
_REPOSITORY = re.compile(
    r"(?:[A-Za-z0-9][A-Za-z0-9.-]*(?::[0-9]+)?/)?"
    r"[a-z0-9]+(?:(?:[._]|__|-+)[a-z0-9]+)*(?:/[a-z0-9]+(?:(?:[._]|__|-+)[a-z0-9]+)*)*"
)
_FLOATING: Final = frozenset(
    ("latest", "main", "master", "dev", "devel", "test", "testing", "nightly", "edge", "head",
     "stable", "release", "current", "snapshot")
)  # fmt: skip
_UNITS: Final = {
    "m": 0.001, "": 1.0, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15, "E": 1e18,
    "Ki": 2.0**10, "Mi": 2.0**20, "Gi": 2.0**30, "Ti": 2.0**40, "Pi": 2.0**50, "Ei": 2.0**60,
}  # fmt: skip


class Invalid(ValueError):
    """An invalid setting; the message is one sentence for the user."""


def label(text: str, what: str, *, longest: int = MAX_LABEL) -> str:
    """A DNS-1123 label: lower case letters, digits and dashes (not first or last), at most
    `longest` characters."""
    if not _LABEL.fullmatch(text):
        raise Invalid(
            f"{what} {text!r}: Kubernetes requires lower case letters, digits and dashes, with a "
            "letter or digit first and last"
        )
    if len(text) > longest:
        raise Invalid(f"{what} {text!r} has {len(text)} characters: the maximum is {longest}")
    return text


def job_name(text: str, longest: int, last: str) -> str:
    """Validate --name, which becomes part of pod host names and of a Service name. `last`: the
    longest name built from it."""
    label(text, "--name", longest=MAX_LABEL)
    if not text[0].isalpha():
        raise Invalid(f"--name {text!r}: the name of a Service begins with a letter")
    if len(text) > longest:
        raise Invalid(
            f"--name {text!r} has {len(text)} characters and may have {longest}: names such as "
            f"{last} have {MAX_LABEL} at most"
        )
    return text


def subdomain(text: str, what: str) -> str:
    """A DNS-1123 subdomain: the name of most objects."""
    if not _SUBDOMAIN.fullmatch(text) or len(text) > MAX_SUBDOMAIN:
        raise Invalid(
            f"{what} {text!r}: the name of an object has lower case letters, digits, dashes and "
            f"dots, and {MAX_SUBDOMAIN} characters at most"
        )
    return text


def label_key(text: str, what: str) -> str:
    """A key of a label or an annotation: `name` or `domain/name`."""
    prefix, slash, name = text.rpartition("/")
    if slash:
        subdomain(prefix, f"{what}: the part before / of")
    if not _QUALIFIED.fullmatch(name) or len(name) > MAX_LABEL:
        raise Invalid(
            f"{what}: {text!r} is not a valid key: NAME or DOMAIN/NAME, with letters, digits, "
            "dashes, "
            f"underscores and dots in NAME, {MAX_LABEL} at most"
        )
    return text


def label_value(text: str, what: str) -> str:
    """The value of a label; it may be empty."""
    if text and (not _QUALIFIED.fullmatch(text) or len(text) > MAX_LABEL):
        raise Invalid(
            f"{what}: {text!r} is not a valid label value: letters, digits, dashes, underscores "
            "and "
            f"dots, {MAX_LABEL} at most"
        )
    return text


def resource(text: str, what: str) -> str:
    """The name of an extended resource: DOMAIN/NAME."""
    if "/" not in text:
        raise Invalid(f"{what} {text!r}: a device's resource is DOMAIN/NAME, like nvidia.com/gpu")
    return label_key(text, what)


def quantity(text: str, what: str, *, memory: bool = False) -> str:
    """A Kubernetes quantity above 0, such as 500m, 8 or 64Gi; `memory`: bytes, at least 1Mi."""
    match = _QUANTITY.fullmatch(text)
    if not match:
        example = "8Gi, 512Mi" if memory else "8, 500m"
        raise Invalid(f"{what} {text!r} is not a Kubernetes quantity: write it like {example}")
    if amount(text) <= 0:
        raise Invalid(f"{what} {text!r}: it must not be 0")
    if memory and amount(text) < _UNITS["Mi"]:
        raise Invalid(f"{what} {text!r} is less than one MiB: the units are Ki, Mi, Gi and Ti")
    return text


def amount(text: str) -> float:
    """The value, in bytes or cores, of a quantity that `quantity` has validated."""
    match = _QUANTITY.fullmatch(text)
    assert match is not None
    return float(match[1]) * _UNITS[match[2] or ""]


def variable(text: str, what: str) -> str:
    """The name of an environment variable."""
    if not _VARIABLE.fullmatch(text):
        raise Invalid(f"{what}: {text!r} is not a valid name of an environment variable")
    return text


def setting(
    key: str, value: str, place: str, token: str, password: str = "export it for this command"
) -> None:
    """Validate a variable that --env sets on every node; returns nothing. Refuses secrets, because
    they would be stored in `place`. `token`, `password`: what to do instead with the job's token,
    and with git's password."""
    variable(key, "--env")
    plain(value, f"--env {key}")
    instead = token if key == "ELASTICRUN_TOKEN" else password if key in GIT_PASSWORDS else ""
    if instead:
        raise Invalid(f"--env {key} would put the secret into the {place}: {instead}")


def path(text: str, what: str) -> str:
    """An absolute path inside the container, without a colon."""
    if not text.startswith("/") or ":" in text:
        raise Invalid(f"{what}: {text!r} is not an absolute path without a colon")
    return plain(text, what)


def plain(text: str, what: str) -> str:
    """Text that can be written to a manifest: UTF-8, no NUL, limited length."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise Invalid(f"{what}: {text!r} is not UTF-8, which a manifest requires") from None
    if "\0" in text:
        raise Invalid(f"{what}: {text!r} contains a NUL")
    if len(text) > MAX_TEXT:
        raise Invalid(f"{what}: {len(text)} characters are too many; the maximum is {MAX_TEXT}")
    return text


def version(text: str, what: str) -> tuple[int, int]:
    """`1.34` or `v1.34.2`: major and minor number."""
    match = _VERSION.fullmatch(text)
    if not match:
        raise Invalid(f"{what} {text!r} is not a version: write it like 1.34")
    return int(match[1]), int(match[2])


def image(text: str) -> str:
    """The reference of a container image: [HOST/]PATH[:TAG][@DIGEST]."""
    name, at, digest = text.partition("@")
    repository, tag = _split_tag(name)
    good = _REPOSITORY.fullmatch(repository) and (tag is None or _TAG.fullmatch(tag))
    if not good or (at and not _DIGEST.fullmatch(digest)):
        raise Invalid(
            f"--image {text!r} is not an image: write [HOST/]NAME[:TAG] or NAME@sha256:DIGEST"
        )
    return text


def has_floating_tag(text: str) -> bool:
    """Whether the tag of an image reference is expected to move, or is missing, so that pods of one
    job may get different images."""
    if "@" in text:
        return False
    _, tag = _split_tag(text)
    return tag is None or tag.lower() in _FLOATING


def _split_tag(name: str) -> tuple[str, str | None]:
    repository, colon, tag = name.rpartition(":")
    if not colon or "/" in tag:  # a colon before a slash belongs to the host's port
        return name, None
    return repository, tag
