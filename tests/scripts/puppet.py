"""A rank that does what the test tells it, one order at a time; it says `done` after each.

Orders: exit(code) · die(signum) · trap(signums, how: note|ignore|save) · print(text,
stream) · allreduce · steps(count, text) · child(session, trap, note) · wait (for a signal)
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from stage import Stage

_GRANDCHILD = """
import os, signal, sys
if {trap}:
    signal.signal(signal.SIGTERM, lambda *_: (open({note!r}, "w").close(), os._exit(0)))
print("ready", flush=True)
while True:
    signal.pause()
"""


class Puppet:
    """The state between orders."""

    def __init__(self) -> None:
        self.stage = Stage()
        self.group_is_up = False

    def run(self) -> None:
        """Obey until told to exit; a test that hangs up wants the rank to stay."""
        for order in self.stage.orders():
            do = order.pop("do")
            result = getattr(self, "do_" + do)(**order) or {}
            self.stage.say("done", what=do, **result)
        while True:
            signal.pause()

    def do_exit(self, code: int = 0) -> None:
        sys.exit(code)

    def do_die(self, signum: int = signal.SIGKILL) -> None:
        os.kill(os.getpid(), signum)

    def do_trap(self, signums: list[int], how: str = "note", path: str = "") -> None:
        def noted(signum: int, _frame: object) -> None:
            self.stage.say("signal", signum=signum)
            if how == "save":
                with Path(path).open("w") as file:
                    for part in range(20):  # a save that takes a while and can be cut short
                        file.write(f"{part}\n")
                        file.flush()
                        time.sleep(0.02)
                    file.write("whole\n")
                sys.exit(0)

        for signum in signums:
            signal.signal(signum, signal.SIG_IGN if how == "ignore" else noted)

    def do_print(self, text: str, stream: str = "stdout") -> None:
        print(text, file=getattr(sys, stream), flush=True)

    def do_allreduce(self) -> dict[str, Any]:
        import torch
        import torch.distributed as dist

        if not self.group_is_up:
            dist.init_process_group("gloo")
            self.group_is_up = True
        value = torch.ones(1)
        dist.all_reduce(value)
        return {"sum": int(value.item())}

    def do_steps(self, count: int, text: str = "") -> None:
        """So many all-reduces, a hundredth of a second apart, writing `text` at each."""
        for _ in range(count):
            self.do_allreduce()
            print(text, end="", flush=True)
            time.sleep(0.01)

    def do_child(self, session: bool, trap: bool = False, note: str = "") -> dict[str, Any]:
        code = _GRANDCHILD.format(trap=trap, note=note)
        child = subprocess.Popen(
            [sys.executable, "-c", code], start_new_session=session, stdout=subprocess.PIPE
        )
        assert child.stdout is not None
        child.stdout.readline()
        return {"pid": child.pid}

    def do_wait(self) -> None:
        signal.pause()


if __name__ == "__main__":
    Puppet().run()
