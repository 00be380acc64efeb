"""The real command line in a process whose loop, or whose interpreter, a test can block.

The test finds it at its hub by its node's id, or as `master`. Orders: loop(seconds) blocks the
event loop's thread (a file system that hangs, a long garbage collection); gil(seconds) holds the
interpreter's lock, so that no Python thread of the process runs at all (a C extension that does not
let go).
"""

from __future__ import annotations

import asyncio
import ctypes
import json
import os
import socket
import sys
import threading
import time

LOOPS: list[asyncio.AbstractEventLoop] = []


class Remembering(asyncio.DefaultEventLoopPolicy):
    """Notes the loops that are made."""

    def new_event_loop(self) -> asyncio.AbstractEventLoop:
        loop = super().new_event_loop()
        LOOPS.append(loop)
        return loop


def listen() -> None:
    """Carry out the test's orders, from a thread of its own."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.connect(os.environ["ELASTICRUN_TEST_SOCKET"])

    def say(**what: object) -> None:
        connection.sendall(json.dumps(what).encode() + b"\n")

    ids = [word.partition("=")[2] for word in sys.argv if word.startswith("--node-id=")]
    say(event="hello", rank=-1, name=ids[-1] if ids else "master")
    for line in connection.makefile("r"):
        order = json.loads(line)
        seconds = float(order["seconds"])
        if order["do"] == "loop":
            over = threading.Event()

            def block(seconds: float = seconds, over: threading.Event = over) -> None:
                time.sleep(seconds)
                over.set()

            LOOPS[-1].call_soon_threadsafe(block)
            over.wait()
        else:
            ctypes.PyDLL(None).usleep(ctypes.c_uint(int(seconds * 1e6)))  # PyDLL keeps the lock
        say(event="over", what=order["do"])


if __name__ == "__main__":
    asyncio.set_event_loop_policy(Remembering())
    threading.Thread(target=listen, daemon=True).start()
    from elasticrun.cli.main import main

    sys.exit(main(sys.argv[1:]))
