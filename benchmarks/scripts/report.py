"""Reports events of a measured script to the benchmark: one datagram per event.

Times are CLOCK_MONOTONIC, which is one clock for all processes of a machine.
"""

from __future__ import annotations

import json
import os
import socket
import time

_socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)


def report(event: str, **more: float) -> None:
    """Send `event` with the time, this rank's number, pid, attempt (`life`), node and world size,
    and further figures."""
    fact = {
        "event": event,
        "rank": int(os.environ["RANK"]),
        "life": int(os.environ["TORCHELASTIC_RESTART_COUNT"]),
        "time": time.monotonic(),
        "pid": os.getpid(),
        "world": int(os.environ["WORLD_SIZE"]),
        "node": int(os.environ["BENCH_NODE"]),
        "more": more,
    }
    _socket.sendto(json.dumps(fact).encode(), os.environ["BENCH_SOCKET"])
