"""Prints the first and last lines of each benchmark, and writes its results."""

from __future__ import annotations

import compileall
import datetime
import json
import os
import platform
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil

import elasticrun

RESULTS = Path(__file__).parent / "results"


def machine() -> str:
    """One line that describes the machine."""
    kernel = platform.release().partition("-")[0]
    return (
        f"{platform.system()} {kernel}, {os.cpu_count()} cores, "
        f"{psutil.virtual_memory().total / 2**30:.0f} GiB, Python {platform.python_version()}, "
        f"torch {metadata.version('torch')}, load {os.getloadavg()[0]:.1f} at the start"
    )


def begin() -> dict[str, str]:
    """Print the time and the machine, and return them for the results.

    First compiles elasticrun's modules, as pip does when it installs a wheel: torchrun's are
    compiled, and with PYTHONDONTWRITEBYTECODE those of a checkout would be compiled again in every
    process."""
    compileall.compile_dir(Path(elasticrun.__file__).parent, quiet=2)
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    about = {"date": now, "machine": machine()}
    print(f"{about['date']}: {about['machine']}\n")
    return about


def write(name: str, about: Mapping[str, str], found: Mapping[str, Any], file: Path | None) -> None:
    """Write the results to `file`, or to a file named after this benchmark and the date."""
    target = file or RESULTS / f"{name}-{about['date'][:19].replace(':', '')}.json"
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(json.dumps({**about, **found}, indent=1) + "\n")
    print(f"\nwritten to {target}")


def verdict(missed: Sequence[str]) -> int:
    """Print which targets were missed. Returns the exit code."""
    print("every bar is met" if not missed else f"missed: {'; '.join(missed)}")
    return 1 if missed else 0
