"""A debugger around the launcher is attached to each rank, as under torchrun, and to no helper."""

from __future__ import annotations

import json
import socket
import sys
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests import needs
from tests.further import cases
from tests.harness import COLD, COMMANDS, ELASTICRUN, TORCHRUN, World, await_true, free_port

pytestmark = pytest.mark.slow

SCRIPT = """import os
rank = os.environ["RANK"]
seen = f"rank {rank}"  # line 3
print(seen, flush=True)
"""


class Editor:
    """A client of the Debug Adapter Protocol, as an editor is: attaches to the launcher and to each
    process that is announced; counts where they stop, and lets them go on."""

    def __init__(self, port: int, script: Path) -> None:
        self.port, self.script = port, script
        self.told: Counter[str] = Counter()

    def attach(self, port: int, process: int | None = None) -> None:
        """Talk to the process (None: the launcher) at this port, in a thread of its own."""
        arguments = (port, process)
        threading.Thread(target=self._session, args=arguments, daemon=True).start()

    def _session(self, port: int, process: int | None) -> None:
        connected: list[socket.socket] = []

        def connects() -> bool:
            try:
                connected.append(socket.create_connection(("127.0.0.1", port)))
            except OSError:
                return False
            return True

        await_true(connects, "debugger that listens")
        with connected[0] as conn, conn.makefile("rb") as said:
            self._send(conn, "initialize", adapterID="test", pathFormat="path")
            while (length := self._length(said)) is not None:
                self._heard(conn, process, json.loads(said.read(length)))

    def _heard(self, conn: socket.socket, process: int | None, message: dict[str, Any]) -> None:
        body = message.get("body") or {}
        match message.get("event") or f"answer to {message.get('command')}":
            case "answer to initialize":
                more = {} if process is None else {"subProcessId": process}
                where = {"host": "127.0.0.1", "port": self.port}
                self._send(conn, "attach", connect=where, subProcess=True, justMyCode=False, **more)
            case "initialized":
                at = {"source": {"path": str(self.script)}, "breakpoints": [{"line": 3}]}
                self._send(conn, "setBreakpoints", **at)
                self._send(conn, "configurationDone")
            case "debugpyAttach":
                self.told["child"] += 1
                self.attach(body["connect"]["port"], body["subProcessId"])
            case "terminated":  # whoever is still connected keeps the debugger's own process
                self._send(conn, "disconnect")
            case "stopped":
                self.told["stop"] += 1
                self._send(conn, "continue", threadId=body["threadId"])

    @staticmethod
    def _send(conn: socket.socket, command: str, **arguments: object) -> None:
        data = {"seq": 1, "type": "request", "command": command, "arguments": arguments}
        text = json.dumps(data).encode()
        conn.sendall(b"Content-Length: %d\r\n\r\n" % len(text) + text)

    @staticmethod
    def _length(said: Any) -> int | None:
        length = None
        while (line := said.readline().strip()) or length is None:
            if not line:
                return None
            length = int(line.split(b":")[1])
        return length


@pytest.mark.parametrize("launcher", cases([TORCHRUN, ELASTICRUN], kept=[ELASTICRUN]))
def test_each_rank_stops_at_its_breakpoint(world: World, launcher: str) -> None:
    needs.packages("debugpy")
    script = world.scratch / "train.py"
    script.write_text(SCRIPT)
    port = free_port()
    listens = (sys.executable, "-m", "debugpy", "--listen", f"127.0.0.1:{port}")
    words = ("--wait-for-client", *COMMANDS[launcher][1:], "--standalone", "--nproc-per-node=2")
    editor = Editor(port, script)
    editor.attach(port)
    quiet = {"PYDEVD_DISABLE_FILE_VALIDATION": "1"}
    launched = world.command((*listens, *words, str(script)), env={**COLD, **quiet})
    assert launched.wait() == 0, launched.stderr
    assert sorted(launched.stdout.splitlines()) == ["rank 0", "rank 1"]
    assert editor.told == {"child": 2, "stop": 2}
