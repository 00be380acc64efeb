"""Messages as hypothesis draws them: everything the wire allows."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from elasticrun.wire import messages as m
from elasticrun.wire.bounds import MAX_ATTEMPT, MAX_LOCAL_RANKS, MAX_SECONDS
from elasticrun.wire.types import Endpoint, RoundName

PRINTABLE = st.characters(codec="utf-8", exclude_categories=("C", "Zl", "Zp", "Zs")) | st.just(" ")
NAMES = st.text(PRINTABLE, min_size=1, max_size=40)
MAYBE = st.text(PRINTABLE, max_size=40)
TEXTS = st.text(st.characters(codec="utf-8"), max_size=200)
SECONDS = st.floats(0, MAX_SECONDS, allow_nan=False)
LIMITS = st.floats(0, MAX_SECONDS, exclude_min=True)
RATIOS = st.floats(1, exclude_min=True, allow_nan=False, allow_infinity=False)
AMOUNTS = st.floats(0, allow_nan=False, allow_infinity=False)
COUNTS = st.integers(0, 2**31 - 1)
LONGS = st.integers(0, 2**63 - 1)
PIDS = st.integers(-1, 2**31 - 1)
NODES = st.integers(1, m.MAX_NODES)
EXITS = st.integers(0, 255)

rounds = st.builds(RoundName, LONGS, st.integers(1, 2**63 - 1), NAMES)
endpoints = st.builds(Endpoint, NAMES, st.integers(1, 65535))
failures = st.builds(
    m.Failure,
    MAYBE,
    st.integers(-1, m.MAX_RANKS),
    st.integers(-1, MAX_LOCAL_RANKS),
    PIDS,
    st.integers(-(2**31) + 1, 2**31 - 1),
    LONGS,
    st.sampled_from(m.FailureKind),
    TEXTS,
    TEXTS,
    TEXTS,
)
failure_lists = st.lists(failures, max_size=m.MAX_FAILURES).map(tuple)


checks = st.builds(
    m.CheckSpec,
    st.booleans(),
    st.booleans(),
    AMOUNTS,
    st.booleans(),
    RATIOS,
    SECONDS,
    LIMITS,
    SECONDS,
    NODES,
)


@st.composite
def specs(draw: Any, job_id: str | None = None) -> m.JobSpec:
    low, high = sorted((draw(NODES), draw(NODES)))
    return m.JobSpec(
        job_id=draw(MAYBE) if job_id is None else job_id,
        min_nodes=low,
        max_nodes=high,
        node_unit=draw(NODES),
        max_restarts=draw(COUNTS),
        restart_backoff=draw(SECONDS),
        restart_window=draw(SECONDS),
        join_timeout=draw(SECONDS),
        last_call_timeout=draw(SECONDS),
        heartbeat_timeout=draw(SECONDS),
        grow=draw(st.sampled_from(("auto", "now"))),
        grow_cooldown=draw(SECONDS),
        restart_grace=draw(SECONDS),
        master_lost_timeout=draw(SECONDS),
        checks=draw(checks),
        saves=draw(st.builds(m.SaveSpec, st.booleans(), LIMITS)),
    )


@st.composite
def places(draw: Any) -> dict[str, Any]:
    nodes = draw(NODES)
    world = draw(st.integers(1, m.MAX_RANKS))
    return {
        "round": draw(rounds),
        "group_rank": draw(st.integers(0, nodes - 1)),
        "group_world_size": nodes,
        "first_rank": draw(st.integers(0, world - 1)),
        "world_size": world,
        "restart_count": draw(COUNTS),
        "store": draw(endpoints),
    }


WORLDS = st.integers(1, m.MAX_RANKS)
restores = st.builds(m.Restore, rounds, LONGS, WORLDS)
REWOUND = st.just(-1) | LONGS


@st.composite
def round_reports(draw: Any) -> m.RoundReport:
    restore = draw(st.none() | restores)
    return m.RoundReport(**draw(places()), restore=restore, rewound_from=draw(REWOUND))


@st.composite
def starts(draw: Any) -> m.Start:
    return m.Start(
        **draw(places()),
        role_first_rank=draw(st.integers(0, m.MAX_RANKS)),
        role_world_size=draw(st.integers(1, m.MAX_RANKS)),
        host_store=draw(st.booleans()),
        restore=draw(st.none() | restores),
        rewound_from=draw(REWOUND),
    )


@st.composite
def probes(draw: Any) -> m.Probe:
    place = draw(places())
    return m.Probe(
        check=draw(NAMES),
        perf=draw(st.booleans()),
        partners=draw(TEXTS),
        group_rank=place["group_rank"],
        group_world_size=place["group_world_size"],
        first_rank=place["first_rank"],
        world_size=place["world_size"],
        store=place["store"],
        limit=draw(SECONDS),
    )


def hellos(job_id: str | None = None) -> st.SearchStrategy[m.Hello]:
    return st.builds(
        m.Hello,
        protocol=st.just(m.PROTOCOL_VERSION),
        version=NAMES,
        node=NAMES,
        incarnation=NAMES,
        host=MAYBE,
        address=NAMES,
        pid=PIDS,
        node_rank=st.integers(-1, m.MAX_NODES - 1),
        local_world_size=st.integers(1, MAX_LOCAL_RANKS),
        role=MAYBE,
        spec=specs(job_id),
        attached=st.none() | round_reports(),
        last_term=st.integers(0, 2**63 - 1),
    )


nonces = st.binary(min_size=m.NONCE_BYTES, max_size=m.NONCE_BYTES)
proofs = st.just(b"") | st.binary(min_size=m.PROOF_BYTES, max_size=m.PROOF_BYTES)
knocks = st.builds(
    m.Knock,
    st.just(m.PROTOCOL_VERSION),
    NAMES,
    MAYBE,
    st.sampled_from(m.Role),
    MAYBE,
    MAYBE,
    nonces,
    st.booleans(),
)
challenges = st.builds(m.Challenge, st.just(m.PROTOCOL_VERSION), NAMES, LONGS, nonces, proofs)

pid_lists = st.lists(PIDS, max_size=20).map(tuple)

probed = st.builds(
    m.Probed,
    NAMES,
    st.booleans(),
    st.sampled_from(m.ProbePhase),
    st.booleans(),
    st.booleans(),
    TEXTS,
    SECONDS,
    AMOUNTS,
    st.lists(st.builds(m.Transfer, LONGS, SECONDS), max_size=m.MAX_TRANSFERS).map(tuple),
    SECONDS,
    SECONDS,
)

RANKS = st.integers(0, m.MAX_RANKS)
ATTEMPTS = st.text(PRINTABLE, min_size=1, max_size=MAX_ATTEMPT)


@st.composite
def holdings(draw: Any) -> m.Holding:
    contents = draw(st.lists(LONGS, min_size=1, max_size=20))
    first = draw(st.integers(0, m.MAX_RANKS - len(contents)))
    world = draw(st.integers(first + len(contents), m.MAX_RANKS))
    flags = [draw(st.booleans()) for _ in range(3)]
    return m.Holding(draw(rounds), draw(LONGS), first, world, tuple(contents), *flags)


@st.composite
def replicates(draw: Any) -> m.Replicate:
    world = draw(st.integers(1, m.MAX_RANKS))
    ranks = draw(st.lists(st.integers(0, world - 1), min_size=1, max_size=8, unique=True))
    contents = tuple(draw(st.integers(1, 2**63 - 1)) for _ in ranks)
    return m.Replicate(*(draw(rounds), draw(LONGS), world, tuple(ranks), contents), draw(endpoints))


@st.composite
def persists(draw: Any) -> m.Persist:
    world = draw(st.integers(1, m.MAX_RANKS))
    ranks = draw(st.lists(st.integers(0, world - 1), min_size=1, max_size=8, unique=True))
    coordinator = draw(st.none() | endpoints)
    return m.Persist(
        attempt=draw(ATTEMPTS),
        round=draw(rounds),
        step=draw(LONGS),
        world_size=world,
        ranks=tuple(ranks),
        shared=tuple(draw(st.lists(st.sampled_from(ranks), max_size=8, unique=True))),
        writers=draw(st.integers(len(ranks), m.MAX_RANKS)),
        coordinates=coordinator is None,
        coordinator=coordinator,
        reason=draw(st.sampled_from(("periodic", "breakpoint", "asked"))),
        limit=draw(LIMITS),
        rewound_from=draw(REWOUND),
    )


later_reports: st.SearchStrategy[m.Report] = st.one_of(
    st.builds(m.Join, endpoints),
    st.builds(m.Running, rounds, pid_lists),
    st.builds(m.RanksFailed, rounds, failure_lists),
    st.builds(m.Stopping, rounds, SECONDS),
    st.builds(m.Stopped, rounds),
    st.builds(m.Finished, rounds),
    st.builds(m.Leaving, TEXTS, st.integers(0, 64)),
    st.builds(m.Beat, LONGS),
    probed,
    st.builds(m.Steps, rounds, LONGS, st.integers(1, 2**31 - 1), SECONDS, SECONDS, SECONDS),
    st.builds(m.ReachMe, st.integers(1024, 65535), nonces),
    st.builds(
        m.Holdings,
        st.none() | endpoints,
        st.lists(holdings(), max_size=m.MAX_HOLDINGS).map(tuple),
        st.booleans(),
        st.none() | st.builds(m.LastRound, rounds, WORLDS, st.none() | restores, REWOUND),
    ),
    st.builds(m.NotReplicated, rounds, LONGS, TEXTS),
    st.builds(m.WhereIs, rounds, LONGS, RANKS),
    st.builds(m.ShardBad, rounds, LONGS, RANKS, TEXTS),
    st.builds(m.Persisted, ATTEMPTS, st.booleans(), st.booleans(), TEXTS, LONGS, SECONDS),
    st.builds(
        m.Departing,
        *(rounds, TEXTS, st.integers(1, 64), LONGS, st.integers(1, m.MAX_MARGIN)),
        st.just(-1) | LONGS,
    ),
    st.builds(m.Missed, rounds, LONGS, LONGS),
)
reports: st.SearchStrategy[m.Report] = (
    hellos() | later_reports | knocks | st.builds(m.Proof, proofs)
)

orders: st.SearchStrategy[m.Order] = st.one_of(
    challenges,
    st.builds(
        m.Welcome,
        st.just(m.PROTOCOL_VERSION),
        NAMES,
        MAYBE,
        LONGS,
        SECONDS,
        SECONDS,
        MAYBE,
        LONGS,
    ),
    st.builds(m.Refused, TEXTS, EXITS),
    st.builds(m.Wait, TEXTS),
    st.builds(m.Park, TEXTS, SECONDS),
    starts(),
    st.builds(m.Stop, rounds, TEXTS),
    st.builds(m.End, EXITS, TEXTS, failure_lists),
    st.builds(m.Echo, LONGS, SECONDS),
    probes(),
    st.builds(m.Watermark, rounds, LONGS, LONGS),
    persists(),
    replicates(),
    st.builds(m.CommitCheckpoint, ATTEMPTS),
    st.builds(m.SaveAt, rounds, LONGS, TEXTS),
    st.builds(m.PersistOver, st.just("") | ATTEMPTS, rounds, LONGS, st.booleans(), TEXTS),
    st.builds(
        m.Holder,
        rounds,
        LONGS,
        RANKS,
        st.integers(-1, m.MAX_RANKS),
        st.none() | endpoints,
        TEXTS,
    ),
)

node_statuses = st.builds(
    m.NodeStatus,
    NAMES,
    MAYBE,
    MAYBE,
    MAYBE,
    MAYBE,
    TEXTS,
    st.integers(-1, m.MAX_RANKS),
    st.integers(-1, m.MAX_RANKS),
    st.integers(0, MAX_LOCAL_RANKS),
    pid_lists,
    TEXTS,
)
excluded = st.builds(
    m.ExcludedNode,
    NAMES,
    MAYBE,
    st.sampled_from(("failed", "slow")),
    TEXTS,
    SECONDS,
    SECONDS,
)
statuses = st.builds(
    m.JobStatus,
    MAYBE,
    MAYBE,
    TEXTS,
    st.none() | rounds,
    st.integers(0, m.MAX_RANKS),
    COUNTS,
    COUNTS,
    COUNTS,
    st.integers(0, m.MAX_NODES),
    st.integers(0, m.MAX_NODES),
    st.lists(node_statuses, max_size=4).map(tuple),
    TEXTS,
    TEXTS,
    st.lists(excluded, max_size=4).map(tuple),
    TEXTS,
    TEXTS,
)
reached = st.builds(
    m.Reached,
    st.booleans(),
    TEXTS,
    MAYBE,
    st.integers(0, 2**31 - 1),
    LONGS,
    MAYBE,
)
answers: st.SearchStrategy[m.StatusAnswer] = st.one_of(
    challenges, st.builds(m.Refused, TEXTS, EXITS), statuses, reached
)
