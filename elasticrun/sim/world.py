"""The simulated world: nodes, a network, a master, and what befalls them.

Everything is deterministic: virtual time, numbered nonces, and a delay function that may be drawn
from a seed. The brains are the real ones; all else is a few lines of fake shell.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

from elasticrun.core.effects import (
    Detached,
    Hangup,
    JobEvent,
    JobOver,
    Note,
    Overslept,
    Tell,
    Tick,
)
from elasticrun.core.job import Job
from elasticrun.sim.clock import Clock
from elasticrun.sim.network import Stream
from elasticrun.sim.node import Node, NodeSetup
from elasticrun.sim.ranks import Rank, Worlds
from elasticrun.wire.ids import RoundName
from elasticrun.wire.messages import JobSpec, Order

PEER_LOST = "Connection closed by peer"


class Master:
    """One life of the job master: the real brain behind streams."""

    def __init__(self, world: World, spec: JobSpec | None, term: int) -> None:
        self.world = world
        self.job = Job(spec, term, world.mint)
        self.streams: dict[int, Stream] = {}
        self.alive = True
        self.stalled = False
        self._held: list[JobEvent] = []
        self.over: JobOver | None = None
        self._tick_at: float | None = None

    def step(self, event: JobEvent) -> None:
        """Give the brain an event and carry out what it asks for."""
        if not self.alive:
            return
        if self.stalled:
            self._held.append(event)
            return
        for effect in self.job.step(event, self.world.clock.now):
            if isinstance(effect, Tell):
                for session in effect.sessions:
                    self.streams[session].order(effect.order)
            elif isinstance(effect, Hangup):
                self.streams[effect.session].close_from_master()
            elif isinstance(effect, Note):
                self.world.trace("master", effect.text)
            elif isinstance(effect, JobOver):
                self.over = effect
                self.world.over = effect
        if isinstance(event, Detached):
            self.streams.pop(event.session, None)
        if self.world.check is not None:
            self.world.check(self, event)
        self._schedule_tick()

    def _schedule_tick(self) -> None:
        when = self.job.next_deadline()
        if when is None or when == self._tick_at:
            return
        self._tick_at = when

        def tick() -> None:
            if self._tick_at == when:
                self._tick_at = None
                self.step(Tick())

        self.world.clock.at(when, tick)

    def wake(self, slept: float) -> None:
        """The loop turns again after a stall."""
        self.stalled = False
        self.step(Overslept(slept))
        held, self._held = self._held, []
        for event in held:
            if not isinstance(event, Tick):
                self.step(event)
        self.step(Tick())

    def die(self) -> None:
        """kill -9: every stream breaks."""
        self.alive = False
        for stream in self.streams.values():
            stream.close_from_master()


class World:
    """See the module's head. `delay` gives the time of one message, in seconds."""

    def __init__(
        self,
        *,
        delay: Callable[[], float] = lambda: 0.001,
        peer_delay: float | None = 0.05,
        redial: float = 0.2,
        ping_timeout: float = 5.0,
        beats: bool = False,
        beat_interval: float = 1.0,
    ) -> None:
        """`peer_delay`: after how long ranks notice that a peer has died (None: never). `beats`:
        whether agents beat; without beats a long silence of a healthy node would kill it, so
        scripts of more than a minute need them. `ping_timeout`: how long a cut stream stands."""
        self.clock = Clock()
        self.worlds = Worlds()
        self.nodes: dict[str, Node] = {}
        self.lives: list[Node] = []
        self.master: Master | None = None
        self.over: JobOver | None = None
        self.lines: list[str] = []
        self.check: Callable[[Master, JobEvent], None] | None = None
        self.on_order: Callable[[Node, Order], None] | None = None
        self.delay = delay
        self.peer_delay = peer_delay
        self.redial = redial
        self.ping_timeout = ping_timeout
        self.beats = beats
        self.beat_interval = beat_interval
        self._breaking: set[RoundName] = set()
        self._sessions = itertools.count(1)
        self._ports = itertools.count(40001)
        self._pids = itertools.count(1001)
        self._nonces = itertools.count(1)
        self._lives = itertools.count(1)

    # ------------------------------------------------------------ running

    def run_until(self, when: float) -> None:
        """Let time pass."""
        while (upcoming := self.clock.next()) is not None and upcoming <= when:
            self.clock.run_one()
        self.clock.now = max(self.clock.now, when)

    def trace(self, who: str, text: str) -> None:
        """Write one line of what was seen."""
        self.lines.append(f"{self.clock.now:9.3f}  {who}: {text}")

    # ------------------------------------------------------------ names

    def mint(self) -> str:
        """The next nonce."""
        return f"{next(self._nonces):08x}"

    def new_port(self) -> int:
        """A port nobody has."""
        return next(self._ports)

    def new_pid(self) -> int:
        """A pid nobody has."""
        return next(self._pids)

    def new_stream(self, node: Node, master: Master) -> Stream:
        """A stream from a node to the master."""
        stream = Stream(next(self._sessions), self.clock, self.delay, node, master)
        master.streams[stream.session] = stream
        return stream

    # ------------------------------------------------------------ what befalls it

    def start_master(self, spec: JobSpec | None, term: int = 1) -> Master:
        """A master, or an empty successor."""
        self.master = Master(self, spec, term)
        return self.master

    def kill_master(self) -> None:
        """The master's process is gone."""
        if self.master is not None:
            self.master.die()
            self.master = None

    def stall_master(self, seconds: float) -> None:
        """The master's loop does not turn for so long."""
        master = self.master
        if master is not None and not master.stalled:
            master.stalled = True
            self.clock.after(seconds, lambda: master.wake(seconds))

    def start_node(self, setup: NodeSetup) -> Node:
        """An agent starts; a node id may be used again by a new life."""
        node = Node(self, setup, f"life{next(self._lives)}")
        self.nodes[setup.name] = node
        self.lives.append(node)
        return node

    def cut_stream(self, stream: Stream, node: Node) -> None:
        """Nothing passes any more; the ends find out by their own means."""
        stream.cut = True
        self.clock.after(self.ping_timeout, stream.break_at_master)
        self.clock.after(self.ping_timeout, lambda: stream.break_at_agent("no answer to pings"))

    def cut(self, node: Node) -> None:
        """The link between a node and the master is cut."""
        node.cut = True
        if node.stream is not None:
            self.cut_stream(node.stream, node)

    def break_stream(self, node: Node) -> None:
        """A reset by something on the way: both ends are told, nobody has died."""
        if node.stream is not None:
            stream = node.stream
            stream.cut = True
            self.clock.after(self.delay(), stream.break_at_master)
            self.clock.after(self.delay(), lambda: stream.break_at_agent("connection reset"))

    def rank_died(self, node: Node, rank: Rank, code: int) -> None:
        """A rank has ended; its peers' collectives break a little later, unless it was done."""
        self.worlds.dead(rank)
        name = rank.round
        if code == 0 or self.peer_delay is None or name in self._breaking:
            return
        self._breaking.add(name)
        self.clock.after(self.peer_delay, lambda: self._break_collectives(name))

    def _break_collectives(self, name: RoundName) -> None:
        self._breaking.discard(name)
        for life in self.lives:
            for rank in list(life.ranks.values()):
                if rank.alive and rank.round == name and rank.ignores_term == 0.0:
                    life.end_rank(rank, 1, PEER_LOST)
