"""A pause of Python's garbage collector, for code in which torch and we make many objects that
stay."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def no_collection() -> Iterator[None]:
    """Python looks for garbage whenever many objects were made; with all of torch in memory that
    takes longer than making them."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()
