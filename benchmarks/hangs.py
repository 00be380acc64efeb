"""After how long a planted hang is told, and whether the right rank is named.

    python benchmarks/hangs.py [--ranks 2 4 16] [--faults sleep stop ...] [--json FILE]

Each is a real training on gloo (tests/scripts/faulty.py) in which rank 1 stops. The clock runs from
the moment at which rank 1 comes to its fault to the launcher's line. torchrun, beside it, is given
the same time: it says nothing before torch's own limit (30 minutes on gloo, 10 on NCCL).
"""

from __future__ import annotations

import argparse
import json
import os
import re
import selectors
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Final

FAULTY: Final = Path(__file__).parents[1] / "tests/scripts/faulty.py"
FAULTS: Final = ("other", "skipped", "order", "stop", "sleep", "lock", "waits", "loader", "held")
AT: Final = b"at the fault"
TOLD: Final = re.compile(rb"hang \((\w+)\): (.*)")
ELASTICRUN: Final = ("-m", "elasticrun", "--on-hang=tell")
TORCHRUN: Final = ("-m", "torch.distributed.run")


def measure(launcher: tuple[str, ...], fault: str, ranks: int, limit: float) -> dict[str, Any]:
    """One job, ended when the hang is told, or after so many seconds at the fault."""
    words = [*launcher, "--standalone", f"--nproc-per-node={ranks}", str(FAULTY), fault]
    process = subprocess.Popen(
        [sys.executable, *words], stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        start_new_session=True, env=os.environ | {"PYTHONUNBUFFERED": "1"},
    )  # fmt: skip
    try:
        return {"fault": fault, "ranks": ranks, **_watch(process, limit)}
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(40)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)


def _watch(process: subprocess.Popen[bytes], limit: float) -> dict[str, Any]:
    assert process.stdout is not None
    said, at, end = b"", 0.0, time.monotonic() + 4 * limit
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        while (left := end - time.monotonic()) > 0:
            if not selector.select(left):
                break
            if not (data := os.read(process.stdout.fileno(), 65536)):
                break
            said += data
            if not at and AT in said:
                at = time.monotonic()
                end = at + limit
            found = TOLD.search(said)
            if found is not None and b"\n" in said[found.start() :]:
                sentence = found[2].decode(errors="replace")
                right = re.search(r"\brank 1\b", sentence) is not None
                seconds = round(time.monotonic() - at, 1)
                return {"seconds": seconds, "class": found[1].decode(), "right": right}
    return {"seconds": None, "class": "", "right": False}


def main() -> None:
    """See the module's head."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 16])
    parser.add_argument("--faults", nargs="+", default=list(FAULTS))
    parser.add_argument("--limit", type=float, default=100.0)
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    rows = []
    print("| fault | ranks | class | told after (s) | rank named | torchrun |")
    print("| --- | ---: | --- | ---: | --- | --- |")
    for fault in asked.faults:
        theirs = None
        for ranks in sorted(asked.ranks):
            row = measure(ELASTICRUN, fault, ranks, asked.limit)
            if ranks == min(asked.ranks):  # it takes 30 s to end each of them
                theirs = measure(TORCHRUN, fault, ranks, row["seconds"] or asked.limit)["seconds"]
            row["torchrun"] = theirs
            rows.append(row)
            print(
                f"| {fault} | {ranks} | {row['class'] or 'none'} | {row['seconds'] or 'never'} "
                f"| {'right' if row['right'] else 'wrong'} | {theirs or 'silent'} |",
                flush=True,
            )
    if asked.json:
        asked.json.write_text(json.dumps({"limit": asked.limit, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
