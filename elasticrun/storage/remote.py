"""What fsspec reaches: an object is there once it was closed; nothing is ever renamed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from functools import partial
from typing import Any, TypeVar

from elasticrun.storage.errors import StorageError
from elasticrun.storage.place import Entry
from elasticrun.storage.writing import PIECE, Sink

T = TypeVar("T")

_CHANGED = ("mtime", "updated", "LastModified", "last_modified", "created", "timeCreated")
"""How file systems of fsspec call the moment of the last change."""


class ObjectSink:
    """See writing.Sink."""

    def __init__(self, fs: Any, path: str) -> None:
        self._fs, self._path = fs, path
        self._file = _tried(path, "written", lambda: fs.open(path, "wb"))

    def write(self, data: memoryview) -> None:
        for at in range(0, len(data), PIECE):
            piece = data[at : at + PIECE]
            took = _tried(self._path, "written", partial(self._file.write, piece))
            if took is not None and took != len(piece):
                raise StorageError(f"{self._path} was not written: it took {took} bytes only")

    def close(self) -> None:
        _tried(self._path, "written", self._file.close)

    def abort(self) -> None:
        # what a library raises here is its own; the file is unwanted in any case
        with suppress(Exception):
            self._file.discard()  # an upload in parts that was not finished
        with suppress(Exception):
            self._file.closed = True
        with suppress(Exception):
            self._fs.rm_file(self._path)


class UrlPlace:
    """See Place. `url`: as fsspec takes it, with its protocol."""

    def __init__(self, url: str) -> None:
        import fsspec  # type: ignore[import-untyped]

        self.remarks: list[str] = []
        self.fresh = True
        try:
            self._fs, self._root = fsspec.core.url_to_fs(url)
        except (ImportError, ValueError) as error:
            raise StorageError(
                f"{url} cannot be reached: {error}; install the package that fsspec names for it"
            ) from None
        self._url = url.rstrip("/")

    def full(self, name: str) -> str:
        return f"{self._url}/{name}" if name else self._url

    def _path(self, name: str) -> str:
        root = self._root.rstrip("/")
        return f"{root}/{name}" if name else root

    def make(self, name: str) -> None:
        path = self._path(name)
        _tried(self.full(name), "made", lambda: self._fs.makedirs(path, exist_ok=True))

    def entries(self, name: str) -> list[Entry]:
        path = self._path(name)
        self._fs.invalidate_cache(path)  # other processes write there as well
        try:
            found = _tried(self.full(name), "listed", lambda: self._fs.ls(path, detail=True))
        except FileNotFoundError:
            return []
        return [e for e in map(_entry, found) if e.name and e.name != path.rsplit("/", 1)[-1]]

    @contextmanager
    def opened(self, name: str) -> Iterator[Any]:
        path = self._path(name)
        file = _tried(self.full(name), "read", lambda: self._fs.open(path, "rb"))
        try:
            with file:
                yield file
        except (OSError, StorageError):
            raise
        except Exception as error:
            raise StorageError(f"{self.full(name)} was not read: {error!s:.300}") from error

    def create(self, name: str, size: int) -> Sink:
        return ObjectSink(self._fs, self._path(name))

    def put(self, name: str, data: bytes) -> None:
        path = self._path(name)
        _tried(self.full(name), "written", lambda: self._fs.pipe_file(path, data))

    def put_first(self, name: str, data: bytes) -> bool:
        path = self._path(name)
        if _tried(self.full(name), "read", lambda: self._fs.exists(path)):
            return False
        self.put(name, data)
        return True

    def settle(self, name: str) -> None:
        """Objects need nothing of the kind."""

    def unlink(self, name: str) -> None:
        path = self._path(name)
        with suppress(FileNotFoundError):
            _tried(self.full(name), "removed", lambda: self._fs.rm_file(path))

    def remove(self, name: str) -> None:
        path = self._path(name)
        with suppress(FileNotFoundError):
            _tried(self.full(name), "removed", lambda: self._fs.rm(path, recursive=True))

    def remove_empty(self, name: str) -> None:
        if not self.entries(name):
            with suppress(Exception):  # most object stores have no folders to remove
                self._fs.rmdir(self._path(name))


def _entry(found: dict[str, Any]) -> Entry:
    name = str(found["name"]).rstrip("/").rsplit("/", 1)[-1]
    changed = 0.0
    for key in _CHANGED:
        moment = found.get(key)
        if isinstance(moment, datetime):
            changed = moment.timestamp()
        elif isinstance(moment, int | float):
            changed = float(moment)
        elif isinstance(moment, str):
            with suppress(ValueError):
                changed = datetime.fromisoformat(moment.replace("Z", "+00:00")).timestamp()
        if changed:
            break
    return Entry(name, found.get("type") == "directory", int(found.get("size") or 0), changed)


def _tried(path: str, doing: str, work: Callable[[], T]) -> T:
    """Libraries of fsspec raise what they please; all of it is a sentence for us."""
    try:
        return work()
    except FileNotFoundError:
        raise
    except Exception as error:
        what = str(error) or type(error).__name__
        raise StorageError(f"{path} was not {doing}: {what[:300]}") from error
