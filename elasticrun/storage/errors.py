"""What storage says when it cannot."""

from __future__ import annotations

import errno


class StorageError(Exception):
    """Storage did not do what it was asked to; one sentence, with the file and the way out."""


REFUSED = frozenset({errno.EOPNOTSUPP, errno.ENOTSUP, errno.EINVAL, errno.ENOSYS, errno.EPERM})
"""How a file system says that it does not have a feature, rather than that it has failed."""

_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})


def sentence(error: OSError, path: str, doing: str, free: int | None = None) -> str:
    """`doing`: written, read, removed, listed. `free`: bytes that are left where `path` lies."""
    if error.errno in _FULL:
        left = "" if free is None else f" ({free / 2**30:.2f} GiB are left)"
        what = "the quota is used up" if error.errno == errno.EDQUOT else "there is no room"
        return f"{path} was not {doing}: {what}{left}; make room, or choose another folder"
    return f"{path} was not {doing}: {error.strerror or error}"
