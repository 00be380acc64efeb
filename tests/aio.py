"""One event loop for every test that uses grpc.aio in this process.

grpc.aio hands completions of all loops of a process to whichever of them looks first; one that
belongs to a loop which has been closed since makes it drop those behind it. Products run one loop.
"""

from __future__ import annotations

import asyncio
import atexit
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")

_RUNNER = asyncio.Runner()
atexit.register(_RUNNER.close)


def run(body: Coroutine[Any, Any, T]) -> T:
    """`asyncio.run` on the loop that all tests share."""
    return _RUNNER.run(body)
