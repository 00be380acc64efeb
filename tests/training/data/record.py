"""What ranks write down about the samples that they use, and how it is read."""

from __future__ import annotations

import json
import os
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist


class Record:
    """One rank's lines of JSON in OUT/<pid>.jsonl: when its world began, the step, the samples."""

    def __init__(self, out: Path) -> None:
        """A collective of the default group."""
        began = torch.tensor(time.monotonic(), dtype=torch.float64)
        dist.broadcast(began, src=0)
        self._began = began.item()
        self._file = open(out / f"{os.getpid()}.jsonl", "a", buffering=1)  # noqa: SIM115

    def used(self, step: int, samples: Sequence[object]) -> None:
        line = {"began": self._began, "step": step, "used": samples}
        self._file.write(json.dumps(line) + "\n")


def surviving(out: Path) -> dict[int, list[Any]]:
    """The samples of each step, as the last world that completed it has used them."""
    found: dict[int, dict[float, list[Any]]] = defaultdict(lambda: defaultdict(list))
    for path in out.glob("*.jsonl"):
        for text in path.read_text().splitlines():
            if text.endswith("}"):  # a rank that is killed may leave half a line
                line = json.loads(text)
                found[line["step"]][line["began"]] += line["used"]
    return {step: worlds[max(worlds)] for step, worlds in found.items()}
