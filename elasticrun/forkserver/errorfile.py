"""The record of an uncaught exception, in the format that torch's `@record` writes."""

from __future__ import annotations

import os
import time

MAX_CALLSTACK = 256 * 1024
"""Longest traceback written, in characters; deep recursions are cut in the middle by Python."""


def write_error_file(path: str, error: BaseException) -> None:
    """Describe `error` in a new file `path`; a file that is there already (from `@record`) stays.

    Never raises for a disk that is full or gone: the exception itself is more important.
    """
    import json
    import traceback

    try:
        message = f"{type(error).__name__}: {error}"
    except Exception:  # an exception whose __str__ fails
        message = type(error).__name__
    try:
        callstack = "".join(traceback.format_exception(error))[-MAX_CALLSTACK:]
        record = {
            "message": {
                "message": message,
                "extraInfo": {"py_callstack": callstack, "timestamp": str(int(time.time()))},
            }
        }
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        with open(descriptor, "w", encoding="utf-8", errors="backslashreplace") as file:
            json.dump(record, file)
    except Exception:
        return
