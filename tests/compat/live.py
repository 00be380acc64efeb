"""Jobs of puppets that a test conducts while they run, under either launcher."""

from __future__ import annotations

import signal
from collections.abc import Iterable, Mapping
from typing import Any

from tests.harness import (
    LIMIT,
    PATIENT,
    SCRIPTS,
    TORCHRUN,
    Launched,
    Peer,
    World,
    await_listener,
)

PUPPET = str(SCRIPTS / "puppet.py")


def job(
    world: World,
    launcher: str,
    *flags: str,
    env: Mapping[str, str] | None = None,
    console: int | None = None,
) -> Launched:
    """One agent whose ranks are puppets; it says at once what it waits for. Without an --rdzv-conf
    it is patient: that an agent was killed is known after a minute where all ranks are idle, and at
    once where they lose a peer by it."""
    talkative = {"LOGLEVEL": "INFO", **PATIENT, **(env or {})}
    return world.launch(launcher, *flags, PUPPET, env=talkative, stdout=console, stderr=console)


def agents(
    world: World,
    launcher: str,
    count: int,
    nnodes: str,
    port: int,
    *flags: str,
    first: int = 0,
    static: bool = False,
    env: Mapping[str, str] | None = None,
    console: int | None = None,
) -> list[Launched]:
    """`count` agents of one job on this host, one puppet each unless the flags say otherwise.

    `console`: a descriptor for their standard output and error, a file each if there is none.
    Of torchrun's the first has its store before the next one starts: two that start at one moment
    spoil each other's."""
    meet = [
        *(f"--nnodes={nnodes}", "--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}"),
        *("--rdzv-id=agents", "--local-addr=127.0.0.1"),
    ]
    if static:
        meet = [f"--nnodes={nnodes}", "--master-addr=127.0.0.1", f"--master-port={port}"]
    made = []
    for node in range(first, first + count):
        rank = [f"--node-rank={node}"] if static else []
        made.append(job(world, launcher, *meet, *rank, *flags, env=env, console=console))
        if launcher == TORCHRUN and not static:
            await_listener(port)
    return made


def trapping(
    world: World,
    launcher: str,
    ranks: int,
    *flags: str,
    signums: Iterable[int] = (signal.SIGTERM,),
    how: str = "note",
    env: Mapping[str, str] | None = None,
) -> tuple[Launched, list[Peer]]:
    """A job of one agent whose ranks have these signals trapped; they and the agent."""
    launched = job(world, launcher, f"--nproc-per-node={ranks}", *flags, env=env)
    peers = world.hub.ranks(ranks)
    for peer in peers:
        peer.order("trap", signums=[int(one) for one in signums], how=how)
        world.hub.word(peer, "done")
    return launched, peers


def allreduce(world: World, peers: list[Peer], limit: float = LIMIT) -> list[int]:
    """Let all of these puppets sum up ones; what each of them got."""
    which = [1 + sum(said.get("what") == "allreduce" for said in peer.said) for peer in peers]
    for peer in peers:
        peer.order("allreduce")
    return [
        world.hub.word(peer, "done", limit, nth, what="allreduce")["sum"]
        for peer, nth in zip(peers, which, strict=True)
    ]


def summing(world: World, count: int, **wanted: Any) -> list[Peer]:
    """The ranks of a world of so many, who have summed up ones."""
    peers = world.hub.ranks(count, **wanted)
    assert allreduce(world, peers) == [count] * count
    return peers


def finish(peers: list[Peer], *jobs: Launched, code: int = 0) -> None:
    """Let all of these puppets exit; these jobs end well by it."""
    for peer in peers:
        peer.order("exit", code=code)
    assert [one.wait() for one in jobs] == [0] * len(jobs), "".join(one.stderr for one in jobs)
