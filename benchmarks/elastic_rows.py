"""The measurements of the elastic table. Each returns samples; most take a launcher's name.

Unless a docstring says otherwise, a sample is the seconds from the event (the signal, the command)
to the slowest rank's first step after it, as the script reports it. A job that does not get that
far raises TookTooLong with a few words for the table.
"""

from __future__ import annotations

import contextlib
import time
from itertools import pairwise

from nodes import FIRST_STEP_LIMIT, Nodes, await_answer, etcd, only_elasticrun
from rows import last, warm_process
from stage import ELASTICRUN, NVRX, TORCHRUN, TookTooLong, free_port, job

from elasticrun.wire.env import RESTART_COUNT

RECOVERY_LIMIT = 90.0
"""Seconds to wait for survivors; torchrun took 44 s when it recovered."""

SILENT_LIMIT = 60.0
"""Seconds to wait for torchrun's reaction to a silent node: it does nothing until a collective
fails."""

QUIET = ("--rdzv-conf=last_call_timeout=30",)


def start_together(launcher: str, *, warm: bool = False) -> list[float]:
    """Two agents of `1:4` started together: from the commands to the first step at world size 2.
    `warm`: a warm process runs, as on a host where `elasticrun warm` was run."""
    with job(launcher) as run, warm_process(run) if warm else contextlib.nullcontext({}) as more:
        nodes = Nodes(run, "1:4", more=more)
        began = nodes.add(2)
        return [last(nodes.first_steps(2, began, FIRST_STEP_LIMIT)) - began]


def lose_a_node(launcher: str, *, host: bool, conf: str = "", freeze: bool = False) -> list[float]:
    """One of three nodes is killed or, with `freeze`, falls silent: until the survivors' first
    step. `host`: it is the node that hosts the master (which keeps running) or torchrun's store.
    Otherwise it is another one, and when elasticrun's nodes are killed, each of the others in
    turn."""
    found: list[float] = []
    for turn in range(1 if host or freeze or launcher == TORCHRUN else 2):
        with job(launcher) as run:
            nodes = Nodes(run, "2:3", *only_elasticrun(launcher, *((conf,) if conf else ())))
            nodes.add(3)
            nodes.first_steps(3, 0.0, FIRST_STEP_LIMIT)
            nodes.settle()
            hosting = nodes.host()
            victim = hosting if host else [n for n in range(3) if n != hosting][turn]
            happened = nodes.freeze(victim) if freeze else nodes.kill(victim)
            limit = SILENT_LIMIT if freeze and launcher == TORCHRUN else RECOVERY_LIMIT
            found.append(last(nodes.first_steps(2, happened, limit)) - happened)
    return found


def lose_a_node_with_setup(launcher: str, *, recovers: bool = False) -> list[float]:
    """One of two nodes is killed, with a script that has 5 s of setup: until the survivor's first
    step. `recovers`: a recoverable function keeps the setup."""
    more = {"BENCH_SETUP": "5", **({"BENCH_RECOVERS": "1"} if recovers else {})}
    with job(launcher) as run:
        nodes = Nodes(run, "1:2", *only_elasticrun(launcher), script="set_up.py", more=more)
        nodes.add(2)
        nodes.first_steps(2, 0.0, FIRST_STEP_LIMIT)
        nodes.settle()
        happened = nodes.kill(1 - nodes.host())
        return [last(nodes.first_steps(1, happened, RECOVERY_LIMIT)) - happened]


def lose_a_rank_under_nvrx() -> list[float]:
    """The same two ranks under NVRx's in-process restart, without a launcher."""
    with job(NVRX) as run:
        port = str(free_port())
        for rank in range(2):
            place = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
            place |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, RESTART_COUNT: "0"}
            more = {**place, "BENCH_SETUP": "5"}
            run.start(script="set_up_nvrx.py", arguments=("0.01",), more=more)
        run.until(lambda: len(run.of("allreduce")) == 2, FIRST_STEP_LIMIT)
        time.sleep(1.0)
        happened = time.monotonic()
        run.agents[1].kill()
        run.until(lambda: len(run.of("allreduce")) == 3, RECOVERY_LIMIT)
        return [last(run.of("allreduce")) - happened]


def join(launcher: str, *, nnodes: str, age: float, flags: tuple[str, ...] = ()) -> list[float]:
    """A third node joins, `age` seconds after the first step at world size 2: from its command to
    the first step at world size 3. Under elasticrun the survivors must keep their ranks."""
    with job(launcher) as run:
        nodes = Nodes(run, nnodes, *only_elasticrun(launcher, *flags))
        nodes.add(2)
        before = {f.node: f.rank for f in nodes.first_steps(2, 0.0, FIRST_STEP_LIMIT)}
        nodes.settle(age)
        began = nodes.add()
        facts = nodes.first_steps(3, began, RECOVERY_LIMIT)
        after = {f.node: f.rank for f in facts}
        if launcher == ELASTICRUN and any(after[node] != rank for node, rank in before.items()):
            raise TookTooLong(f"survivors' ranks changed: {before} -> {after}")
        return [last(facts) - began]


def lose_the_master() -> dict[str, list[float]]:
    """The master is killed while two nodes train. `back`: seconds until it answers again; `pause`:
    the longest time in ms between two steps of a rank meanwhile; `anew`: the number of restarted
    ranks."""
    with job(ELASTICRUN) as run:
        nodes = Nodes(run, "2")
        nodes.add(2)
        nodes.first_steps(2, 0.0, FIRST_STEP_LIMIT)
        nodes.settle()
        before = len(nodes.steps())
        killed = time.monotonic()
        nodes.master().kill()
        back = await_answer(nodes.port, 30.0) - killed
        nodes.settle(2.0)
        steps = nodes.steps()
        pauses = [
            after - before
            for times in steps.values()
            for before, after in pairwise(times)
            if after > killed
        ]
        return {
            "back": [back],
            "pause": [1000 * max(pauses)],
            "anew": [float(len(steps) - before)],
        }


def lose_the_masters_host() -> list[float]:
    """With etcd, all processes of the node that hosts the master are killed, including the
    master."""
    with job(ELASTICRUN) as run, etcd(run.folder) as store:
        nodes = Nodes(run, "2:3", f"--master-store={store}")
        nodes.add(3)
        nodes.first_steps(3, 0.0, FIRST_STEP_LIMIT)
        nodes.settle()
        killed = nodes.kill(master_host(nodes), master=True)
        return [last(nodes.first_steps(2, killed, RECOVERY_LIMIT)) - killed]


def master_host(nodes: Nodes) -> int:
    """The node whose agent started the master."""
    parent = nodes.master().ppid()
    return [agent.pid for agent in nodes.run.agents].index(parent)


# ---------------------------------------------------------------- what must cost nothing


def stalls(what: str, seconds: float) -> list[float]:
    """An agent or the master is stopped for some seconds and continued. Returns the number of
    restarted ranks."""
    with job(ELASTICRUN) as run:
        nodes = Nodes(run, "2:3")
        nodes.add(3)
        nodes.first_steps(3, 0.0, FIRST_STEP_LIMIT)
        nodes.settle()
        victim = nodes.master() if what == "the master" else nodes.processes(1)[0]
        before = len(nodes.steps())
        nodes.hold(victim, seconds)
        nodes.settle(6.0)  # longer than the default heartbeat timeout
        return [float(len(nodes.steps()) - before)]


def trickle(launcher: str, agents: int = 8, over: float = 40.0) -> list[float]:
    """Agents of `2:8` are started one after another. Returns the number of world sizes at which a
    step was completed."""
    with job(launcher) as run:
        nodes = Nodes(run, f"2:{agents}")
        began = time.monotonic()
        for number in range(agents):
            due = began + number * over / (agents - 1)
            with contextlib.suppress(TookTooLong):
                run.until(lambda: False, max(0.01, due - time.monotonic()))
            nodes.add()
        nodes.first_steps(agents, 0.0, FIRST_STEP_LIMIT)
        return [float(len({f.world for f in run.of("allreduce")}))]
