"""A debugger around the launcher is attached to each rank, as under torchrun, and to no helper."""

from __future__ import annotations

import contextlib
import json
import socket
import sys
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests import needs
from tests.further import cases
from tests.harness import COLD, COMMANDS, ELASTICRUN, TORCHRUN, World, await_true, free_port

pytestmark = pytest.mark.slow

SCRIPT = """import os
rank = os.environ["RANK"]
seen = f"rank {rank}"  # line 3
print(seen, flush=True)
def fails():
    raise KeyError("handled")
try:
    fails()
except KeyError:
    pass
"""

EXPRESSIONS = {
    "breakpoint": ("os.environ['RANK'] == rank", "__file__.endswith('train.py')"),
    "step": ("seen == 'rank ' + rank",),
    "exception": (),
}
"""What is asked where it stops."""

SESSION = {
    "child": 2,
    "stopped: breakpoint at <module>:3": 2,
    "os.environ['RANK'] == rank: True": 2,
    "__file__.endswith('train.py'): True": 2,
    "stopped: step at <module>:4": 2,
    "seen == 'rank ' + rank: True": 2,
    "stopped: exception at fails:6": 2,
    "stopped: exception at <module>:8": 2,
}
"""What an editor is told, under torchrun as here."""


class Editor:
    """A client of the Debug Adapter Protocol, as an editor is: attaches to the launcher and to each
    process that is announced, and counts what it is told of them."""

    def __init__(self, port: int, script: Path) -> None:
        self.port, self.script = port, script
        self.told: Counter[str] = Counter()

    def attach(self, port: int, process: int | None = None) -> None:
        """Talk to the process (None: the launcher) at this port, in a thread of its own."""
        session = Session(self, port, process)
        threading.Thread(target=session.run, daemon=True).start()


class Session:
    """One process. Where it stops an editor asks for the place and for expressions, steps over a
    line, and lets it go on."""

    def __init__(self, editor: Editor, port: int, process: int | None) -> None:
        self._editor, self._port, self._process = editor, port, process
        self._seq = 0
        self._asked: dict[int, str] = {}  # expressions by request
        self._why, self._thread = "", 0  # of the last stop

    def run(self) -> None:
        connected: list[socket.socket] = []

        def connects() -> bool:
            try:
                connected.append(socket.create_connection(("127.0.0.1", self._port)))
            except OSError:
                return False
            return True

        await_true(connects, "debugger that listens")
        self._conn = connected[0]
        with self._conn, self._conn.makefile("rb") as said:
            self._send("initialize", adapterID="test", pathFormat="path")
            while (length := self._length(said)) is not None:
                self._heard(json.loads(said.read(length)))

    def _heard(self, message: dict[str, Any]) -> None:
        body, told = message.get("body") or {}, self._editor.told
        if message.get("success") is False:
            print(f"process {self._process}: {message}")  # shown if the test fails
        match message.get("event") or f"answer to {message.get('command')}":
            case "answer to initialize":
                more = {} if self._process is None else {"subProcessId": self._process}
                where = {"host": "127.0.0.1", "port": self._editor.port}
                self._send("attach", connect=where, subProcess=True, justMyCode=False, **more)
            case "initialized":
                path = str(self._editor.script)
                self._send("setBreakpoints", source={"path": path}, breakpoints=[{"line": 3}])
                if self._process is not None:
                    self._send("setExceptionBreakpoints", filters=["raised"])
                self._send("configurationDone")
            case "debugpyAttach":
                told["child"] += 1
                self._editor.attach(body["connect"]["port"], body["subProcessId"])
            case "terminated":  # whoever is still connected keeps the debugger's own process
                self._send("disconnect")
            case "stopped":
                self._why, self._thread = body["reason"], body["threadId"]
                self._send("stackTrace", threadId=self._thread, levels=1)
            case "answer to stackTrace":
                self._stands(body["stackFrames"][0])
            case "answer to evaluate":
                told[f"{self._asked.pop(message['request_seq'])}: {body.get('result')}"] += 1
                if not self._asked:
                    goes = "next" if self._why == "breakpoint" else "continue"
                    self._send(goes, threadId=self._thread)

    def _stands(self, frame: dict[str, Any]) -> None:
        if frame["source"].get("path") != str(self._editor.script):
            self._send("continue", threadId=self._thread)
            return
        self._editor.told[f"stopped: {self._why} at {frame['name']}:{frame['line']}"] += 1
        for expression in EXPRESSIONS[self._why]:
            sent = self._send("evaluate", expression=expression, frameId=frame["id"])
            self._asked[sent] = expression
        if not EXPRESSIONS[self._why]:
            self._send("continue", threadId=self._thread)

    def _send(self, command: str, **arguments: object) -> int:
        self._seq += 1
        data = {"seq": self._seq, "type": "request", "command": command, "arguments": arguments}
        text = json.dumps(data).encode()
        self._conn.sendall(b"Content-Length: %d\r\n\r\n" % len(text) + text)
        return self._seq

    @staticmethod
    def _length(said: Any) -> int | None:
        length = None
        while (line := said.readline().strip()) or length is None:
            if not line:
                return None
            length = int(line.split(b":")[1])
        return length


def is_ready(launcher: int, port: int) -> bool:
    """Whether debugpy has started in this launcher and has stopped listening for its adapter. An
    editor that connects to the adapter before that sometimes keeps debugpy from starting."""
    with contextlib.suppress(psutil.Error):
        ports = {one.laddr.port for one in psutil.net_connections("tcp") if one.status == "LISTEN"}
        own = psutil.Process(launcher).net_connections("tcp")
        return port in ports and bool(own) and all(one.status != "LISTEN" for one in own)
    return False


@pytest.mark.parametrize("launcher", cases([TORCHRUN, ELASTICRUN], kept=[ELASTICRUN]))
def test_each_rank_stops_at_its_breakpoint(world: World, launcher: str) -> None:
    needs.packages("debugpy")
    script = world.scratch / "train.py"
    script.write_text(SCRIPT)
    port = free_port()
    listens = (sys.executable, "-m", "debugpy", "--listen", f"127.0.0.1:{port}")
    words = ("--wait-for-client", *COMMANDS[launcher][1:], "--standalone", "--nproc-per-node=2")
    editor = Editor(port, script)
    quiet = {"PYDEVD_DISABLE_FILE_VALIDATION": "1"}
    launched = world.command((*listens, *words, str(script)), env={**COLD, **quiet})
    await_true(lambda: is_ready(launched.pid, port), "debugger that listens")
    editor.attach(port)
    assert launched.wait() == 0, launched.stderr
    assert sorted(launched.stdout.splitlines()) == ["rank 0", "rank 1"]
    assert editor.told == SESSION
