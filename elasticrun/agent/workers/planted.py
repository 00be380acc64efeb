"""Faults that were planted in this node for a test: told loudly, and handed to its processes."""

from __future__ import annotations

import os

from elasticrun.operator_log import logger
from elasticrun.wire import env, env as faults


def misplanted() -> str:
    """Why ELASTICRUN_FAULT cannot be read, in one sentence; "" if it can, or is not set."""
    try:
        faults.read(os.environ.get(env.FAULT, ""))
    except faults.BadFault as error:
        return str(error)
    return ""


def planted_in(node: str) -> dict[str, str]:
    """What its ranks and probes are told of the faults that are planted in this node: one variable,
    or none. Warns of every fault, and in every node of the job that there are any."""
    text = os.environ.get(env.FAULT, "")
    if not text:
        return {}
    logger.warning("%s=%s: faults are planted in this job", env.FAULT, text)
    here = faults.of_node(text, node)
    for fault in here:
        logger.warning("planted in this node (%s): %s", node, fault.words)
    return {env.NODE_FAULT: faults.own_words(here)} if here else {}
