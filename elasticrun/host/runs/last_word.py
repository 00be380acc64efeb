"""A small file that tells programs why a launcher has exited; Kubernetes keeps it with the pod."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from elasticrun.wire import env
from elasticrun.wire.messages import ReasonCode

MOST = 4096
"""Maximum bytes that Kubernetes keeps per pod."""

MOST_TEXT = 600
"""Characters to which a too long text is truncated."""


class LastWord(Struct, frozen=True, omit_defaults=True):
    """The exit reason of an agent, or of a command that could not start one. `reason`: the source
    of `text` (`core/reasons.py`); None: unknown."""

    text: str
    rank: int = -1  # the first one that failed in the whole job; -1: none
    host: str = ""  # its host
    reason: ReasonCode | None = None


def write(word: LastWord) -> None:
    """Write the file named by the environment, if there is one; ignore errors."""
    if path := os.environ.get(env.LAST_WORDS, ""):
        data = msgspec.json.encode(word)
        if len(data) > MOST:
            data = msgspec.json.encode(replace(word, text=word.text[:MOST_TEXT], reason=None))
        with contextlib.suppress(OSError):
            Path(path).write_bytes(data)


def read(message: str) -> LastWord | None:
    """Decode such a file; None for other content, such as logs, or an empty file."""
    with contextlib.suppress(msgspec.MsgspecError):
        return msgspec.json.decode(message, type=LastWord)
    return None
