"""Why a launcher has ended, for programs: a small file that Kubernetes keeps with its pod."""

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
"""Bytes that a cluster keeps of a pod."""

MOST_TEXT = 600
"""Characters of a sentence that is too long as a whole."""


class LastWord(Struct, frozen=True, omit_defaults=True):
    """Of an agent, or of a command line that did not come to be one. `reason`: what `text` was made
    of (`core/reasons.py`); None: that is all that is known."""

    text: str
    rank: int = -1  # that failed first in the whole job; -1: none did
    host: str = ""  # on which that was
    reason: ReasonCode | None = None


def leave(word: LastWord) -> None:
    """Write it down where the environment says; nowhere without that, or where it cannot be."""
    if path := os.environ.get(env.LAST_WORDS, ""):
        data = msgspec.json.encode(word)
        if len(data) > MOST:
            data = msgspec.json.encode(replace(word, text=word.text[:MOST_TEXT], reason=None))
        with contextlib.suppress(OSError):
            Path(path).write_bytes(data)


def read(message: str) -> LastWord | None:
    """What was left; None for anything else, as logs are, or nothing."""
    with contextlib.suppress(msgspec.MsgspecError):
        return msgspec.json.decode(message, type=LastWord)
    return None
