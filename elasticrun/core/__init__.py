"""All decisions of elasticrun: pure state machines.

Forbidden: I/O, clocks, threads, locks, logging, randomness, grpc, torch. Time is an argument
(`now`, monotonic seconds of the calling process). Nonces come from an argument (`mint`, a
function). Actions are returned as effects. The master's state machine, `job.job.Job`, and the
agent's, `worker.group.WorkerGroup`, have the same interface:

    step(event, now) -> list[Effect]     the only mutation; deterministic
    next_deadline() -> float | None      when step(Tick(), now) is due at the latest; no side effect
    status()                             an immutable status, with a reason for every wait

A large state machine has components, each with its own state. Components share a `context` and
return `wishes`. Those of `job.job` are streams, health, snapshots and others; those of
`worker.group` are leaving, probing and recall.
"""
