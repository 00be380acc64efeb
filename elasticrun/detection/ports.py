"""The port at which a job's nodes meet where nobody has named one: the same on every node.

It follows from the job's id alone, and lies outside Linux' ephemeral range (32768 to 60999), from
which any process may have been given one, and away from 29400 and 29500, which are torchrun's.
Two jobs of one host can be told the same port all the same. They never mix: the master of a job
lets in nobody with another job's id (`wire.proof`), and who is refused ends with that sentence;
`--rdzv-endpoint` names another port.
"""

from __future__ import annotations

import zlib
from typing import Final

PORTS: Final = range(20_000, 29_000)

_STEPS_APART: Final = 1_009
"""How far the ports of two steps of one job are apart; further than jobs of one host mostly are."""


def port_of_number(job: int, step: int = 0) -> int:
    """Of a job that has a number: the next len(PORTS) jobs all have others."""
    return PORTS[(job + step * _STEPS_APART) % len(PORTS)]


def port_of_name(name: str) -> int:
    """Of a job that has a name only."""
    return PORTS[zlib.crc32(name.encode()) % len(PORTS)]
