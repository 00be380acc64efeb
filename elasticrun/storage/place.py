"""Where files lie: a folder of a file system (`LocalPlace`) or what fsspec reaches (`UrlPlace`).

Names are relative to the place, with `/` between folder and file. Every method raises StorageError
with a sentence, and FileNotFoundError where that is said.
"""

from __future__ import annotations

import errno
import io
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Protocol

from elasticrun.storage.calls import Calls
from elasticrun.storage.errors import StorageError, sentence
from elasticrun.storage.writing import (
    FileSink,
    Sink,
    sync_folder,
    ways_of,
    write_first,
    write_small,
)


@dataclass(frozen=True, slots=True)
class Entry:
    """A name in a folder. `changed`: seconds by the storage's own clock, 0 if it does not say."""

    name: str
    folder: bool
    size: int
    changed: float


class Place(Protocol):
    """See above."""

    remarks: list[str]
    fresh: bool
    """Whether a listing shows at once what other nodes have written."""

    def full(self, name: str) -> str: ...
    def make(self, name: str) -> None: ...
    def entries(self, name: str) -> list[Entry]:
        """Of a folder; [] if there is none."""

    def opened(self, name: str) -> AbstractContextManager[Any]:
        """For reading; FileNotFoundError."""

    def create(self, name: str, size: int) -> Sink: ...
    def put(self, name: str, data: bytes) -> None:
        """A small file, at once and in place of an older one."""

    def put_first(self, name: str, data: bytes) -> bool:
        """False if there is one."""

    def settle(self, name: str) -> None:
        """Make the names in a folder last."""

    def unlink(self, name: str) -> None:
        """Nothing happens if it is not there."""

    def remove(self, name: str) -> None:
        """A folder with all that is in it."""

    def remove_empty(self, name: str) -> None:
        """A folder, if nothing is in it."""


class LocalPlace:
    """A folder by its absolute path, which need not exist yet."""

    def __init__(self, root: str, calls: Calls) -> None:
        self._root, self._calls = os.path.normpath(root), calls
        self._ways = ways_of(self._root, calls)
        self.remarks = self._ways.remarks
        self.fresh = self._ways.fsync

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
            sync_folder(self._ways, os.path.dirname(folder))

    def entries(self, name: str) -> list[Entry]:
        found = []
        try:
            with os.scandir(self.full(name)) as listing:
                for one in listing:
                    with suppress(FileNotFoundError):  # removed by another in this moment
                        stat = one.stat(follow_symlinks=False)
                        folder = one.is_dir(follow_symlinks=False)
                        found.append(Entry(one.name, folder, stat.st_size, stat.st_mtime))
        except FileNotFoundError:
            return []
        except OSError as error:
            raise StorageError(sentence(error, self.full(name), "listed")) from error
        return found

    @contextmanager
    def opened(self, name: str) -> Iterator[Any]:
        try:
            file = io.FileIO(self.full(name))
        except FileNotFoundError:
            raise
        except OSError as error:
            raise StorageError(sentence(error, self.full(name), "read")) from error
        with file:
            yield file

    def create(self, name: str, size: int) -> Sink:
        try:
            return FileSink(self._ways, self.full(name), size)
        except StorageError as error:
            if not isinstance(error.__cause__, FileNotFoundError):
                raise
        self.make(os.path.dirname(name))  # another node gave up and found the folder empty
        return FileSink(self._ways, self.full(name), size)

    def put(self, name: str, data: bytes) -> None:
        write_small(self._ways, self.full(name), data)

    def put_first(self, name: str, data: bytes) -> bool:
        return write_first(self._ways, self.full(name), data)

    def settle(self, name: str) -> None:
        sync_folder(self._ways, self.full(name))

    def unlink(self, name: str) -> None:
        try:
            self._calls.unlink(self.full(name))
        except FileNotFoundError:
            pass
        except OSError as error:
            raise StorageError(sentence(error, self.full(name), "removed")) from error

    def remove(self, name: str) -> None:
        try:
            self._calls.remove(self.full(name))
        except FileNotFoundError:
            pass
        except OSError as error:
            raise StorageError(sentence(error, self.full(name), "removed")) from error

    def remove_empty(self, name: str) -> None:
        try:
            os.rmdir(self.full(name))
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.ENOTEMPTY, errno.EEXIST):
                raise StorageError(sentence(error, self.full(name), "removed")) from error
