"""How a script of the tests speaks with the test that started it: JSON lines over a Unix socket."""

from __future__ import annotations

import json
import os
import socket
import sys
from collections.abc import Iterator
from typing import Any

_NUMBERS = {
    "rank": "RANK",
    "local_rank": "LOCAL_RANK",
    "group_rank": "GROUP_RANK",
    "world_size": "WORLD_SIZE",
    "restart": "TORCHELASTIC_RESTART_COUNT",
    "master_port": "MASTER_PORT",
}


class Stage:
    """The connection; it closes with the process, which tells the test of its death."""

    def __init__(self, **more: Any) -> None:
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.socket.connect(os.environ["ELASTICRUN_TEST_SOCKET"])
        self._lines = self.socket.makefile("r")
        numbers = {key: int(os.environ.get(name, "-1")) for key, name in _NUMBERS.items()}
        self.say(
            "hello",
            **numbers,
            pid=os.getpid(),
            ppid=os.getppid(),
            pgid=os.getpgid(0),
            sid=os.getsid(0),
            master_addr=os.environ.get("MASTER_ADDR", ""),
            run_id=os.environ.get("TORCHELASTIC_RUN_ID", ""),
            argv=sys.argv,
            **more,
        )

    def say(self, event: str, **more: Any) -> None:
        """Tell the test something."""
        self.socket.sendall(json.dumps({"event": event, **more}).encode() + b"\n")

    def orders(self) -> Iterator[dict[str, Any]]:
        """What the test wants done, until it hangs up."""
        for line in self._lines:
            yield json.loads(line)
