"""The items of a rank's snapshot, and the location of each item in a slot.

An item is what torch's DCP calls a write item: one chunk of one tensor, or one opaque value that
the rank has serialized. A tensor has the same form in a slot as in a checkpoint's file: inside the
envelope that `torch.save` writes around it (`head` and `tail` bytes), so that whole stretches of a
slot can be written to storage unchanged. *Own* items belong to one rank alone (its random states,
its data loader); *shared* ones are chunks of the job's common state, and replicas of a chunk are
equal.

In a slot, own tensors come first, then shared ones, each group starting at a page; then the space
for opaque values, whose lengths vary from step to step (`shm.segment`).
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from hashlib import blake2b
from typing import Any, Final, NamedTuple

PAGE: Final = 4096
"""Bytes; the alignment that O_DIRECT and mappings require."""

LINE: Final = 64
"""Extents start at multiples of this many bytes, like torch's tensors in files."""

MAX_ITEMS: Final = 1_000_000
MAX_DIMENSIONS: Final = 64
MAX_LAYOUT_BYTES: Final = 256 * 1024 * 1024
"""Maximum size of an encoded layout before compression."""
MAX_SIZE: Final = 2**53
"""Maximum number of bytes or elements; larger numbers are invalid."""


class LayoutError(ValueError):
    """The bytes are not a valid layout."""


class ItemKind(StrEnum):
    """DCP's kinds of write items."""

    TENSOR = "tensor"  # a whole tensor
    SHARD = "shard"  # a chunk of a sharded tensor
    BYTES = "bytes"  # an opaque value


_KINDS: Final = {str(kind): kind for kind in ItemKind}


class Item(NamedTuple):
    """One item. `extent`: the offset of its envelope in bytes from the first tensor of the slot; 0
    for BYTES, which have a position in the layout's order instead. (A tuple for speed: a restore
    creates one for every tensor while training waits.)"""

    fqn: str  # DCP's flat name
    path: tuple[str | int, ...]  # its path in the nested state
    kind: ItemKind
    own: bool
    dtype: str = ""  # torch's name, without "torch."
    shape: tuple[int, ...] = ()  # of the whole tensor, in elements
    offsets: tuple[int, ...] = ()  # of this chunk
    sizes: tuple[int, ...] = ()
    requires_grad: bool = False
    extent: int = 0
    head: int = 0
    nbytes: int = 0  # of the payload
    tail: int = 0
    buffer: bool = False  # of a module: replicas need not be equal

    @property
    def length(self) -> int:
        """Bytes of the envelope with its payload, as in a checkpoint's metadata."""
        return self.head + self.nbytes + self.tail

    @property
    def payload(self) -> int:
        """Offset of the tensor's elements from the first tensor of the slot."""
        return self.extent + self.head


@dataclass(frozen=True)
class Layout:
    """All items of one rank: tensors first (own ones, then shared ones), then opaque values (own,
    then shared). `values_capacity`: space in a slot for the opaque values and their table."""

    items: tuple[Item, ...]
    own_bytes: int  # of the own tensors; a multiple of PAGE
    shared_bytes: int  # of the shared tensors; a multiple of PAGE
    values_capacity: int  # a multiple of PAGE
    torch: str  # torch version that made the envelopes

    @cached_property
    def tensors(self) -> tuple[Item, ...]:
        return tuple(item for item in self.items if item.kind is not ItemKind.BYTES)

    @cached_property
    def values(self) -> tuple[Item, ...]:
        """The opaque values, in the order of the slot's table."""
        return tuple(item for item in self.items if item.kind is ItemKind.BYTES)

    @cached_property
    def compared(self) -> tuple[Item, ...]:
        """The tensors that replicas must have in common, by name: the shared ones without
        buffers."""
        found = (item for item in self.tensors if not item.own and not item.buffer)
        return tuple(sorted(found, key=lambda item: (item.fqn, item.offsets)))

    @property
    def tensor_bytes(self) -> int:
        """Bytes of own and shared tensors: the offset of the opaque values."""
        return self.own_bytes + self.shared_bytes

    @property
    def slot_bytes(self) -> int:
        """Bytes of one slot, without its header page."""
        return self.tensor_bytes + self.values_capacity

    @cached_property
    def key(self) -> int:
        """A 64-bit hash of the layout."""
        return _key(_json(self._plain()))

    @cached_property
    def content(self) -> int:
        """A 64-bit hash of the names, offsets and sizes of the shared items; never 0. Two ranks
        with the same hash hold the same chunks of the same state, so either can replace the
        other."""
        names = sorted([i.fqn, i.offsets, i.sizes] for i in self.items if not i.own)
        return _key(_json(names)) or 1

    def encode(self) -> bytes:
        """Encode as compressed JSON, once: the result is kept. Raises LayoutError if it is too
        long."""
        kept = vars(self)
        if "encoded" not in kept:
            plain = _json(self._plain())
            if len(plain) > MAX_LAYOUT_BYTES:
                raise LayoutError(f"a layout of {len(self.items)} items is too long to encode")
            kept |= {"key": _key(plain), "encoded": zlib.compress(plain, 1)}
        return bytes(kept["encoded"])

    def _plain(self) -> list[Any]:
        """The layout as JSON values. Items that differ only in name and location share a form, and
        each item's row starts with the number of its form. `names` has only the names that do not
        follow from the path as in DCP."""
        numbers: dict[tuple[Any, ...], int] = {}
        rows: list[list[Any]] = []
        names: dict[int, str] = {}
        for at, i in enumerate(self.items):
            form = (*i[2:9], i.head, i.nbytes, i.tail, i.buffer)
            rows.append([numbers.setdefault(form, len(numbers)), i.extent, *i.path])
            if i.fqn != _name(i.path):
                names[at] = i.fqn
        sizes = (self.own_bytes, self.shared_bytes, self.values_capacity)
        return [self.torch, *sizes, self.content, list(numbers), rows, names]


def items_of(layout: Layout, shared: bool) -> tuple[Item, ...]:
    """The items in a rank's file: tensors, then opaque values; only own ones if not `shared`."""
    return layout.items if shared else tuple(item for item in layout.items if item.own)


def stretch_of(layout: Layout, shared: bool) -> int:
    """Bytes of tensors at the start of a rank's file; only of own ones if not `shared`."""
    return layout.tensor_bytes if shared else layout.own_bytes


Around = Callable[[str, tuple[int, ...]], tuple[int, int]]
"""Returns the number of bytes before and after the elements of a tensor with this dtype and these
sizes."""


def lay_out(
    items: Iterable[Item], values_capacity: int, torch: str, around: Around | None = None
) -> Layout:
    """Assign each tensor its extent. Ignores `extent` of the given items, and also `head` and
    `tail` if `around` is given. `values_capacity`: space for the opaque values and their table,
    rounded up to a page."""
    given = tuple(items)
    placed: list[Item] = []
    ends = []
    at = 0
    for own in (True, False):
        for item in given:
            if item.own is own and item.kind is not ItemKind.BYTES:
                head, tail = around(item.dtype, item.sizes) if around else (item.head, item.tail)
                placed.append(Item(*item[:9], at, head, item.nbytes, tail, item.buffer))
                at = _up(at + head + item.nbytes + tail, LINE)
        at = _up(at, PAGE)
        ends.append(at)
    for own in (True, False):
        placed += [i for i in given if i.own is own and i.kind is ItemKind.BYTES]
    return Layout(tuple(placed), ends[0], ends[1] - ends[0], _up(values_capacity, PAGE), torch)


def has_key(encoded: bytes, key: int) -> bool:
    """Whether these bytes are the encoded layout with this key; does not decode its items."""
    try:
        stream = zlib.decompressobj()
        plain = stream.decompress(encoded, MAX_LAYOUT_BYTES + 1)
        return stream.eof and _key(plain) == key
    except zlib.error:
        return False


def decode(encoded: bytes, key: int | None = None) -> Layout:
    """The inverse of `Layout.encode`. Checks every number, so that all offsets are within a slot.
    With `key`, the key of a layout made by this job, only the key is checked, which is faster.
    Raises LayoutError."""
    try:
        stream = zlib.decompressobj()
        plain = stream.decompress(encoded, MAX_LAYOUT_BYTES + 1)
        if len(plain) > MAX_LAYOUT_BYTES or not stream.eof:
            raise LayoutError("a layout is too long or truncated")
        torch, own, shared, room, content, forms, rows, names = json.loads(plain)
        if key is not None:
            if _key(plain) != key:
                raise LayoutError("a layout is not the expected one")
            made = _items([_unchecked_form(form) for form in forms], rows, names)
            layout = Layout(made, own, shared, room, torch)
            vars(layout).update(key=key, content=content, encoded=encoded)
            return layout
        if len(rows) > MAX_ITEMS:
            raise LayoutError("a layout has too many items")
        for row in rows:
            _check(row, len(forms))
        _check_names(names, len(rows))
        items = _items([_checked_form(form) for form in forms], rows, names)
    except LayoutError:
        raise
    except (ValueError, TypeError, AttributeError, zlib.error, RecursionError) as error:
        raise LayoutError(f"invalid layout ({type(error).__name__})") from None
    sizes = (own, shared, room)
    if not isinstance(torch, str):
        raise LayoutError("a layout has no torch version")
    if not all(_is_size(n) and n % PAGE == 0 for n in sizes):
        raise LayoutError(f"a layout has stretches of {sizes} bytes")
    layout = Layout(items, own, shared, room, torch)
    _check_order(layout)
    return layout


_Form = tuple[tuple[Any, ...], tuple[Any, ...]]
"""What items of one form have in common: an Item's fields between `path` and `extent`, and those
after `extent`.
"""


def _items(forms: list[_Form], rows: list[Any], names: dict[str, str]) -> tuple[Item, ...]:
    made = []
    for form, extent, *path in rows:
        before, after = forms[form]
        made.append(Item._make((_name(path), tuple(path), *before, extent, *after)))
    for at, name in names.items():
        made[int(at)] = made[int(at)]._replace(fqn=name)
    return tuple(made)


def _unchecked_form(form: Any) -> _Form:
    kind, own, dtype, shape, offsets, sizes, grad, head, nbytes, tail, buffer = form
    shape, offsets, sizes = tuple(shape), tuple(offsets), tuple(sizes)
    return (_KINDS[kind], own, dtype, shape, offsets, sizes, grad), (head, nbytes, tail, buffer)


def _checked_form(form: Any) -> _Form:
    kind, own, dtype, shape, offsets, sizes, grad, head, nbytes, tail, buffer = form
    if not isinstance(dtype, str) or not all(type(one) is bool for one in (own, grad, buffer)):
        raise LayoutError("a form of a layout has no dtype")
    for numbers in (shape, offsets, sizes, (head, nbytes, tail)):
        if not all(_is_size(n) for n in numbers):
            raise LayoutError("a form of a layout has impossible sizes")
    if not len(shape) == len(offsets) == len(sizes) <= MAX_DIMENSIONS:
        raise LayoutError("a form of a layout has too many dimensions")
    if any(o + s > n for o, s, n in zip(offsets, sizes, shape, strict=True)):
        raise LayoutError("a form of a layout reaches beyond its tensor")
    elements = math.prod(sizes)
    if elements and nbytes % elements:
        raise LayoutError("a form of a layout has a size without a dtype")
    return _unchecked_form([ItemKind(kind), *form[1:]])


def _check(row: Any, forms: int) -> None:
    form, extent, *path = row
    if type(form) is not int or not 0 <= form < forms or not _is_size(extent):
        raise LayoutError(f"an item of a layout has no form or no location ({str(row)[:80]})")
    if not all(isinstance(step, str) or type(step) is int for step in path):
        raise LayoutError(f"an item of a layout has no path ({str(row)[:80]})")


def _check_names(names: Any, rows: int) -> None:
    if not all(isinstance(name, str) and 0 <= int(at) < rows for at, name in names.items()):
        raise LayoutError("a layout names items that it does not have")


def _is_size(number: Any) -> bool:
    return type(number) is int and 0 <= number <= MAX_SIZE


def _name(path: Iterable[str | int]) -> str:
    """DCP's flat name of a path in the nested state."""
    return ".".join(map(str, path))


def _check_order(layout: Layout) -> None:
    """Check that the items are in order, and that their extents do not overlap and stay within
    their group. Raises LayoutError."""
    at, end = 0, layout.own_bytes
    groups = [(i.kind is ItemKind.BYTES, not i.own) for i in layout.items]
    if groups != sorted(groups):
        raise LayoutError("the items of a layout are out of order")
    shared = False
    for item in layout.tensors:
        if not item.own and not shared:
            shared, at, end = True, layout.own_bytes, layout.tensor_bytes
        if item.extent < at or item.extent % LINE or item.extent + item.length > end:
            raise LayoutError(f"item {item.fqn[:80]!r} lies outside its space")
        at = item.extent + item.length


def _up(number: int, to: int) -> int:
    return -(-number // to) * to


def _json(plain: Any) -> bytes:
    return json.dumps(plain, separators=(",", ":")).encode("ascii")


def _key(text: bytes) -> int:
    return int.from_bytes(blake2b(text, digest_size=8).digest(), "big") >> 1  # fits an int64
