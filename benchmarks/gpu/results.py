"""Writes the results of the check, and scales its sizes.

Every process of the check (parts, ranks, probes) appends its results to $GPU_CHECK_OUT as soon as
it has them, so nothing is lost if a part is killed. With GPU_CHECK_DEVICE=cpu the CPU takes the
place of the device and gloo that of NCCL, and all sizes are divided.
"""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import time
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

OUT_VARIABLE: Final = "GPU_CHECK_OUT"
DEVICE_VARIABLE: Final = "GPU_CHECK_DEVICE"
PART_VARIABLE: Final = "GPU_CHECK_PART"

OUT: Final = Path(os.environ.get(OUT_VARIABLE, "."))
PART: Final = os.environ.get(PART_VARIABLE, "")
CUDA: Final = os.environ.get(DEVICE_VARIABLE, "cuda") == "cuda"
NCCL: Final = "nccl" if CUDA else "gloo"
"""The backend of collectives on the device."""

ROWS: Final = OUT / "results.jsonl"
TEXTS: Final = OUT / "texts.md"
DIVISOR: Final = 1 if CUDA else 40
PAGE: Final = 4096
MOST_TEXT: Final = 6000
MOST_NOTE: Final = 600

Value = str | float | bool | None


def gib(amount: float) -> int:
    """This many GiB in bytes, divided in a rehearsal; a multiple of the page size."""
    return int(amount * 2**30) // DIVISOR // PAGE * PAGE


def in_gib(size: float) -> float:
    return size / 2**30


def emit(
    name: str, value: Value = None, unit: str = "", note: str = "", ok: bool | None = None
) -> None:
    """Write one result. `ok`: whether a check has passed; None for a plain figure."""
    if isinstance(value, float):
        value = float(f"{value:.4g}")
    row = {
        "part": PART, "name": name, "value": value, "unit": unit, "note": note[:MOST_NOTE],
        "ok": ok, "at": round(time.time(), 2),
    }  # fmt: skip
    with ROWS.open("a") as file:
        file.write(json.dumps(row) + "\n")
    verdict = {True: "ok: ", False: "BAD: ", None: ""}[ok]
    print(f"{verdict}{name}: {value} {unit} {note}", flush=True)


def median(name: str, samples: Sequence[float], unit: str = "s", note: str = "") -> None:
    """Write the median of samples, and the samples in the note; without samples a failed check."""
    listed = f"[{', '.join(f'{one:.4g}' for one in samples)}]"
    middle = statistics.median(samples) if samples else None
    emit(name, middle, unit, f"{note} {listed}".strip(), None if samples else False)


def text(title: str, words: str) -> None:
    """Write the end of a longer text."""
    with TEXTS.open("a") as file:
        file.write(f"\n## {PART}: {title}\n\n```\n{words.strip()[-MOST_TEXT:]}\n```\n")


@contextlib.contextmanager
def trying(name: str) -> Iterator[None]:
    """Turn an exception in the block into a failed check, so that the part continues."""
    try:
        yield
    except Exception as error:
        traceback.print_exc()
        emit(name, None, "", f"{type(error).__name__}: {error}", ok=False)
