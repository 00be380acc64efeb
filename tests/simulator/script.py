"""Scenarios as text: what befalls a world, and the whole trace that is expected of it.

    # why this case exists, in a line or two
    job 2:4 max_restarts=1          the job's numbers; `world` and `job` lines come first
    0 node a b nproc=2              at second 0 two agents start
    5 fail b 1 ValueError: boom     at second 5 local rank 1 of b ends with code 1 (`fail b 1
                                    SIGKILL`: by that signal, `fail b 1 FINAL`: with 93)
    20 end
    ---
    the trace, line by line

Masters: `master kill`, `master crash after=record` (or before=; record, start, stop, end, welcome:
at the next such act), `master start TERM` (it knows nothing), `master start TERM record`, or
`record=N`: one as old as round N.

Node health: `check network=1 slow_for=5` (a line like `job`) sets how the job looks after it;
`fault b compute` (or comm, hang, none; `fault b link c`) and `slow b 3` plant what `probes`
knows; `world steps=1` has nodes report their steps. `unhealthy b why` has b's agent report that no
rank may run there, `notice b what` a problem that does not forbid it.

Snapshots: `saves at_breakpoint=1 limit=60` (a line like `job`); `snap 120` has all ranks commit
step 120, `snap 120 a b` those of two nodes, and `snap 120 persist` wants it written out; `step 121`
has ranks do a step without a snapshot; `world
state=sharded slots=3` gives each rank a part of the state, else each has all of it, and room for so
many snapshots, and `replicas=1` wants each part on two nodes; `node a memory=1` starts an agent
that takes over what a killed one of this node had; `disk a full` (or stuck, ok) and
`spoil a 120` plant what `memory` knows; with `cannot a 120 why` a's ranks could not save a step.

Replicas: with `saves on_corruption=tell` (or restart, exclude) they are compared; after `alter b 1
w042` local rank 1 of b has another value in that tensor than the others, until its next life, or,
with `alter b 1 w042 always`, in every life. After `loss b 1 57 nan` it has reported that loss.

Work that is handed out (`tests.sim.workers`): `work 3` has every rank take some and use 3 samples,
as far as it has leases, `work 3 a` those of a node; `work -1` has them restore, and take nothing.

Operators: `ask stop why`, `ask restart`, `ask exclude b why`, `ask include b`, `ask scale 2`.

Hangs: `watch on_hang=tell hang_limit=200` (a line like `job`); `hang b 1 idle`, `turn busy`, `go`,
`silence` as `hangs` has them, `torch 600` sets the limit of torch's own for a collective.

`python -m tests.simulator FILE` runs it and shows where the trace differs; `--rewrite` writes what
was seen into the file, to be read before it is committed.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from elasticrun.config import (
    EXIT_FINAL,
    GROW_COOLDOWN,
    HEARTBEAT_TIMEOUT,
    JOIN_TIMEOUT,
    LAST_CALL_TIMEOUT,
    MASTER_LOST_TIMEOUT,
    RESTART_BACKOFF,
    RESTART_WINDOW,
    SHUTDOWN_TIMEOUT,
)
from elasticrun.core.events import Requested
from elasticrun.core.persisted import Facts
from elasticrun.wire import messages as m
from elasticrun.wire.messages import JobSpec, NodeHealth, Request, SaveSpec, WatchSpec
from tests.simulator.hangs import KINDS, OUTSIDE
from tests.simulator.node import NodeSetup
from tests.simulator.world import Doom, World

SEPARATOR = "---"
SIGNALS = {"SIGHUP": 1, "SIGINT": 2, "SIGUSR1": 10, "SIGUSR2": 12, "SIGTERM": 15}
FORWARD_ONLY = ("SIGUSR1", "SIGUSR2")

DEFAULT_SPEC = JobSpec(
    job_id="job",
    min_nodes=1,
    max_nodes=1,
    node_unit=1,
    max_restarts=0,
    restart_backoff=RESTART_BACKOFF,
    restart_window=RESTART_WINDOW,
    join_timeout=JOIN_TIMEOUT,
    last_call_timeout=LAST_CALL_TIMEOUT,
    heartbeat_timeout=HEARTBEAT_TIMEOUT,
    grow="auto",
    grow_cooldown=GROW_COOLDOWN,
    restart_grace=float(SHUTDOWN_TIMEOUT),
    master_lost_timeout=MASTER_LOST_TIMEOUT,
    saves=SaveSpec(on_corruption="off"),
    watch=WatchSpec(on_hang="auto"),
)


class ScriptError(ValueError):
    """A line that is not understood."""


@dataclass(slots=True)
class Script:
    why: str
    commands: str  # the text above the separator, as it was
    expected: list[str]
    spec: JobSpec = DEFAULT_SPEC
    world: dict[str, str] = field(default_factory=dict)
    steps: list[tuple[float, list[str], str]] = field(default_factory=list)


def read(text: str) -> Script:
    """Parse a script; ScriptError names the line that is wrong."""
    commands, _, trace = text.partition(f"\n{SEPARATOR}\n")
    lines = commands.splitlines()
    why = " ".join(line.lstrip("# ") for line in lines if line.startswith("#"))
    if not lines or not lines[0].startswith("#"):
        raise ScriptError("the first line must say why the case exists")
    script = Script(why, commands, trace.splitlines())
    for number, line in enumerate(lines, 1):
        words = line.split()
        if not words or line.startswith("#"):
            continue
        try:
            _read_line(script, words, line)
        except (ValueError, IndexError, TypeError, AttributeError) as fault:
            raise ScriptError(f"line {number}: {line!r}: {fault}") from fault
    return script


def _read_line(script: Script, words: list[str], line: str) -> None:
    spec = script.spec
    if words[0] == "job":
        low, high = words[1].split(":")
        sized = replace(spec, min_nodes=int(low), max_nodes=int(high))
        script.spec = _changed(sized, _pairs(words[2:]))
    elif words[0] == "check":
        script.spec = replace(spec, checks=_changed(spec.checks, _pairs(words[1:])))
    elif words[0] == "saves":
        script.spec = replace(spec, saves=_changed(spec.saves, _pairs(words[1:])))
    elif words[0] == "watch":
        script.spec = replace(spec, watch=_changed(spec.watch, _pairs(words[1:])))
    elif words[0] == "world":
        script.world.update(_pairs(words[1:]))
    else:
        script.steps.append((float(words[0]), words[1:], line))


def _changed(record: Any, pairs: dict[str, str]) -> Any:
    """The record with these values, each read as what it was before."""
    old = {name: getattr(record, name) for name in pairs}
    new = {n: v == "1" if isinstance(old[n], bool) else type(old[n])(v) for n, v in pairs.items()}
    return replace(record, **new)


def _pairs(words: list[str]) -> dict[str, str]:
    return dict(word.split("=", 1) for word in words)


def run(script: Script, prepare: Callable[[World], None] | None = None) -> World:
    """Carry a script out; the world as it is at the end. `prepare` may change it before."""
    say = script.world.get
    world = World(
        peer_delay=float(say("peer_delay", "0.05")) or None,
        redial=float(say("redial", "0.2")),
        ping_timeout=float(say("ping_timeout", "5")),
        beats=say("beats") == "1",
        tells_silence=say("silence") == "1",
        steps=say("steps") == "1",
    )
    world.records = []
    world.shelves.state = say("state", "ddp")
    world.shelves.slots = int(say("slots", "2"))
    world.shelves.replicas = say("replicas") == "1"
    if prepare is not None:
        prepare(world)
    world.start_master(script.spec)
    for when, words, line in script.steps:
        world.run_until(when)
        if words[0] == "end":
            break
        world.trace("*", " ".join(words))
        verb = VERBS.get(words[0])
        if verb is None:
            raise ScriptError(f"{line!r}: there is no {words[0]}")
        verb(world, script.spec, words[1:])
    world.worlds.faults += world.shelves.faults
    world.worlds.faults += world.uses.faults if world.uses is not None else []
    world.lines.extend(f"FAULT: {fault}" for fault in world.worlds.faults)
    return world


def difference(script: Script, seen: list[str]) -> str:
    """A unified diff of the expected trace and what was seen; empty if they are the same."""
    lines = difflib.unified_diff(script.expected, seen, "expected", "seen", lineterm="")
    return "\n".join(lines)


def main(arguments: list[str]) -> int:
    """Run scripts; 0 if every trace is as expected."""
    rewrite = "--rewrite" in arguments
    status = 0
    for name in (word for word in arguments if word != "--rewrite"):
        path = Path(name)
        try:
            script = read(path.read_text())
            seen = run(script).lines
        except (ScriptError, OSError) as fault:
            print(f"{name}: {fault}")
            status = 2
            continue
        if rewrite:
            path.write_text("\n".join([script.commands, SEPARATOR, *seen]) + "\n")
        else:
            diff = difference(script, seen)
            print(diff or f"{name}: as expected")
            status = max(status, int(bool(diff)))
    return status


# -------------------------------------------------------------------- the verbs


OF_A_NODE: dict[str, Callable[[str], Any]] = {
    "nproc": int, "node_rank": int, "role": str, "shutdown_timeout": float, "first_store": float,
    "store": float, "term": float, "exit_barrier": float, "term_code": int,
}  # fmt: skip


def _node(world: World, spec: JobSpec, words: list[str]) -> None:
    options = _pairs([word for word in words if "=" in word])
    own = {name: options.pop(name) for name in list(options) if hasattr(spec, name)}
    memory = options.pop("memory", "") == "1"
    how = {name: OF_A_NODE[name](value) for name, value in options.items()}
    for name in (word for word in words if "=" not in word):
        world.start_node(NodeSetup(name, _changed(spec, own), **how), memory=memory)


def _fail(world: World, spec: JobSpec, words: list[str]) -> None:
    node = world.nodes[words[0]]
    message = " ".join(words[2:])
    code = {"SIGKILL": -9, "FINAL": EXIT_FINAL}.get(message, 1)
    node.end_rank(node.ranks[int(words[1])], code, message if code == 1 else "")


def _done(world: World, spec: JobSpec, words: list[str]) -> None:
    for name in words:
        node, _, local_rank = name.partition(".")
        ranks = world.nodes[node].ranks
        for rank in [ranks[int(local_rank)]] if local_rank else list(ranks.values()):
            world.nodes[node].end_rank(rank, 0, "")


def _heal(world: World, spec: JobSpec, words: list[str]) -> None:
    for name in words:
        world.nodes[name].cut = False


def _signal(world: World, spec: JobSpec, words: list[str]) -> None:
    for name in words[1:]:
        world.nodes[name].signal(SIGNALS[words[0]], words[0], death=words[0] not in FORWARD_ONLY)


def _signal_ranks(world: World, spec: JobSpec, words: list[str]) -> None:
    """A scheduler signals every process: the ranks directly."""
    for name in words[1:]:
        node = world.nodes[name]
        for rank in list(node.ranks.values()):
            node.end_rank(rank, -SIGNALS[words[0]], "")


def _stuck(world: World, spec: JobSpec, words: list[str]) -> None:
    node = world.nodes[words[0]]
    node.stuck_pids = tuple(rank.pid for rank in node.ranks.values())


def _left_over(world: World, spec: JobSpec, words: list[str]) -> None:
    world.nodes[words[0]].stuck_pids = (4711,)


def _master(world: World, spec: JobSpec, words: list[str]) -> None:
    if words[0] == "kill":
        world.kill_master()
    elif words[0] == "start":
        world.start_master(None, term=int(words[1]), facts=_facts(world, words[2:]))
    elif words[0] == "crash":
        ((when, act),) = _pairs(words[1:]).items()
        world.doom = Doom(act=act, after={"before": False, "after": True}[when])
    elif words[0] == "stall":
        world.stall_master(float(words[1]))
    else:
        raise ScriptError(f"master {words[0]}")


def _facts(world: World, words: list[str]) -> Facts | None:
    """`record`: the newest; `record=N`: the one that was the newest when round N had begun."""
    if not words:
        return None
    if words == ["record"]:
        return world.durable
    number = int(_pairs(words)["record"])
    return next(facts for facts in world.records or () if facts.number == number)


def _fault(world: World, spec: JobSpec, words: list[str]) -> None:
    try:
        world.bench.plant(words[0], words[1], *words[2:])
    except ValueError as fault:
        raise ScriptError(str(fault)) from None


def _snap(world: World, spec: JobSpec, words: list[str]) -> None:
    names = [word for word in words[1:] if word != "persist"]
    for node in [world.nodes[name] for name in names] or list(world.nodes.values()):
        if node.alive:
            node.memory.commit(int(words[0]), persist="persist" in words)


def _step(world: World, spec: JobSpec, words: list[str]) -> None:
    for node in [world.nodes[name] for name in words[1:]] or list(world.nodes.values()):
        if node.alive:
            node.memory.step(int(words[0]))


def _work(world: World, spec: JobSpec, words: list[str]) -> None:
    for node in [world.nodes[name] for name in words[1:2]] or list(world.nodes.values()):
        if node.alive and node.memory.work is not None:
            node.memory.work.use(int(words[0]), words[2:])


def _disk(world: World, spec: JobSpec, words: list[str]) -> None:
    if words[1] not in ("full", "stuck", "ok"):
        raise ScriptError(f"no disk is {words[1]}")
    world.shelves.disks[words[0]] = "" if words[1] == "ok" else words[1]


def _ask(world: World, spec: JobSpec, words: list[str]) -> None:
    """`ask exclude b why`: an operator's request, and what it is replied."""
    verb, *rest = words
    node = rest.pop(0) if verb in ("exclude", "include") else ""
    number = int(rest.pop(0)) if verb == "scale" else 0
    if world.master is not None:
        request = Request(verb, node, number, who="me@here", reason=" ".join(rest))
        world.master.step(Requested(1, request))


def _status(world: World, spec: JobSpec, words: list[str]) -> None:
    if world.master is None:
        return
    status = world.master.job.status()
    world.trace("status", f"{status.phase}, {status.reason or 'nothing is awaited'}")
    if status.snapshot:
        world.trace("status", status.snapshot)
    if status.verdict:
        world.trace("status", f"quiet for {status.quiet:.0f} s: {status.verdict}")
    for node in status.nodes:
        why = f": {node.reason}" if node.reason else ""
        health = f" [{node.health}]" if node.health else ""
        health += "".join(f" [{notice}]" for notice in node.notices)
        world.trace("status", f"{node.node} {node.state} {node.activity}{why}{health}")
    for one in status.excluded:
        left = f"{one.age:.0f} s ago, {one.remaining:.0f} s more"
        world.trace("status", f"{one.node} on {one.host} excluded ({one.kind}, {left})")


def _unhealthy(world: World, spec: JobSpec, words: list[str]) -> None:
    world.nodes[words[0]].say(NodeHealth(" ".join(words[1:])))


def _notice(world: World, spec: JobSpec, words: list[str]) -> None:
    world.nodes[words[0]].say(NodeHealth(notices=tuple(filter(None, [" ".join(words[1:])]))))


def _hang(world: World, spec: JobSpec, words: list[str]) -> None:
    if words[2] not in KINDS:
        raise ScriptError(f"no rank hangs {words[2]}")
    world.insides.hang(world, words[2], words[0], int(words[1]))


def _turn(world: World, spec: JobSpec, words: list[str]) -> None:
    if words[0] not in (*KINDS, *OUTSIDE) or world.insides.still_since is None:
        raise ScriptError(f"no rank turns {words[0]}")
    world.insides.kind = words[0]


def _torch(world: World, spec: JobSpec, words: list[str]) -> None:
    world.insides.limit = float(words[0])


Verb = Callable[[World, JobSpec, list[str]], None]


def _each(what: Callable[[World, str], None]) -> Verb:
    def verb(world: World, spec: JobSpec, words: list[str]) -> None:
        for name in words:
            what(world, name)

    return verb


def _alter(world: World, _: JobSpec, words: list[str]) -> None:
    """The node, the local rank, the tensor; `always`."""
    digests = world.nodes[words[0]].memory.digests
    digests.alter(int(words[1]), words[2], always=words[3:] == ["always"])


def _loss(world: World, _: JobSpec, words: list[str]) -> None:
    """The node, the local rank, the step, the loss."""
    node = world.nodes[words[0]]
    start = node.memory._start
    assert start is not None
    node.say(m.NotFinite(start.round, start.first_rank + int(words[1]), int(words[2]), words[3]))


VERBS: dict[str, Verb] = {
    "node": _node,
    "fail": _fail,
    "done": _done,
    "kill": _each(lambda world, name: world.nodes[name].kill()),
    "vanish": _each(lambda world, name: world.nodes[name].vanish()),
    "cut": _each(lambda world, name: world.cut(world.nodes[name])),
    "heal": _heal,
    "break": _each(lambda world, name: world.break_stream(world.nodes[name])),
    "freeze": _each(lambda world, name: world.nodes[name].freeze()),
    "thaw": _each(lambda world, name: world.nodes[name].thaw()),
    "spawner": _each(lambda world, name: world.nodes[name].lose_spawner()),
    "store": _each(lambda world, name: world.nodes[name].lose_store()),
    "signal": _signal,
    "signal-ranks": _signal_ranks,
    "stuck": _stuck,
    "fault": _fault,
    "unhealthy": _unhealthy,
    "notice": _notice,
    "slow": lambda world, _, words: world.bench.slow.update({words[0]: float(words[1])}),
    "snap": _snap,
    "step": _step,
    "work": _work,
    "disk": _disk,
    "cannot": lambda world, _, words: world.nodes[words[0]].memory.cannot(
        int(words[1]), " ".join(words[2:])
    ),
    "spoil": lambda world, _, words: world.nodes[words[0]].memory.spoil(int(words[1])),
    "alter": _alter,
    "loss": _loss,
    "left-over": _left_over,
    "hang": _hang,
    "silence": lambda world, _, words: world.insides.hang(world, "silence"),
    "go": lambda world, _, words: world.insides.go(world),
    "turn": _turn,
    "torch": _torch,
    "master": _master,
    "ask": _ask,
    "status": _status,
}
