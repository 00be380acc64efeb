"""This node's identity across restarts of its agent, and the address that other nodes dial."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import re
import secrets
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from elasticrun.host.system.network import (
    is_loopback,
    names_this_host_only,
    routed_address,
    source_of,
)
from elasticrun.host.system.processes import boot_id
from elasticrun.host.user_folder import user_folder
from elasticrun.wire.env import CLUSTER_NODE

MAX_SLOTS: Final = 4096
"""Maximum number of agents of one job on one host; more indicate a bug."""


def host_name() -> str:
    """The host's name for users, as in torchrun's summary."""
    return socket.getfqdn()


# ---------------------------------------------------------------- node id


MACHINE_ID: Final = "/etc/machine-id"


def host_id(environ: Mapping[str, str]) -> str:
    """An id for this host that is very likely unique: a hash of host name and machine id.

    In Kubernetes another machine's pod may reuse the host name, and an image's machine id is the
    same on all machines. So there the boot id of the kernel replaces the machine id, together with
    the name of the cluster node if it is set (nodes that are containers on one machine share its
    kernel)."""
    machine = ""
    if "KUBERNETES_SERVICE_HOST" not in environ:
        with contextlib.suppress(OSError), open(MACHINE_ID) as file:
            machine = file.read().strip()
    machine = machine or boot_id()
    name, node = socket.gethostname(), environ.get(CLUSTER_NODE, "")
    digest = hashlib.sha256(f"{name}\0{machine}\0{node}".encode()).hexdigest()[:8]
    return f"{name}-{digest}"


@dataclass
class Slot:
    """This agent's slot number on this host (the lowest free one), held by a file lock for the
    agent's lifetime."""

    number: int
    path: str
    fd: int

    def release(self) -> None:
        """Release the slot and remove its file."""
        with contextlib.suppress(OSError):
            # Unlink under the lock: whoever waits for it then finds another inode and retries.
            os.unlink(self.path)
        os.close(self.fd)


def take_slot(folder: str, job_id: str) -> Slot:
    """Lock the lowest slot of this job that no running agent holds. Raises OSError."""
    safe = re.sub(r"[^A-Za-z0-9_.-]", "_", job_id)[:64]
    safe += "-" + hashlib.sha256(job_id.encode()).hexdigest()[:8]
    places = os.path.join(folder, "slots")
    os.makedirs(places, mode=0o700, exist_ok=True)
    number = 0
    while number < MAX_SLOTS:
        path = os.path.join(places, f"{safe}.{number}")
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            number += 1
            continue
        except OSError:
            os.close(fd)
            raise
        if _is_still_there(path, fd):
            return Slot(number, path, fd)
        os.close(fd)  # its last holder unlinked it between our open and our lock
    raise OSError(f"more than {MAX_SLOTS} agents of job {job_id} on this host")


def _is_still_there(path: str, fd: int) -> bool:
    try:
        return os.path.samestat(os.stat(path, follow_symlinks=False), os.fstat(fd))
    except FileNotFoundError:
        return False


@dataclass
class NodeId:
    """This node's id in its job, and the slot that reserves it."""

    text: str
    slot: Slot | None
    note: str = ""  # a sentence, if the id will not survive a restart of this agent

    def release(self) -> None:
        if self.slot is not None:
            self.slot.release()
            self.slot = None


def identify(given: str, job_id: str, environ: Mapping[str, str]) -> NodeId:
    """The node id: `given`, or the host's id and a slot. Blocks on the disk.

    If no folder is usable, the id is valid for this process only, and `note` says so."""
    if given:
        return NodeId(given, None)
    try:
        slot = take_slot(str(user_folder(environ)), job_id)
    except (OSError, RuntimeError) as error:  # RuntimeError: the user has no home directory
        return temporary_id(str(error), environ)
    return NodeId(f"{host_id(environ)}-{slot.number}", slot)


def temporary_id(why: str, environ: Mapping[str, str]) -> NodeId:
    """A random id for when no folder is usable."""
    name = f"{host_id(environ)}-{secrets.token_hex(4)}"
    note = f"no user folder ({why}): this node gets a new id at each start"
    return NodeId(name, None, note)


# ---------------------------------------------------------------- the address offered


def offered_address(local_addr: str | None, endpoint_host: str, master_address: str) -> str:
    """The address that other nodes dial to reach a store on this node.

    This is `--local-addr` if given, else the local address of the route to the master. If that is
    loopback although other hosts may resolve the endpoint's name (Debian's `127.0.1.1 hostname`),
    it is the default route's address: loopback would send other nodes to themselves."""
    if local_addr:
        return local_addr
    try:
        address = source_of(master_address)
    except OSError:
        address = routed_address() or "127.0.0.1"
    if is_loopback(address) and not names_this_host_only(endpoint_host):
        return routed_address() or address
    return address
