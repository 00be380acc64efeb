"""Fills a tmpfs of 8 MiB at argv[1]; says what came of it. Imports no torch."""

import errno
import os
import sys

from elasticrun.snapshots.storage.folder import Folder
from elasticrun.snapshots.storage.writing import Calls, StorageError


class Blind(Calls):
    """Does not say early that there is no room."""

    def fallocate(self, fd: int, size: int) -> None:
        raise OSError(errno.EOPNOTSUPP, "no fallocate")


def attempt(folder: Folder, step: int, size: int) -> str:
    folder.make_folder(step)
    try:
        sink = folder.create(step, "data", size)
        sink.write(memoryview(bytes(size)))
        sink.close()
        folder.put(step, ".metadata", b"marker")
    except StorageError as error:
        return str(error)
    return "written"


root = sys.argv[1]
folder = Folder(root)
print(attempt(folder, 1, 1 << 20))
print(attempt(folder, 2, 16 << 20))
print(attempt(Folder(root, calls=Blind()), 3, 16 << 20))
print(folder.files(2), folder.files(3), folder.committed(), flush=True)
os._exit(0 if os.statvfs(root).f_bavail * 4096 > 6 << 20 else 1)
