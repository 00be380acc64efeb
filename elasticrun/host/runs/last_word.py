"""A small file from which programs learn why a launcher exited. In Kubernetes it is the pod's
termination message."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from elasticrun.wire import env
from elasticrun.wire.messages import ReasonCode

MAX_FILE_BYTES = 4096
"""Maximum bytes of a termination message that Kubernetes keeps."""

MAX_TEXT_CHARS = 600
"""Number of characters to which the text is truncated if the file would be too long."""


class LastWord(Struct, frozen=True, omit_defaults=True):
    """The exit reason of an agent, or of a command that could not start one. `reason`: the source
    of `text` (`core/reasons.py`); None: unknown."""

    text: str
    rank: int = -1  # the first one that failed in the whole job; -1: none
    host: str = ""  # its host
    reason: ReasonCode | None = None


def write(word: LastWord) -> None:
    """Write the file that the environment names, if any; ignores errors."""
    if path := os.environ.get(env.LAST_WORDS, ""):
        data = msgspec.json.encode(word)
        if len(data) > MAX_FILE_BYTES:
            data = msgspec.json.encode(replace(word, text=word.text[:MAX_TEXT_CHARS], reason=None))
        with contextlib.suppress(OSError):
            Path(path).write_bytes(data)


def read(message: str) -> LastWord | None:
    """Decode the content of such a file; None if it is something else, such as logs, or empty."""
    with contextlib.suppress(msgspec.MsgspecError):
        return msgspec.json.decode(message, type=LastWord)
    return None
