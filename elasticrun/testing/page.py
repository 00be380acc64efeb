"""The status of a job under test, read from its master's page, in any network namespace.

A master publishes its page in a file in its user's folder, so the page is found again when another
master serves, here or on another host. A socket belongs to the network namespace in which it was
created, so a thread enters the master's namespace, creates the socket, and ends.
"""

from __future__ import annotations

import ctypes
import http.client
import os
import socket
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

import msgspec

from elasticrun.host.system.processes import state
from elasticrun.host.user_folder import Published, published
from elasticrun.wire.messages import JobStatus

ANSWER_LIMIT: Final = 60.0
"""Seconds for a page to answer: at the first request a master imports its HTTP server, perhaps on a
busy machine."""

MAX_PAGE: Final = 64 * 1024 * 1024
CLONE_NEWNET: Final = 0x4000_0000


class NoPage(Exception):
    """No master's page answers; the message is a sentence."""


def masters(folders: Iterable[Path]) -> list[Published]:
    """The running masters that have published themselves in these folders."""
    return [master for folder in folders if folder.is_dir() for master in published(folder)]


def ask(master: Published) -> JobStatus:
    """Request the job's status from this master. Raises NoPage; at once if the master is stopped
    (SIGSTOP)."""
    if not master.status_url:
        raise NoPage(f"the master of process {master.pid} has no status page")
    if state(master.pid) == "T":
        raise NoPage(f"the master of process {master.pid} is stopped")
    where = urlsplit(master.status_url)
    connection = http.client.HTTPConnection(where.hostname or "", where.port, timeout=ANSWER_LIMIT)
    try:
        address = (where.hostname or "", where.port or 0)
        connection.sock = _connect(address, f"/proc/{master.pid}/ns/net")
        connection.request("GET", "/status")
        answer = connection.getresponse()
        body = answer.read(MAX_PAGE)
        if answer.status != 200:
            raise NoPage(f"the status page answers {answer.status}")
        # fields of later versions are ignored
        return msgspec.json.decode(body, type=JobStatus)
    except (OSError, http.client.HTTPException, ValueError, msgspec.MsgspecError) as error:
        raise NoPage(f"no status page at {master.status_url}: {error}") from None
    finally:
        connection.close()


def _connect(address: tuple[str, int], namespace: str) -> socket.socket:
    """Connect from a network namespace, given by its file. Raises OSError."""
    if os.path.samestat(os.stat(namespace), os.stat("/proc/self/ns/net")):
        return socket.create_connection(address, ANSWER_LIMIT)

    def connect() -> socket.socket:
        with open(namespace, "rb") as file:
            libc = ctypes.CDLL(None, use_errno=True)
            if libc.setns(file.fileno(), CLONE_NEWNET) != 0:
                raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        return socket.create_connection(address, ANSWER_LIMIT)

    with ThreadPoolExecutor(1) as thread:
        return thread.submit(connect).result()


def status(folders: Iterable[Path]) -> JobStatus:
    """The job's status from its master; of several masters, from the one with the highest round.
    Raises NoPage."""
    found: list[JobStatus] = []
    reasons = []
    for master in masters(folders):
        try:
            found.append(ask(master))
        except NoPage as error:
            reasons.append(str(error))
    if not found:
        raise NoPage(reasons[0] if reasons else "no master has published itself yet")
    return max(
        found, key=lambda page: (page.round.term, page.round.number) if page.round else (0, 0)
    )


def user_folder(xdg: Path) -> Path:
    """The folder in which masters started with XDG_RUNTIME_DIR=`xdg` publish themselves; created if
    missing."""
    folder = xdg / "elasticrun"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return folder
