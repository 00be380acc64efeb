"""DECISIONS. Every rule of elasticrun is here, and nothing else is.

Forbidden: I/O, clocks, threads, locks, logging, randomness, grpc, torch. Time comes in as an
argument (`now`, monotonic seconds of the calling process), chance comes in as an argument
(`mint`, a function that gives nonces), and what is to be done goes out as effects. The master's
state machine, `job.job.Job`, and the agent's, `worker.group.WorkerGroup`, have one shape:

    step(event, now) -> list[Effect]     the only mutation; deterministic
    next_deadline() -> float | None      when step(Tick(), now) is due at the latest; a mere read
    status()                             a frozen picture, with a reason for every wait

A machine that is too large owns parts, each with a state of its own: `job.job` owns streams, health
and snapshots, which share a `context` and return `wishes`; `worker.group` owns how the node goes,
and its probe.
"""
