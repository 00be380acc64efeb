"""Pauses Python's garbage collector while torch and we create many objects that stay alive."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def no_collection() -> Iterator[None]:
    """Turn the collector off in this block. Python starts a collection whenever many objects were
    created; with all of torch in memory that takes longer than creating them."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()
