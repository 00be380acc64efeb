"""Measures what work that is handed out costs the master of a large job, and a rank.

    python benchmarks/work_cost.py [--ranks N]

The master's state machine gets the reports of all ranks as bytes, as from its streams, and its
orders become bytes again; no network and no disk. Its CPU time is measured:

- asking: every rank asks for a lease once, and again; per request, with the sizes of both messages;
- a step: all ranks have marked it and hold it, until the watermark is sent, with the record that
precedes it, and the text that says what was used.

Then one job of two ranks on this machine takes shards of one sample as fast as it can.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Final

from msgspec.structs import replace
from simulator import DEFAULT_SPEC
from stage import ELASTICRUN

from elasticrun import __version__
from elasticrun.core import events as fx
from elasticrun.core.job.job import Job
from elasticrun.wire import messages as m
from elasticrun.wire.rpc import protobuf
from elasticrun.wire.types import Endpoint, RoundName, dumps

LOCAL: Final = 8
"""Ranks of one node."""

SIZE: Final = 1000
ROUNDS: Final = 3
SHARDS: Final = 4000

SCRIPT: Final = """
import sys, time
from elasticrun import training
began, shards = time.perf_counter(), 0
for shard in training.shards("train", int(sys.argv[1]), 1):
    shard.done()
    shards += 1
print("took", shards, time.perf_counter() - began, flush=True)
"""


class Crowd:
    """A running round of many nodes, and the state of each of its ranks."""

    def __init__(self, ranks: int) -> None:
        self.nodes = ranks // LOCAL
        spec = replace(DEFAULT_SPEC, min_nodes=self.nodes, max_nodes=self.nodes)
        self.job = Job(spec, 1, iter(f"n{one}" for one in range(10**6)).__next__)
        self.records: list[int] = []
        self.texts: list[int] = []
        self.sent: list[int] = []
        self.granted: dict[int, m.WorkGrant] = {}
        for node in range(self.nodes):
            self._step(fx.Attached(node, _hello(node, spec)))
        for node in range(self.nodes):
            self._step(fx.Heard(node, m.Join(Endpoint(f"n{node}", 4000))))
        assert self.round is not None
        for node in range(self.nodes):
            self._step(fx.Heard(node, m.Running(self.round, tuple(range(1, LOCAL + 1)))))
        self._step(fx.Heard(0, m.WorkBase(self.round, "nothing", 0)))
        spec_of_data = m.DatasetSpec("train", 10**9, SIZE, 1, 7)
        share = m.DatasetShare(spec_of_data, 0, (), 0, (), wants=True)
        self.states = [m.WorkState(self.round, r, True, 0, (), (share,)) for r in range(ranks)]

    round: RoundName | None = None

    def _step(self, event: fx.JobEvent) -> None:
        for effect in self.job.step(event, 1.0):
            if isinstance(effect, fx.Record):
                self.records.append(len(dumps(effect.facts)))
                known = effect.facts.snapshots.work.known
                self.texts.append(max((len(one.used) for one in known), default=0))
            elif isinstance(effect, fx.Send):
                self.sent.append(len(protobuf.order_to_wire(effect.order)))
                if isinstance(effect.order, m.Start):
                    self.round = effect.order.round
                elif isinstance(effect.order, m.WorkGrant):
                    self.granted[effect.order.rank] = effect.order

    def hear(self, node: int, data: bytes) -> None:
        """A report arrives as bytes."""
        self._step(fx.Heard(node, protobuf.report_from_wire(data)))

    def ask(self) -> tuple[float, int, int]:
        """Every rank has used half of its last lease and all others, and asks: CPU seconds of one
        request, and bytes of a report and of a grant."""
        reports = [protobuf.report_to_wire(one) for one in self.states]
        self.sent.clear()
        began = time.process_time()
        for rank, data in enumerate(reports):
            self.hear(rank // LOCAL, data)
        seconds = (time.process_time() - began) / len(reports)
        for rank, order in self.granted.items():
            state = self.states[rank]
            share = state.shares[0]
            leases = share.leases + order.leases
            used = sum(b - a for a, b in m.batched(leases)) - SIZE // 2
            share = replace(share, leases=leases, used=used)
            self.states[rank] = replace(state, shares=(share,))
        self.granted.clear()
        return seconds, max(map(len, reports)), max(self.sent)

    def save(self, step: int) -> tuple[float, int, int]:
        """All ranks save a step: CPU seconds until all nodes are told, bytes of the record, and
        characters of what was used."""
        assert self.round is not None
        marked = []
        for rank, state in enumerate(self.states):
            share = state.shares[0]
            share = replace(share, marks=(*share.marks, share.used), wants=False)
            self.states[rank] = replace(state, marked=(*state.marked, step), shares=(share,))
            marked.append(protobuf.report_to_wire(self.states[rank]))
        held = [
            protobuf.report_to_wire(
                m.Holdings(
                    Endpoint(f"n{node}", 7000),
                    (m.Holding(self.round, step, node * LOCAL, len(marked), (1,) * LOCAL, False),),
                )
            )
            for node in range(self.nodes)
        ]
        self.records.clear()
        self.texts.clear()
        began = time.process_time()
        for rank, data in enumerate(marked):
            self.hear(rank // LOCAL, data)
        for node, data in enumerate(held):
            self.hear(node, data)
        seconds = time.process_time() - began
        return seconds, max(self.records), max(self.texts)


def _hello(node: int, spec: m.JobSpec) -> m.Hello:
    name = f"n{node}"
    identity = (m.PROTOCOL_VERSION, __version__, name, f"life{node}", name, name, 1, -1)
    return m.Hello(*identity, LOCAL, "default", spec, None)


def of_one_rank() -> float:
    """Microseconds per shard of one sample, of two ranks together on this machine."""
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "take.py"
        script.write_text(SCRIPT)
        words = (
            str(Path(sys.executable).with_name(ELASTICRUN)),
            "--standalone",
            "--nproc-per-node=2",
            str(script),
            str(SHARDS),
        )
        done = subprocess.run(words, capture_output=True, text=True, check=True, timeout=600)
    lines = [line.split() for line in done.stdout.splitlines() if "took" in line]
    assert sum(int(line[-2]) for line in lines) == SHARDS
    return max(float(line[-1]) for line in lines) / SHARDS * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=10_000)
    arguments = parser.parse_args()
    crowd = Crowd(arguments.ranks)
    asks = [crowd.ask() for _ in range(ROUNDS)]
    seconds, record, text = crowd.save(1)
    each = of_one_rank()
    print(f"{arguments.ranks} ranks on {crowd.nodes} nodes")
    per_request = statistics.median(one[0] for one in asks) * 1e6
    sizes = f"{asks[-1][1]} bytes in, {asks[-1][2]} bytes out"
    print(f"a request: {per_request:.0f} us of CPU, {sizes}")
    print(f"a step: {seconds:.2f} s of CPU; the record has {record} bytes, what was used {text}")
    print(f"a shard of one sample, two ranks of one job: {each:.0f} us")


if __name__ == "__main__":
    sys.exit(main())
