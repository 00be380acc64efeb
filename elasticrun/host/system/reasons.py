"""Converts any exception into one line of text."""

from __future__ import annotations

from typing import Final

PACKAGE: Final = __name__.partition(".")[0]

MAX_REASON: Final = 1000
"""Maximum characters of a reason."""


def reason_of(error: BaseException) -> str:
    """Why something failed, as one line of bounded length. Texts of our own exceptions, which are
    sentences, are used as they are."""
    if type(error).__module__.partition(".")[0] == PACKAGE:
        text = str(error)
    elif isinstance(error, OSError) and error.strerror:
        text = f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    else:
        text = f"{type(error).__name__}: {error}"
    return " ".join(text.split())[:MAX_REASON]
