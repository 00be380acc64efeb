"""Who this node is, found out before the first dial; a name server or a disk may be slow."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Final

from elasticrun import __version__
from elasticrun.agent import identity
from elasticrun.agent.events import EventLog
from elasticrun.agent.threads import in_thread
from elasticrun.config import AgentConfig
from elasticrun.core.worker_group import WorkerGroup
from elasticrun.operator_log import StderrWriter, logger
from elasticrun.wire.messages import PROTOCOL_VERSION, Hello

NAME_LIMIT: Final = 2.0
"""Seconds that a name server may take to say how this host is called."""


SLOT_LIMIT: Final = 15.0
"""Seconds for the lock on this node's place in the job; the user's folder may be on a network."""


@dataclass(frozen=True, slots=True)
class Introduction:
    """What was found."""

    identity: identity.Identity
    host: str  # its name for people
    events: EventLog


def hello(
    config: AgentConfig, node: str, incarnation: str, host: str, address: str, brain: WorkerGroup
) -> Hello:
    """What this node says to a master first. `host`: its name for people; `address`: what other
    nodes dial."""
    return Hello(
        protocol=PROTOCOL_VERSION,
        version=__version__,
        node=node,
        incarnation=incarnation,
        host=host,
        address=address,
        pid=os.getpid(),
        node_rank=config.node_rank,
        local_world_size=config.nproc_per_node,
        role=config.role,
        spec=config.spec,
        attached=brain.attached(),
        last_term=brain.term,
    )


async def introduce(config: AgentConfig, writer: StderrWriter) -> Introduction:
    """This node's id, its host's name, and the event log, which bears both."""
    try:
        found = await in_thread(
            lambda: identity.identify(config.node_id, config.spec.job_id, os.environ),
            limit=SLOT_LIMIT,
            name="identity",
            late=identity.Identity.release,
        )
    except TimeoutError as error:
        found = identity.for_this_life(str(error) or f"no answer of the disk for {SLOT_LIMIT:g} s")
    if found.note:
        logger.warning("%s", found.note)
    try:
        host = await in_thread(identity.host_name, limit=NAME_LIMIT, name="host-name")
    except TimeoutError:
        host = os.uname().nodename
    events = EventLog(
        config.event_log_handler,
        writer.write,
        run_id=config.spec.job_id,
        role=config.role,
        host=host,
        backend=config.rendezvous.kind,
        entry_point=config.entry.target,
    )
    return Introduction(found, host, events)
