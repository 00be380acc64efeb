"""The simulated world: nodes, a network, a master, and what befalls them.

Everything is deterministic: virtual time, numbered nonces, and a delay function that may be drawn
from a seed. The brains are the real ones; all else is a few lines of fake shell.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass

from elasticrun.core.events import JobEffect, JobEvent, JobOver
from elasticrun.core.nodes.membership import beat_interval
from elasticrun.core.persisted import Facts
from elasticrun.wire.messages import JobSpec, Order
from elasticrun.wire.types import RoundName, dumps, loads
from tests.simulator.clock import Clock
from tests.simulator.hangs import Insides
from tests.simulator.master import Master, act_name
from tests.simulator.network import Stream
from tests.simulator.node import Node, NodeSetup
from tests.simulator.probes import Bench
from tests.simulator.ranks import Rank, Worlds
from tests.simulator.shelves import Shelves
from tests.simulator.work import Uses

PEER_LOST = "Connection closed by peer"


@dataclass(slots=True)
class Doom:
    """When the master is to die by itself: at the act of this name (see `master`), or at the
    one of this number since the world began, before or after it is carried out."""

    act: str = ""
    number: int = 0
    after: bool = False

    def strikes(self, name: str, number: int) -> bool:
        """Whether this act is the one."""
        return number == self.number or (self.act != "" and name == self.act)


class World:
    """See the module's head. `delay` gives the time of one message, in seconds, `record_delay` that
    until a record is durable."""

    def __init__(
        self,
        *,
        delay: Callable[[], float] = lambda: 0.001,
        peer_delay: float | None = 0.05,
        redial: float = 0.2,
        ping_timeout: float = 5.0,
        tells_silence: bool = False,
        record_delay: Callable[[], float] = lambda: 0.0,
        beats: bool = False,
        beat_interval: float = 1.0,
        steps: bool = False,
        traced: bool = True,
    ) -> None:
        """`peer_delay`: after how long ranks notice that a peer has died (None: never). `beats`:
        whether agents beat; without beats a long silence of a healthy node would kill it, so
        scripts of more than a minute need them; `beat_interval`: the shortest time between two.
        `ping_timeout`: how long a cut stream stands; `tells_silence`: whether the master is told
        that it was silent for so long. `steps`: whether nodes report their
        steps. `traced`: whether `lines` are written."""
        self.clock = Clock()
        self.worlds = Worlds()
        self.nodes: dict[str, Node] = {}
        self.lives: list[Node] = []
        self.master: Master | None = None
        self.over: JobOver | None = None
        self.durable: Facts | None = None  # the newest record that was made
        self.records: list[Facts] | None = None  # all of them, where somebody wants them
        self.doom: Doom | None = None
        self.acts = 0  # of all masters
        self.lines: list[str] = []
        self.check: Callable[[Master, JobEvent], None] | None = None
        self.on_order: Callable[[Node, Order], None] | None = None
        self.on_master_death: Callable[[], None] | None = None
        self.on_record: Callable[[Facts], None] | None = None
        self.delay = delay
        self.peer_delay = peer_delay
        self.redial = redial
        self.ping_timeout = ping_timeout
        self.tells_silence = tells_silence
        self.record_delay = record_delay
        self.says_twice: Callable[[], bool] = lambda: False  # an agent that repeats a report
        self.beats = beats
        self.beat_interval = beat_interval
        self.steps = steps
        self.bench = Bench()
        self.shelves = Shelves()
        self.insides = Insides()
        self.uses: Uses | None = None  # work is handed out
        self.traced = traced
        self._breaking: set[RoundName] = set()
        self._sessions = itertools.count(1)
        self._ports = itertools.count(40001)
        self._pids = itertools.count(1001)
        self._nonces = itertools.count(1)
        self._lives = itertools.count(1)

    # ------------------------------------------------------------ running

    def run_until(self, when: float) -> None:
        while (upcoming := self.clock.next()) is not None and upcoming <= when:
            self.clock.run_one()
        self.clock.now = max(self.clock.now, when)

    def trace(self, who: str, text: str) -> None:
        if self.traced:
            self.lines.append(f"{self.clock.now:9.3f}  {who}: {text}")

    # ------------------------------------------------------------ names

    def mint(self) -> str:
        return f"{next(self._nonces):08x}"

    def new_port(self) -> int:
        return next(self._ports)

    def new_pid(self) -> int:
        return next(self._pids)

    def new_stream(self, node: Node, master: Master) -> Stream:
        stream = Stream(next(self._sessions), self.clock, self.delay, node, master)
        master.streams[stream.session] = stream
        return stream

    def pace(self) -> float:
        """How often agents beat just now, as the real master tells them in its echoes."""
        streams = len(self.master.streams) if self.master is not None else 0
        return max(self.beat_interval, beat_interval(streams))

    # ------------------------------------------------------------ what befalls it

    def start_master(
        self, spec: JobSpec | None, term: int = 1, facts: Facts | None = None
    ) -> Master:
        """A master, or a successor: empty, or with the record of the one before."""
        self.master = Master(self, spec, term, facts)
        return self.master

    def kill_master(self) -> None:
        if self.master is not None:
            self.master.die()
            self.master = None
            if self.on_master_death is not None:
                self.on_master_death()

    def may_act(self, effect: JobEffect) -> bool:
        """Whether the master lives to carry this out."""
        if self.doom is None or self.doom.after:
            return True
        return not self._doomed(effect, self.acts + 1)

    def acted(self, effect: JobEffect) -> None:
        """The master has carried this out."""
        self.acts += 1
        if self.doom is not None and self.doom.after and self._doomed(effect, self.acts):
            self.kill_master()

    def _doomed(self, effect: JobEffect, number: int) -> bool:
        name = act_name(effect)
        if self.doom is None or not self.doom.strikes(name, number):
            return False
        self.trace("*", f"the master dies {'after' if self.doom.after else 'before'} its {name}")
        self.doom = None
        return True

    def recorded(self, facts: Facts) -> None:
        """A record is durable: what its successor loads are the facts as the record has them."""
        self.durable = loads(dumps(facts), Facts)
        assert self.durable == facts
        if self.records is not None:
            self.records.append(facts)
        if self.on_record is not None:
            self.on_record(facts)

    def stall_master(self, seconds: float) -> None:
        """The master's loop does not turn for so long."""
        master = self.master
        if master is not None and not master.stalled:
            master.stalled = True
            self.clock.after(seconds, lambda: master.wake(seconds))

    def start_node(self, setup: NodeSetup, *, memory: bool = False) -> Node:
        """An agent starts; a node id may be used again by a new life. `memory`: what a killed agent
        of this node had in memory is there yet."""
        old = self.nodes.get(setup.name)
        before = old.memory if memory and old is not None and not old.memory.is_lost else None
        node = Node(self, setup, f"life{next(self._lives)}", before)
        self.nodes[setup.name] = node
        self.lives.append(node)
        return node

    def cut_stream(self, stream: Stream, node: Node) -> None:
        """Nothing passes any more; the ends find out by their own means."""
        stream.cut = True
        self.clock.after(self.ping_timeout, lambda: self.unanswered(stream))
        self.clock.after(self.ping_timeout, lambda: stream.break_at_agent("no answer to pings"))

    def unanswered(self, stream: Stream) -> None:
        """Pings found nobody; a master that did not listen itself does not know for how long."""
        listened = self.tells_silence and self.master is not None and not self.master.stalled
        quiet = self.ping_timeout
        stream.break_at_master(silent=quiet if listened else 0.0, quiet=quiet)

    def cut(self, node: Node) -> None:
        """The link between a node and the master is cut."""
        node.cut = True
        if node.stream is not None:
            self.cut_stream(node.stream, node)

    def break_stream(self, node: Node) -> None:
        """A reset by something on the way: both ends are told, nobody has died."""
        if node.stream is not None:
            node.stream.reset()

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
                    life.break_collective(rank, PEER_LOST)
