"""Unpickles values from another process: plain values only, unless the script allows more.

A pickle can run arbitrary code. A snapshot or checkpoint may come from another node's memory over
an open port, or from storage that others can write to. So opaque values are read like torch.load
with `weights_only=True`, and `.metadata`, which is a pickle too, with DCP's own classes only.
Whatever the script allows with `torch.serialization.add_safe_globals` is allowed here.
"""

from __future__ import annotations

import codecs
import collections
import datetime
import io
import pathlib
import pickle
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from typing import Any, Final

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorProperties
from torch.distributed.checkpoint.planner import ReadItem


class NotAllowed(ValueError):
    """The bytes need a class or function that is not allowed."""


_PLAIN: Final = (
    *(set, frozenset, complex, slice, range, bytearray, codecs.encode, collections.Counter),
    *(datetime.datetime, datetime.date, datetime.time, datetime.timedelta, datetime.timezone),
)
"""Allowed here with every torch version; newer versions allow most of them anyway. (Pickled bytes
call codecs.encode.)"""

_METADATA: Final = {
    "torch.distributed.checkpoint.metadata": None,  # all its classes, in any version
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo", "_StoragePrefix"),
    "torch.distributed._shard.sharded_tensor.metadata": ("TensorProperties", "MEM_FORMAT_ENCODING"),
    "torch.serialization": ("_get_layout",),
    "collections": ("OrderedDict",),
    "pathlib": ("PosixPath", "PurePosixPath"),
    "builtins": ("set", "frozenset"),
}
"""Names that occur in the `.metadata` that torch writes, by module."""

_ALIASES: Final = {
    "pathlib._local": "pathlib",
    "numpy.core.multiarray": "numpy._core.multiarray",
}
"""Names of modules in pickles of other versions (Python 3.13, numpy 1), each with the name under
which every version can import the module.
"""


def deserialise(data: bytes, weights_only: bool = True, name: str = "a value") -> Any:
    """The inverse of `items.serialise`; tensors are loaded to the CPU. `weights_only`: load only
    what is allowed, and raise NotAllowed for anything else. `name`: the value's name for
    messages."""
    if not weights_only:
        as_here: Any = _PickleModule  # torch's annotation requires a module
        return torch.load(
            io.BytesIO(data), map_location="cpu", weights_only=False, pickle_module=as_here
        )
    try:
        with _allowed():
            return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        found = re.search(r"(?:GLOBAL|class) ([\w.]+)", str(error))
        what = f"{name} has a {found[1]}" if found else f"{name} is not a plain value"
        raise NotAllowed(
            f"{what}, which is not loaded from untrusted bytes: allow it by "
            "torch.serialization.add_safe_globals([...]) before restore(), or everything by "
            "Checkpointer(..., weights_only=False)"
        ) from error


@contextmanager
def _allowed() -> Iterator[None]:
    """In this block, allow the types above and numpy's arrays and numbers in torch.load."""
    more: list[Any] = list(_PLAIN)
    if numpy := sys.modules.get("numpy"):
        core = getattr(numpy, "_core", None) or numpy.core
        functions = (core.multiarray._reconstruct, core.multiarray.scalar)
        more += [numpy.ndarray, numpy.dtype, *functions]
        more += [one for one in vars(numpy.dtypes).values() if isinstance(one, type)]
        for module in ("numpy.core", "numpy._core"):  # of numpy 1 and numpy 2
            more += [(one, f"{module}.multiarray.{one.__name__}") for one in functions]
    before = torch.serialization.get_safe_globals()
    for path in (pathlib.PosixPath, pathlib.PurePosixPath):
        if path in before:
            more += [
                (path, f"{module}.{path.__name__}") for module in ("pathlib", "pathlib._local")
            ]
    torch.serialization.add_safe_globals(more)
    try:
        yield
    finally:
        torch.serialization.clear_safe_globals()
        torch.serialization.add_safe_globals(list(before))


class SafeLoadPlanner(DefaultLoadPlanner):
    """torch's planner for a flat state, which reads opaque values with `deserialise`."""

    def __init__(self, weights_only: bool) -> None:
        super().__init__()
        self._weights_only = weights_only

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        fqn = read_item.dest_index.fqn
        self.original_state_dict[fqn] = deserialise(value.read(), self._weights_only, fqn)


class _Unpickler(pickle.Unpickler):
    """An Unpickler that also resolves names used by other versions of Python, numpy and torch."""

    def find_class(self, module: str, name: str) -> Any:
        found = super().find_class(_ALIASES.get(module, module), name)
        return _AnyProperties if found is TensorProperties else found


class _PickleModule:
    """Passed to torch.load as `pickle_module`."""

    Unpickler = _Unpickler
    load = pickle.load
    __name__ = "pickle"


class _AnyProperties(TensorProperties):
    """Unpickles TensorProperties of any torch version. Newer versions add fields (2.15: strides)
    that older ones cannot load; they are dropped, because no load needs them."""

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self.__class__ = TensorProperties  # type: ignore[assignment]
        self.__setstate__(state[: len(fields(TensorProperties))])


class _MetadataUnpickler(_Unpickler):
    """Allows only what occurs in torch's own `.metadata`."""

    def find_class(self, module: str, name: str) -> Any:
        module = _ALIASES.get(module, module)
        allowed = _METADATA.get(module, ())
        found = None
        if module == "torch":
            found = getattr(torch, name, None)
            is_plain = isinstance(found, torch.dtype | torch.layout | torch.memory_format)
            found = found if is_plain or name in ("Size", "device") else None
        elif "." not in name and (allowed is None or name in allowed):
            found = super().find_class(module, name)
            if allowed is None and not (
                isinstance(found, type) and found.__module__ in (module, __name__)
            ):  # that module imports it, but does not define it
                found = None
        if found is None:
            raise NotAllowed(
                f".metadata has a {module}.{name}, which torch itself never writes there: "
                "Checkpointer(..., weights_only=False) loads it anyway"
            )
        return found


def read_metadata(reader: Any, weights_only: bool) -> Any:
    """Read a checkpoint's `.metadata`. Replaces `reader.read_metadata`, so that the file is read
    only once. Raises NotAllowed, and errors of the storage and of pickle."""
    path = reader.fs.concat_path(reader.path, ".metadata")
    with reader.fs.create_stream(path, "rb") as file:
        metadata = (_MetadataUnpickler if weights_only else _Unpickler)(file).load()
    if not isinstance(metadata, Metadata):
        raise pickle.UnpicklingError(f".metadata is a {type(metadata).__name__}")
    about = getattr(metadata, "storage_meta", None) or StorageMeta()
    about.load_id = reader.load_id
    metadata.storage_meta = about
    reader.read_metadata = lambda *_, **__: metadata
    return metadata
