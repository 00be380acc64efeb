"""Plays some of the agents of a large job, without ranks: one process with many sessions.

    python benchmarks/load.py HOST:PORT FIRST COUNT NODES HEARTBEAT_TIMEOUT

Each session is an agent's real `Link` (connect, proof, Hello, heartbeats, reconnect) on a separate
connection, with a minimal state machine: it joins, runs nothing, stops at once, and joins again.
Commands are JSON lines on stdin; each is answered by one line on stdout (see `Load.obey`). At EOF
the process exits. Times are CLOCK_MONOTONIC, one clock for all processes of a machine.
"""

from __future__ import annotations

import asyncio
import json
import os
import resource
import sys
import time
from dataclasses import dataclass, field
from typing import Any

from elasticrun import __version__
from elasticrun.agent.link.link import Link
from elasticrun.core.events import AgentEvent, LinkBack, LinkLost, Ordered
from elasticrun.wire import messages as m
from elasticrun.wire.types import Endpoint, mint_incarnation

JOB_ID = "sessions"
PATIENCE = 120.0
"""Seconds after which a command is given up."""


HEARTBEAT = 5.0
"""Seconds of silence after which a node is dead: the launcher's default."""


def spec(nodes: int, heartbeat: float) -> m.JobSpec:
    """The spec of a job of exactly this many nodes, with enough restarts for every benchmark.
    `heartbeat`: heartbeat_timeout in seconds."""
    return m.JobSpec(
        job_id=JOB_ID,
        min_nodes=nodes,
        max_nodes=nodes,
        node_unit=1,
        max_restarts=1000,
        restart_backoff=0.0,
        restart_window=0.0,
        join_timeout=600.0,
        last_call_timeout=30.0,
        heartbeat_timeout=heartbeat,
        grow="auto",
        grow_cooldown=600.0,
        restart_grace=30.0,
        master_lost_timeout=600.0,
    )


@dataclass
class Tally:
    """What this process's sessions have received, and when."""

    attached: int = 0
    first_dial: float = 0.0
    first_join: float = 0.0
    last_join: float = 0.0
    first_start: float = 0.0
    last_start: float = 0.0
    starts: int = 0
    stops: int = 0
    lost: int = 0
    refused: dict[str, int] = field(default_factory=dict)
    orders: dict[str, int] = field(default_factory=dict)


class Node:
    """One agent without ranks."""

    def __init__(self, number: int, load: Load) -> None:
        self.number = number
        self._load = load
        self._name = f"node-{number:05d}"
        self._incarnation = mint_incarnation()
        self._term = 0
        self._place: m.Start | None = None  # the last one received
        self._runs = False
        self._joins = False
        self.link = Link(self)

    @property
    def dial(self) -> Endpoint:
        return self._load.endpoint

    def no_master(self, reason: str) -> None: ...

    def fatal(self, sentence: str) -> None:
        raise RuntimeError(sentence)

    def hello(self) -> m.Hello:
        return m.Hello(
            protocol=m.PROTOCOL_VERSION,
            version=__version__,
            node=self._name,
            incarnation=self._incarnation,
            host=self._name,
            address="127.0.0.1",
            pid=os.getpid(),
            node_rank=-1,
            local_world_size=8,
            role="default",
            spec=self._load.spec,
            attached=self._place,
            last_term=self._term,
        )

    def join(self) -> None:
        """Report that no rank runs here, and that a store is ready for the next round."""
        self._joins = True
        self._send_state()
        self._load.joined()

    def _send_state(self) -> None:
        """Send this node's whole state, because the master may have received none of it."""
        if self._place is not None:
            name = self._place.round
            self.link.send(m.Running(name, (os.getpid(),) * 8) if self._runs else m.Stopped(name))
        if self._joins:
            self.link.send(m.Join(Endpoint("127.0.0.1", 20000 + self.number % 40000)))

    def fail(self) -> None:
        """Report that a rank of the running round has failed here, and join again."""
        assert self._place is not None
        rank, name = self._place.first_rank, self._place.round
        failure = m.Failure(
            host=self._name,
            rank=rank,
            local_rank=0,
            pid=os.getpid(),
            exitcode=1,
            time_us=time.time_ns() // 1000,
            kind=m.FailureKind.SCRIPT,
            message="ValueError: on purpose",
            traceback="",
            error_file="",
        )
        self.link.send(m.RanksFailed(name, (failure,)))
        self._runs = False
        self.join()

    def linked(self, event: AgentEvent) -> None:
        tally = self._load.tally
        if isinstance(event, LinkLost):
            tally.lost += 1
        elif isinstance(event, LinkBack):
            self._send_state()
        elif isinstance(event, Ordered):
            order = event.order
            kind = type(order).__name__
            tally.orders[kind] = tally.orders.get(kind, 0) + 1
            self._obey(order)

    def _obey(self, order: m.Order) -> None:
        if isinstance(order, m.Welcome):
            self._term = order.term
            self._load.welcomed(self.number)
        elif isinstance(order, m.Start):
            fresh = self._place is None or self._place.round != order.round
            self._place, self._runs, self._joins = order, True, False
            self._send_state()
            if fresh:
                self._load.started()
        elif isinstance(order, m.Stop):
            self._load.tally.stops += 1
            if self._runs and self._place is not None and self._place.round == order.round:
                self._runs = False
                self.join()
        elif isinstance(order, m.Refused | m.End):
            refused = self._load.tally.refused
            refused[order.reason] = refused.get(order.reason, 0) + 1
            self._load.changed.set()


class Load:
    """The sessions of this process, and the benchmark's commands to them."""

    def __init__(
        self, endpoint: Endpoint, first: int, count: int, nodes: int, heartbeat: float
    ) -> None:
        self.endpoint = endpoint
        self.spec = spec(nodes, heartbeat)
        self.tally = Tally()
        self._nodes = [Node(number, self) for number in range(first, first + count)]
        self._welcome: set[int] = set()
        self.changed = asyncio.Event()

    # ------------------------------------------------------------ reports of nodes

    def welcomed(self, number: int) -> None:
        self._welcome.add(number)
        self.tally.attached = len(self._welcome)
        self.changed.set()

    def joined(self) -> None:
        self.tally.last_join = time.monotonic()
        self.tally.first_join = self.tally.first_join or self.tally.last_join

    def started(self) -> None:
        self.tally.last_start = time.monotonic()
        self.tally.first_start = self.tally.first_start or self.tally.last_start
        self.tally.starts += 1
        self.changed.set()

    # ------------------------------------------------------------ the benchmark's commands

    async def obey(self, command: dict[str, Any]) -> dict[str, Any]:
        """Carry out a command: attach (`every`: seconds between two dials), join, fail (the first
        node only), started (wait until every node has received a Start), anew (reset the times of
        the last round); any other does nothing. Returns the tally; `late`: 1 if the awaited event
        did not occur within PATIENCE seconds, or a session was refused."""
        do = command["do"]
        late = 0
        if do == "join":
            for node in self._nodes:
                node.join()
        elif do == "fail":
            self._nodes[0].fail()
        elif do == "anew":
            self.tally.first_join = self.tally.last_join = 0.0
            self.tally.first_start = self.tally.last_start = 0.0
            self.tally.starts = 0
        else:
            try:
                async with asyncio.timeout(PATIENCE):
                    if do == "attach":
                        await self._attach(command["every"])
                    elif do == "started":
                        await self._until(lambda: self.tally.starts >= len(self._nodes))
            except TimeoutError:
                late = 1
        return {**vars(self.tally), "late": late}

    async def _attach(self, every: float) -> None:
        began = self.tally.first_dial = time.monotonic()
        for place, node in enumerate(self._nodes):
            node.link.start()
            if every:
                await asyncio.sleep(max(0.0, began + (place + 1) * every - time.monotonic()))
        await self._until(lambda: len(self._welcome) == len(self._nodes))

    async def _until(self, enough: Any) -> None:
        while not enough():
            if self.tally.refused:
                raise TimeoutError
            self.changed.clear()
            await self.changed.wait()


async def serve(load: Load) -> None:
    """Process commands until EOF."""
    reader = asyncio.StreamReader()
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    while line := await reader.readline():
        print(json.dumps(await load.obey(json.loads(line))), flush=True)


def main() -> None:
    """See the module docstring."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    host, _, port = sys.argv[1].rpartition(":")
    first, count, nodes = (int(word) for word in sys.argv[2:5])
    heartbeat = float(sys.argv[5])

    async def run() -> None:
        await serve(Load(Endpoint(host, int(port)), first, count, nodes, heartbeat))
        os._exit(0)  # the kernel closes thousands of channels faster

    asyncio.run(run())


if __name__ == "__main__":
    main()
