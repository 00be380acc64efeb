"""The description of a written part, which a saver sends to the coordinator's saver.

Works without torch, which a saver imports only after it has reported to its agent.
"""

from __future__ import annotations

import json
import struct
import zlib
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final

from elasticrun.snapshots.shm.layout import (
    MAX_ITEMS,
    MAX_LAYOUT_BYTES,
    MAX_SIZE,
    ItemKind,
    Layout,
    LayoutError,
    decode,
    items_of,
    stretch_of,
)
from elasticrun.snapshots.storage.manifest import FileEntry, ManifestError, file_of, plain_file
from elasticrun.wire.types import MAX_ATTEMPT, RoundName

_LENGTH: Final = struct.Struct("<I")

MAX_BYTES: Final = 2 * MAX_LAYOUT_BYTES
"""Maximum size of an encoded description, with its layout."""

MAX_LAYOUTS: Final = 64
"""Maximum number of decoded layouts that are cached."""


class PartError(ValueError):
    """The bytes are not a valid description of a part."""


@dataclass(frozen=True, slots=True)
class PartWritten:
    """Describes one rank's part, which is on stable storage. `lengths`: bytes of each opaque value
    in its file. `places`: the location of each item there (dcp.metadata.PartFile); () if as in the
    layout."""

    file: FileEntry
    step: int
    round: RoundName
    attempt: str
    torch: str
    lengths: tuple[int, ...]
    places: tuple[tuple[int, int], ...]
    layout: Layout

    def encode(self) -> bytes:
        """Encode as compressed JSON, followed by the layout. Raises LayoutError if the layout is
        too long."""
        plain = {
            "file": plain_file(self.file),
            "step": self.step,
            "round": [self.round.term, self.round.number, self.round.nonce],
            "attempt": self.attempt,
            "lengths": self.lengths,
            "places": self.places,
        }
        text = zlib.compress(json.dumps(plain, separators=(",", ":")).encode("ascii"), 1)
        return _LENGTH.pack(len(text)) + text + self.layout.encode()

    @classmethod
    def decode(cls, data: bytes) -> PartWritten:
        """The inverse of `encode`, with every number checked. Raises PartError."""
        if len(data) > MAX_BYTES or len(data) < _LENGTH.size:
            raise PartError(f"{len(data)} bytes are not a part")
        (length,) = _LENGTH.unpack_from(data)
        try:
            layout = _layout(data[_LENGTH.size + length :])
            stream = zlib.decompressobj()
            text = stream.decompress(data[_LENGTH.size : _LENGTH.size + length], MAX_LAYOUT_BYTES)
            if not stream.eof:
                raise PartError("a part is too long or truncated")
            return _checked(json.loads(text), layout)
        except (LayoutError, ManifestError) as error:
            raise PartError(f"invalid part: {error}") from None
        except PartError:
            raise
        except (ValueError, TypeError, KeyError, zlib.error, RecursionError) as error:
            raise PartError(f"invalid part ({type(error).__name__})") from None


@lru_cache(maxsize=MAX_LAYOUTS)
def _layout(encoded: bytes) -> Layout:
    """Decode a layout. Cached, because a rank's layout is the same for every checkpoint of a
    round."""
    return decode(encoded)


def _checked(plain: Any, layout: Layout) -> PartWritten:
    file = file_of(plain["file"])
    term, number, nonce = plain["round"]
    attempt = plain["attempt"]
    lengths = tuple(plain["lengths"])
    places = tuple((offset, length) for offset, length in plain["places"])
    numbers = [plain["step"], term, number, *lengths, *(n for place in places for n in place)]
    if (
        not all(type(n) is int and 0 <= n < MAX_SIZE for n in numbers)
        or len(numbers) > 3 * MAX_ITEMS
    ):
        raise PartError("a part has impossible sizes")
    if not isinstance(nonce, str) or len(nonce) > MAX_ATTEMPT:
        raise PartError("a part has no round")
    if not isinstance(attempt, str) or len(attempt) > MAX_ATTEMPT:
        raise PartError("a part has no attempt")
    if file.layout != layout.key:
        raise PartError("a part is of another layout than it states")
    if not places:
        values = sum(i.kind is ItemKind.BYTES for i in items_of(layout, file.shared))
        stretch = stretch_of(layout, file.shared)
        sizes = (len(lengths), file.stretch, file.size)
        if sizes != (values, stretch, stretch + sum(lengths)):
            raise PartError(f"{file.name} is not as long as its items are together")
    elif any(offset + length > file.size for offset, length in places):
        raise PartError("an item reaches beyond the file of its part")
    return PartWritten(
        *(file, plain["step"], RoundName(term, number, nonce), attempt, layout.torch),
        *(lengths, places, layout),
    )
