"""A TCP relay that a test puts between an agent and its master, to make the link bad at will.

It runs in a thread with a loop of its own. While it is paused nothing passes in either direction
and new connections get no answer, as on a cable that is out: nothing is lost that TCP would not
send again, and nobody gets a FIN or RST.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from tests.counting import let_pass
from tests.harness import LIMIT

CHUNK = 64 * 1024


class Relay:
    """Listens on `port` of loopback and passes on to `target`."""

    def __init__(self, target: int) -> None:
        self.taken: queue.SimpleQueue[None] = queue.SimpleQueue()
        """One entry for each connection taken."""
        self._target = target
        self._open: set[asyncio.StreamWriter] = set()
        self._loop = asyncio.new_event_loop()
        self._flowing = asyncio.Event()
        self._flowing.set()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_until_complete(asyncio.start_server(self._take, sock=self._listener))
        self._loop.run_forever()
        for task in asyncio.all_tasks(self._loop):
            task.cancel()
        self._loop.run_until_complete(asyncio.sleep(0))
        self._loop.close()

    async def _take(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.taken.put(None)
        await self._flowing.wait()
        try:
            there, back = await asyncio.open_connection("127.0.0.1", self._target)
        except OSError:
            writer.close()
            return
        self._open |= {writer, back}
        try:
            await asyncio.gather(self._carry(reader, back), self._carry(there, writer))
        finally:
            for end in (writer, back):
                self._open.discard(end)
                end.close()

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(CHUNK):
                await self._flowing.wait()
                writer.write(data)
                await writer.drain()
            await self._flowing.wait()
            if writer.can_write_eof():
                writer.write_eof()

    def _call(self, what: object) -> None:
        done = threading.Event()

        def body() -> None:
            what()  # type: ignore[operator]
            done.set()

        self._loop.call_soon_threadsafe(body)
        assert done.wait(240), "the relay's loop does not turn"

    def pause(self, seconds: float) -> None:
        """Let nothing pass for so long."""
        self._call(self._flowing.clear)
        let_pass(seconds)
        self._call(self._flowing.set)

    def reset(self) -> None:
        """Break every connection with an RST on both sides, as a NAT that forgets does, and wait
        until the next one comes."""

        def body() -> None:
            for writer in list(self._open):
                ends = writer.get_extra_info("socket")
                if ends is not None:
                    ends.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                writer.transport.abort()

        while not self.taken.empty():
            self.taken.get()
        self._call(body)
        self.taken.get(timeout=LIMIT)

    def close(self) -> None:
        """End it and its connections."""
        self._call(self._loop.stop)
        self._thread.join(240)
        self._listener.close()


@contextmanager
def relay_to(target: int) -> Iterator[Relay]:
    """A relay for the length of a block."""
    relay = Relay(target)
    try:
        yield relay
    finally:
        relay.close()
