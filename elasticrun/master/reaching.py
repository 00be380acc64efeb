"""Whether this host can dial a reader's own (`elasticrun doctor`): the one place where the master
opens a connection.

It dials the address that the reader's stream comes from and no other, at a port above the system's
(the codec lets no other through), reads a nonce that the reader chose, and says nothing: nobody can
aim it at a third host.
"""

from __future__ import annotations

import asyncio
import hmac
import os
import socket
import time
from typing import Final
from urllib.parse import unquote

from elasticrun.wire.messages import Reached, ReachMe
from elasticrun.wire.route import mtu_to

DIAL_LIMIT: Final = 2.0
"""Seconds from the SYN to the last byte of the nonce; a second SYN goes out after one."""

MAX_REACHING: Final = 32
"""Readers that are served at a time; each holds one connection of ours for DIAL_LIMIT at most."""


def peer_address(peer: str) -> str:
    """The address in numbers out of gRPC's word for a peer (`ipv4:10.0.0.7:41234`,
    `ipv6:%5B::1%5D:41234`); "" if it is no address of a network."""
    kind, _, rest = unquote(peer).partition(":")
    host = rest.rpartition(":")[0].removeprefix("[").removesuffix("]")
    if kind not in ("ipv4", "ipv6"):
        return ""
    return host.removeprefix("::ffff:") if "." in host else host


async def reach(peer: str, asked: ReachMe) -> Reached:
    """Dial the peer as it asks."""
    began = time.time_ns()
    address = peer_address(peer)
    reason = await _why_not(address, asked) if address else "its address is not known here"
    return Reached(
        ok=not reason,
        reason=reason,
        address=address,
        mtu=mtu_to(address) if address else 0,
        # The middle, as the reader takes the middle between its asking and our answer for it.
        clock_us=(began + time.time_ns()) // 2000,
        host=socket.gethostname(),
    )


async def _why_not(address: str, asked: ReachMe) -> str:
    """What keeps the nonce from being read there, "" if it was."""
    writer: asyncio.StreamWriter | None = None
    try:
        async with asyncio.timeout(DIAL_LIMIT):
            reader, writer = await asyncio.open_connection(address, asked.port)
            said = await reader.readexactly(len(asked.nonce))
    except TimeoutError:
        return f"no answer within {DIAL_LIMIT:g} s"
    except asyncio.IncompleteReadError:
        return "the connection ended before its nonce"
    except OSError as wrong:
        return os.strerror(wrong.errno).lower() if wrong.errno else str(wrong)
    finally:
        if writer is not None:
            writer.transport.abort()
    return "" if hmac.compare_digest(said, asked.nonce) else "something else answers there"
