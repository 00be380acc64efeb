"""The messages about node health: what is asked of the checks, probes and what came of them, how
training goes on a node, who is excluded, and a reader's wish to be dialled.

They are messages like those of `messages.py`, which shows them under its own name too.
"""

from __future__ import annotations

from enum import StrEnum

from msgspec import Struct

from elasticrun.wire.ids import Endpoint, RoundName

MAX_TRANSFERS = 16
"""Most message sizes that one probe measures."""

MAX_EXCLUDED = 1000
"""Most excluded nodes that are remembered; the oldest are forgotten first."""


class CheckSpec(Struct, frozen=True):
    """How the job looks after the health of its nodes; part of the JobSpec."""

    network: bool = False  # --network-check: no node enters a round before it has passed
    perf: bool = False  # --comm-perf-test: one all_reduce over all good nodes, once before training
    perf_floor: float = 0.0  # bus bandwidth (GB/s) that it must reach at its largest size; 0: none
    exclude_stragglers: bool = False  # --exclude-straggler
    slow_ratio: float = 1.5  # a node is slow from this multiple of the others' median on
    slow_for: float = 30.0  # and while training: for so many seconds
    probe_limit: float = 60.0  # seconds for one probe, after which it is ended
    exclude_for: float = 3600.0  # seconds for which an excluded node is refused
    quarantine: int = 0  # --quarantine: so many excluded nodes at once stay parked


class ProbePhase(StrEnum):
    """How far a probe has come; a failed one names the phase in which it failed."""

    START = "start"  # its process was not there yet, or could not import what it needs
    COMPUTE = "compute"  # the timed matmul
    MEET = "meet"  # forming the process group with the partner
    COMM = "comm"  # the timed all_reduce
    DONE = "done"


class Transfer(Struct, frozen=True):
    """One size of all_reduce, as the slowest local rank saw it."""

    size: int  # bytes of the reduced buffer
    seconds: float  # of one all_reduce


class Probed(Struct, frozen=True):
    """What came of the m.Probe of the same `check` on this node: the worst of its local ranks."""

    check: str
    ok: bool
    phase: ProbePhase  # where it failed; DONE if it did not
    own: bool  # it failed by itself, with no part of any other node in it (START and COMPUTE)
    excused: bool  # it could not be finished because another node of the group said it had failed
    reason: str  # a clause with the time it took and the limit, without phase and partner; "" if ok
    compute: float  # seconds of one matmul, the slowest local rank's; 0.0: not measured
    flops: float  # floating point operations of one matmul
    transfers: tuple[Transfer, ...]
    seconds: float  # that the whole probe took, of which ...
    timed: float  # ... so many were timed work


class Steps(Struct, frozen=True):
    """How training goes on this node, from `elasticrun.training.progress`: the slowest local rank.

    Means over the steps since the last report, in seconds. `waited` is what the rank spent in
    collectives, waiting for others: a slow rank waits least."""

    round: RoundName
    step: int  # the newest
    steps: int  # in this report
    seconds: float  # of one step
    own: float  # of one step, without waiting; 0.0 where it is not known
    waited: float


class Probe(Struct, frozen=True):
    """Probe this machine, and its links to the other nodes of a small group, of which only this
    node's own place is told. A newer `check` takes the place of one that is under way."""

    check: str  # unique name of this group's probe; also the prefix of its keys in the store
    perf: bool  # the all_reduce over all good nodes, in several sizes; no matmul
    partners: str  # the other nodes, in words; "" where there is none
    group_rank: int
    group_world_size: int  # nodes; 1: this machine alone
    first_rank: int
    world_size: int  # ranks in the group
    store: Endpoint  # offered in a Join by the group's first node
    limit: float  # seconds, after which the probe is ended and has failed


class Park(Struct, frozen=True):
    """This node is excluded and is to stay, without ranks, so that nobody is given its machine."""

    reason: str
    seconds: float  # after which it ends, if the job has not ended before


class ExcludedNode(Struct, frozen=True):
    """A node that the job refuses, for people and for schedulers."""

    node: str
    host: str
    kind: str  # "failed" (network check) or "slow" (straggler)
    reason: str  # the verdict with its evidence
    age: float  # seconds since
    remaining: float  # seconds until it may come back and is probed anew


class ReachMe(Struct, frozen=True):
    """A reader asks the master to dial `port` at the address its stream comes from, and to read
    `nonce` there (elasticrun doctor)."""

    port: int
    nonce: bytes


class Reached(Struct, frozen=True):
    """The answer to a ReachMe, and what a doctor wants to know of the master's host."""

    ok: bool
    reason: str  # why not, in a clause
    address: str  # the reader's, as the master sees it
    mtu: int  # of the interface on the master's side, 0: unknown
    clock_us: int
    host: str
