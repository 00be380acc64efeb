"""What nodes have said about themselves: their Hello, their store, their pids. Facts, no rules."""

from __future__ import annotations

from dataclasses import dataclass, fields

from elasticrun.core.placement import Candidate
from elasticrun.wire.ids import Endpoint
from elasticrun.wire.messages import Hello, JobSpec


@dataclass(slots=True)
class Entry:
    """One node id."""

    hello: Hello
    order: int = -1  # of first join over all lives, -1: has not joined
    store: Endpoint | None = None
    pids: tuple[int, ...] = ()
    told: str = ""  # the sentence it was last told to wait for


class Roster:
    """Every node that was admitted, by node id."""

    def __init__(self) -> None:
        self._entries: dict[str, Entry] = {}
        self._joined = 0

    def __getitem__(self, node: str) -> Entry:
        return self._entries[node]

    def __contains__(self, node: str) -> bool:
        return node in self._entries

    def enter(self, hello: Hello) -> Entry:
        """A stream of this node was admitted. Its place in the order of joins is kept for ever."""
        old = self._entries.get(hello.node)
        if old is not None and old.hello.incarnation == hello.incarnation:
            old.hello, old.told = hello, ""
            return old
        entry = Entry(hello, order=-1 if old is None else old.order)
        self._entries[hello.node] = entry
        return entry

    def forget(self, node: str) -> None:
        """The node has gone and its room is needed."""
        self._entries.pop(node, None)

    def joined(self, node: str, store: Endpoint) -> None:
        """It offers this store and can start."""
        entry = self._entries[node]
        entry.store = store
        entry.pids = ()
        if entry.order < 0:
            entry.order = self._joined
            self._joined += 1

    def candidate(self, node: str) -> Candidate:
        """A node that has joined, as placement needs it."""
        entry = self._entries[node]
        hello = entry.hello
        assert entry.store is not None
        return Candidate(
            node, hello.node_rank, entry.order, hello.local_world_size, hello.role, entry.store
        )


def differences(theirs: JobSpec, ours: JobSpec) -> list[str]:
    """Where an agent was started with other numbers than the job has."""
    pairs = ((f.name, getattr(theirs, f.name), getattr(ours, f.name)) for f in fields(JobSpec))
    return [f"{name}={its} (the job: {own})" for name, its, own in pairs if its != own]
