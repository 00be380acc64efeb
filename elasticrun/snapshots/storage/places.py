"""Storage backends: a folder of a file system (`LocalPlace`) or whatever fsspec supports
(`UrlPlace`).

Names are relative to the place, with `/` between folder and file. Every method may raise
StorageError, and FileNotFoundError where documented. With fsspec a file exists once it is closed,
so nothing is renamed.
"""

from __future__ import annotations

import errno
import io
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from typing import Any, Protocol, TypeVar

from elasticrun.snapshots.storage.writing import (
    PIECE,
    Calls,
    Features,
    FileSink,
    Sink,
    StorageError,
    features_of,
    sentence,
    sync_folder,
    write_first,
    write_small,
)


@dataclass(frozen=True, slots=True)
class Entry:
    """An entry in a folder. `changed`: time of its last change, in seconds since 1970 by the
    storage's clock; 0 if unknown."""

    name: str
    folder: bool
    size: int
    changed: float


class StoragePlace(Protocol):
    """A storage backend (see the module's docstring)."""

    remarks: list[str]
    unfit: str
    """Why checkpoints must not be stored there, as a sentence; "" if they may."""

    @property
    def is_consistent(self) -> bool:
        """Whether a listing shows at once what other nodes have written."""

    def full(self, name: str) -> str: ...
    def make(self, name: str) -> None: ...
    def entries(self, name: str) -> list[Entry]:
        """The entries of a folder; [] if it does not exist."""

    def opened(self, name: str) -> AbstractContextManager[Any]:
        """Open a file for reading. Raises FileNotFoundError."""

    def create(self, name: str, size: int) -> Sink: ...
    def put(self, name: str, data: bytes) -> None:
        """Write a small file atomically, replacing an older one."""

    def put_first(self, name: str, data: bytes) -> bool:
        """Write a small file unless it exists; False if it does."""

    def settle(self, name: str) -> None:
        """Make the names in a folder durable."""

    def unlink(self, name: str) -> None:
        """Remove a file; a no-op if it does not exist."""

    def remove(self, name: str, *, last: str) -> None:
        """Remove a folder with its content. `last`: the file to remove last."""

    def remove_empty(self, name: str) -> None:
        """Remove a folder if it is empty."""


@contextmanager
def _as_storage_errors(path: str, doing: str) -> Iterator[None]:
    """Convert an OSError in the block into StorageError, except FileNotFoundError."""
    try:
        yield
    except FileNotFoundError:
        raise
    except OSError as error:
        raise StorageError(sentence(error, path, doing)) from error


class LocalPlace:
    """A folder by its absolute path, which need not exist yet. The constructor makes no system
    call, because a script calls it in its main thread, where a hanging file system would block the
    start of the ranks indefinitely."""

    def __init__(self, root: str, calls: Calls) -> None:
        self._root, self._calls = os.path.normpath(root), calls
        self._known: Features | None = None
        self.remarks: list[str] = []
        self.unfit = ""

    @property
    def _features(self) -> Features:
        """The features of the file system, determined at first use."""
        if self._known is None:
            self._known = features_of(self._root, self._calls, self.remarks)
        return self._known

    @property
    def is_consistent(self) -> bool:
        return self._features.fsync

    def full(self, name: str) -> str:
        return os.path.join(self._root, name) if name else self._root

    def make(self, name: str) -> None:
        path = self.full(name)
        fresh = []
        while not os.path.isdir(path) and path != os.path.dirname(path):
            fresh.append(path)
            path = os.path.dirname(path)
        for folder in reversed(fresh):
            try:
                self._calls.mkdir(folder)
            except FileExistsError:
                pass
            except OSError as error:
                raise StorageError(sentence(error, folder, "made")) from error
            sync_folder(self._features, os.path.dirname(folder))

    def entries(self, name: str) -> list[Entry]:
        found: list[Entry] = []
        path = self.full(name)
        with (
            suppress(FileNotFoundError),
            _as_storage_errors(path, "listed"),
            os.scandir(path) as listing,
        ):
            for one in listing:
                with suppress(FileNotFoundError):  # removed by another process just now
                    stat = one.stat(follow_symlinks=False)
                    folder = one.is_dir(follow_symlinks=False)
                    found.append(Entry(one.name, folder, stat.st_size, stat.st_mtime))
            return found
        return []

    def opened(self, name: str) -> AbstractContextManager[Any]:
        with _as_storage_errors(self.full(name), "read"):
            return io.FileIO(self.full(name))

    def create(self, name: str, size: int) -> Sink:
        try:
            return FileSink(self._features, self.full(name), size)
        except StorageError as error:
            if not isinstance(error.__cause__, FileNotFoundError):
                raise
        self.make(os.path.dirname(name))  # another node gave up, and removed the empty folder
        return FileSink(self._features, self.full(name), size)

    def put(self, name: str, data: bytes) -> None:
        write_small(self._features, self.full(name), data)

    def put_first(self, name: str, data: bytes) -> bool:
        return write_first(self._features, self.full(name), data)

    def settle(self, name: str) -> None:
        sync_folder(self._features, self.full(name))

    def unlink(self, name: str) -> None:
        with suppress(FileNotFoundError), _as_storage_errors(self.full(name), "removed"):
            self._calls.unlink(self.full(name))

    def remove(self, name: str, *, last: str) -> None:
        for one in self.entries(name):
            if one.name != last and not one.folder:
                self.unlink(f"{name}/{one.name}")
        with suppress(FileNotFoundError), _as_storage_errors(self.full(name), "removed"):
            self._calls.remove(self.full(name))

    def remove_empty(self, name: str) -> None:
        try:
            os.rmdir(self.full(name))
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.ENOTEMPTY, errno.EEXIST):
                raise StorageError(sentence(error, self.full(name), "removed")) from error


T = TypeVar("T")

_CHANGED = ("mtime", "updated", "LastModified", "last_modified", "created", "timeCreated")
"""Names that fsspec's file systems use for the time of the last change."""


class ObjectSink:
    """A file opened with fsspec; see writing.Sink."""

    def __init__(self, fs: Any, path: str) -> None:
        self._fs, self._path = fs, path
        self._file = _with_storage_errors(path, "written", lambda: fs.open(path, "wb"))

    def write(self, data: memoryview) -> None:
        for at in range(0, len(data), PIECE):
            piece = data[at : at + PIECE]
            took = _with_storage_errors(self._path, "written", partial(self._file.write, piece))
            if took is not None and took != len(piece):
                raise StorageError(f"{self._path} was not written: only {took} bytes were accepted")

    def close(self) -> None:
        _with_storage_errors(self._path, "written", self._file.close)

    def abort(self) -> None:
        # errors of the library do not matter, because the file is not wanted
        with suppress(Exception):
            self._file.discard()  # an unfinished multipart upload
        with suppress(Exception):
            self._file.closed = True
        with suppress(Exception):
            self._fs.rm_file(self._path)


_MEMORY = frozenset({"memory"})
_CACHES = frozenset({"cached", "blockcache", "filecache", "simplecache"})
"""fsspec's protocols whose files, or cached copies of files, are private to a process or node."""


def _unfit(url: str, kind: Any) -> str:
    """Why checkpoints must not be stored at this URL, as a sentence; "" if they may. `kind`: the
    class of a file system that the URL names."""
    named = kind.protocol
    protocols = {named} if isinstance(named, str) else set(named)
    if protocols & _MEMORY:
        return (
            f"checkpoints cannot be stored in {url}: it is the memory of a single process; "
            "use a folder, or the URL of storage that all nodes can reach"
        )
    if protocols & _CACHES:
        return (
            f"checkpoints cannot be stored in {url}: {min(protocols & _CACHES)} caches files on "
            "each node, which may be out of date; use the URL of the storage behind it"
        )
    return ""


class UrlPlace:
    """Storage that fsspec supports; see StoragePlace. `url`: with protocol, as fsspec expects it.
    The constructor only checks that the protocol's package is installed, because creating a file
    system may request credentials from a server."""

    is_consistent = True

    def __init__(self, url: str) -> None:
        import fsspec  # type: ignore[import-untyped]

        self.remarks: list[str] = []
        self._url = url.rstrip("/")
        self._given = url
        self.unfit = ""
        self._reached: tuple[Any, str] | None = None
        try:
            for link in url.split("::"):
                protocol = fsspec.core.split_protocol(link)[0] or link.partition("://")[0]
                kind = fsspec.get_filesystem_class(protocol)
                self.unfit = self.unfit or _unfit(url, kind)
        except (ImportError, ValueError) as error:
            raise _no_package(url, error) from None

    def _reach(self) -> tuple[Any, str]:
        """The file system, created at the first call, and the path in it. Raises StorageError."""
        if self._reached is None:
            import fsspec

            try:
                self._reached = fsspec.core.url_to_fs(self._given)
            except (ImportError, ValueError) as error:
                raise _no_package(self._url, error) from None
            except Exception as error:  # raised by the library for this storage
                raise StorageError(f"{self._url} cannot be reached: {error!s:.300}") from error
        return self._reached

    @property
    def _fs(self) -> Any:
        return self._reach()[0]

    def full(self, name: str) -> str:
        return f"{self._url}/{name}" if name else self._url

    def _path(self, name: str) -> str:
        root = self._reach()[1].rstrip("/")
        return f"{root}/{name}" if name else root

    def _call(self, name: str, doing: str, work: Callable[[str], T]) -> T:
        """Call `work` with the path as the file system expects it, and convert its errors."""
        return _with_storage_errors(self.full(name), doing, partial(work, self._path(name)))

    def make(self, name: str) -> None:
        self._call(name, "made", lambda path: self._fs.makedirs(path, exist_ok=True))

    def entries(self, name: str) -> list[Entry]:
        path = self._path(name)
        self._fs.invalidate_cache(path)  # other processes write there too
        try:
            found = self._call(name, "listed", lambda path: self._fs.ls(path, detail=True))
        except FileNotFoundError:
            return []
        return [e for e in map(_entry, found) if e.name and e.name != path.rsplit("/", 1)[-1]]

    @contextmanager
    def opened(self, name: str) -> Iterator[Any]:
        file = self._call(name, "read", lambda path: self._fs.open(path, "rb"))
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
        self._call(name, "written", lambda path: self._fs.pipe_file(path, data))

    def put_first(self, name: str, data: bytes) -> bool:
        if self._call(name, "read", self._fs.exists):
            return False
        self.put(name, data)
        return True

    def settle(self, name: str) -> None:
        """A no-op: objects need no sync."""

    def unlink(self, name: str) -> None:
        with suppress(FileNotFoundError):
            self._call(name, "removed", self._fs.rm_file)

    def remove(self, name: str, *, last: str) -> None:
        found = [one.name for one in self.entries(name) if not one.folder and one.name != last]
        others = [self._path(f"{name}/{one}") for one in found]
        with suppress(FileNotFoundError):
            if others:
                self._call(name, "removed", lambda _: self._fs.rm(others))
            self._call(name, "removed", lambda path: self._fs.rm(path, recursive=True))

    def remove_empty(self, name: str) -> None:
        if not self.entries(name):
            with suppress(Exception):  # most object stores have no folders
                self._fs.rmdir(self._path(name))


def _no_package(url: str, error: Exception) -> StorageError:
    """The error for storage that no installed package supports."""
    return StorageError(
        f"{url} cannot be reached: {error}; install the package that fsspec names for it"
    )


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


def _with_storage_errors(path: str, doing: str, work: Callable[[], T]) -> T:
    """Call `work`; convert any exception into StorageError, except FileNotFoundError, because
    fsspec's libraries raise all kinds of exceptions."""
    try:
        return work()
    except FileNotFoundError:
        raise
    except Exception as error:
        what = str(error) or type(error).__name__
        raise StorageError(f"{path} was not {doing}: {what[:300]}") from error
