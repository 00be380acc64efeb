"""`elasticrun.json`: the content of a checkpoint, with hashes to detect any changed byte.

It is JSON. The first line has the checksum of everything that follows it. Each file is hashed in
blocks: its tensors in blocks of `block` bytes, then its opaque values as one block.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from typing import Any, Final

import xxhash

from elasticrun.snapshots.shm.layout import MAX_SIZE
from elasticrun.wire.types import MAX_USED, RoundName

VERSION: Final = 1
NAME: Final = "elasticrun.json"
MARKER: Final = ".metadata"
MAX_BYTES: Final = 256 * 1024 * 1024
MAX_FILES: Final = 1_000_000
MAX_TEXT: Final = 256

_FIRST: Final = re.compile(rb'\{"xxh3_64": "([0-9a-f]{16})",\n')
_HASH: Final = re.compile(r"[0-9a-f]{16}\Z")
_FILE_NAME: Final = re.compile(r"[A-Za-z0-9_.\-]{1,200}\Z")


class ManifestError(ValueError):
    """The bytes are not a manifest, or were changed."""


@dataclass(frozen=True, slots=True)
class FileEntry:
    """One data file, written by one rank."""

    name: str
    rank: int
    shared: bool  # whether it contains the rank's shared items, or only own ones
    layout: int  # Layout.key
    size: int
    stretch: int  # bytes of tensors at the start; the rest are opaque values
    block: int  # bytes of tensors that one hash covers
    hashes: tuple[int, ...]  # xxh3 (64 bits) of each block, then of the rest

    def spans(self) -> Iterator[tuple[int, int]]:
        """Yield start and end of what each hash covers."""
        for at in range(0, self.stretch, self.block):
            yield at, min(at + self.block, self.stretch)
        yield self.stretch, self.size


@dataclass(frozen=True, slots=True)
class Manifest:
    """Describes a complete checkpoint."""

    step: int
    round: RoundName
    world_size: int
    attempt: str
    reason: str  # periodic, breakpoint, asked
    torch: str
    marker_size: int
    marker_hash: int
    files: tuple[FileEntry, ...]
    used: str = ""  # what was used by this step of the work that is handed out


def encode(manifest: Manifest) -> bytes:
    """Encode a manifest as JSON, with a checksum."""
    body = json.dumps(
        {
            "version": VERSION,
            "step": manifest.step,
            "reason": manifest.reason,
            "attempt": manifest.attempt,
            "round": asdict(manifest.round),
            "world_size": manifest.world_size,
            "torch": manifest.torch,
            "marker": {"size": manifest.marker_size, "hash": _hex(manifest.marker_hash)},
            **({"used": manifest.used} if manifest.used else {}),
            "files": [plain_file(entry) for entry in manifest.files],
        },
        indent=1,
    ).encode("ascii")
    rest = body[1:].lstrip()
    return b'{"xxh3_64": "%s",\n' % _hex(xxhash.xxh3_64_intdigest(rest)).encode() + rest


def decode(data: bytes) -> Manifest:
    """The inverse of `encode`, with every number checked. Raises ManifestError."""
    first = _FIRST.match(data)
    if first is None:
        raise ManifestError("the file is not a manifest")
    rest = data[first.end() :]
    if int(first[1], 16) != xxhash.xxh3_64_intdigest(rest):
        raise ManifestError("the manifest is not what was written (its checksum differs)")
    try:
        return _manifest(json.loads(data))
    except ManifestError:
        raise
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise ManifestError(f"the manifest cannot be understood ({error!r:.100})") from None


def plain_file(entry: FileEntry) -> dict[str, Any]:
    """The entry in JSON form."""
    plain = {one.name: getattr(entry, one.name) for one in fields(entry)}
    return {**plain, "hashes": [_hex(h) for h in entry.hashes]}


def file_of(row: Any) -> FileEntry:
    """The inverse of `plain_file`, checked. Raises ManifestError, ValueError, TypeError or
    KeyError."""
    name = row["name"]
    if not isinstance(name, str) or not _FILE_NAME.match(name) or name in (".", ".."):
        raise ManifestError(f"{name!r:.40} is not a valid file name")
    entry = FileEntry(
        name=name,
        rank=_int(row["rank"]),
        shared=bool(row["shared"]),
        layout=_int(row["layout"], 2**63),
        size=_int(row["size"]),
        stretch=_int(row["stretch"]),
        block=_int(row["block"]),
        hashes=tuple(_hash(text) for text in _list(row["hashes"], MAX_FILES)),
    )
    if entry.stretch > entry.size or entry.block < 1:
        raise ManifestError(f"{entry.name} has impossible sizes")
    if len(entry.hashes) != -(-entry.stretch // entry.block) + 1:
        raise ManifestError(f"{entry.name} has a wrong number of hashes ({len(entry.hashes)})")
    return entry


def _manifest(plain: Any) -> Manifest:
    if plain["version"] != VERSION:
        raise ManifestError(
            f"the manifest has version {plain['version']}, which this version cannot read"
        )
    named, marker = plain["round"], plain["marker"]
    return Manifest(
        step=_int(plain["step"]),
        round=RoundName(_int(named["term"]), _int(named["number"]), _text(named["nonce"])),
        world_size=_int(plain["world_size"]),
        attempt=_text(plain["attempt"]),
        reason=_text(plain["reason"]),
        torch=_text(plain["torch"]),
        marker_size=_int(marker["size"]),
        marker_hash=_hash(marker["hash"]),
        files=tuple(file_of(row) for row in _list(plain["files"], MAX_FILES)),
        used=_text(plain.get("used", ""), MAX_USED),
    )


def _hex(number: int) -> str:
    return f"{number:016x}"


def _hash(text: Any) -> int:
    if not isinstance(text, str) or not _HASH.match(text):
        raise ManifestError(f"{text!r:.40} is not a hash")
    return int(text, 16)


def _int(number: Any, below: int = MAX_SIZE) -> int:
    if type(number) is not int or not 0 <= number < below:
        raise ManifestError(f"{number!r:.40} is not a valid number here")
    return number


def _text(text: Any, most: int = MAX_TEXT) -> str:
    if not isinstance(text, str) or len(text) > most:
        raise ManifestError(f"{text!r:.40} is not valid text here")
    return text


def _list(rows: Any, most: int) -> list[Any]:
    if not isinstance(rows, list) or len(rows) > most:
        raise ManifestError("a list in the manifest is invalid or too long")
    return rows
