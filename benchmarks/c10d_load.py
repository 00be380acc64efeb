"""Runs handlers of torch's c10d rendezvous, one thread each, as torchrun's agents use it.

    python benchmarks/c10d_load.py PORT COUNT NODES
    python benchmarks/c10d_load.py PORT            (the store's server)

Each handler has a separate client of the one TCPStore. The protocol is that of load.py: `join`
calls next_rendezvous in all threads at once, and answers when each has its rank, or after
$BENCH_PATIENCE seconds.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from datetime import timedelta

import torch.distributed as dist
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import (
    DynamicRendezvousHandler,
    RendezvousTimeout,
)

HOST = "127.0.0.1"


def serve(port: int) -> None:
    """Run the store's server until EOF on stdin; does not return. `port`: 0 for any."""
    store = dist.TCPStore(HOST, port, is_master=True, wait_for_workers=False)
    print(json.dumps({"port": store.port}), flush=True)
    sys.stdin.read()
    os._exit(0)


def handler(port: int, nodes: int, patience: float) -> DynamicRendezvousHandler:
    """One node's handler, created as torchrun does, except for its time limit."""
    store = dist.TCPStore(HOST, port, is_master=False, timeout=timedelta(seconds=patience))
    return DynamicRendezvousHandler.from_backend(
        run_id="scale",
        store=store,
        backend=C10dRendezvousBackend(store, "scale"),
        min_nodes=nodes,
        max_nodes=nodes,
        local_addr=HOST,
        timeout=RendezvousTimeout(join=timedelta(seconds=patience)),
    )


class Load:
    """The handlers of this process, each in a thread."""

    def __init__(self, port: int, count: int, nodes: int, patience: float) -> None:
        self._port, self._nodes, self._patience = port, nodes, patience
        self._count = count
        self._done: list[float] = []
        self._failed: list[str] = []
        self._kept: list[DynamicRendezvousHandler] = []  # connections stay open, as with agents
        self._over = threading.Semaphore(0)

    def join(self) -> dict[str, object]:
        """Start all handlers at once. Returns the tally once all have succeeded or failed, or the
        time limit is over."""
        began = time.monotonic()
        for _ in range(self._count):
            threading.Thread(target=self._one, daemon=True).start()
        end = began + self._patience
        for _ in range(self._count):
            if not self._over.acquire(timeout=max(0.01, end - time.monotonic())):
                break
        late = len(self._done) < self._count
        last = max(self._done, default=0.0)
        refused = {why: self._failed.count(why) for why in set(self._failed)}
        return {"first_join": began, "last_start": last, "late": int(late), "refused": refused}

    def _one(self) -> None:
        try:
            one = handler(self._port, self._nodes, self._patience)
            self._kept.append(one)
            one.next_rendezvous()
            self._done.append(time.monotonic())
        except Exception as wrong:
            self._failed.append(type(wrong).__name__)
        self._over.release()


def main() -> None:
    """See the module docstring."""
    port = int(sys.argv[1])
    if len(sys.argv) == 2:
        serve(port)
    count, nodes = (int(word) for word in sys.argv[2:4])
    patience = float(os.environ["BENCH_PATIENCE"])
    load = Load(port, count, nodes, patience)
    for line in sys.stdin:
        answer = load.join() if json.loads(line)["do"] == "join" else {"late": 0}
        print(json.dumps(answer), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
