"""Why a launcher has exited, for programs: a small file that Kubernetes keeps with its pod."""

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
"""Bytes that a cluster keeps per pod."""

MOST_TEXT = 600
"""Characters kept of a sentence that is too long."""


class LastWord(Struct, frozen=True, omit_defaults=True):
    """Of an agent, or of a command that did not get to start one. `reason`: the source of `text`
    (`core/reasons.py`); None: unknown."""

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
    """Decode such a file; None for anything else, such as logs, or nothing."""
    with contextlib.suppress(msgspec.MsgspecError):
        return msgspec.json.decode(message, type=LastWord)
    return None
