"""Real ranks for the tests: forked from a process that has imported torch, with gloo between them.

The fork server is multiprocessing's, so a rank costs milliseconds and not an import of torch.
"""

from __future__ import annotations

import multiprocessing
import os
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from multiprocessing.forkserver import _forkserver
from typing import Any

from elasticrun.testing.node import free_port
from tests.training.checkpointing.played import PlayedAgent

LIMIT = 240.0

USUAL: Any = {
    "every_steps": 1,
    "persist_every_seconds": None,
    "strict_save": True,
    "on_busy": "wait",
}
"""Options of a Checkpointer: a snapshot at every step, and no checkpoint."""

Body = Callable[..., Any]


def _rank(body: Body, env: Mapping[str, str], answer: Any, args: tuple[Any, ...]) -> None:
    os.environ.update(env)
    import torch
    import torch.distributed as dist

    from elasticrun.training.checkpointing import restore_choice

    restore_choice.QUERY_LIMIT = LIMIT  # a machine that stands still is no storage
    torch.set_num_threads(1)
    try:
        if int(env["WORLD_SIZE"]) > 1:
            dist.init_process_group("gloo")
        answer.send(("ok", body(*args)))
        with suppress(EOFError, OSError):  # the store is rank 0's, and others may need it still
            answer.recv()
        if dist.is_initialized():
            dist.destroy_process_group()
    except BaseException:
        answer.send(("failed", traceback.format_exc()))
        raise


class Ranks:
    """The processes of one life."""

    def __init__(self, body: Body, *args: Any, world: int, places: list[str] | None = None) -> None:
        context = multiprocessing.get_context("forkserver")
        port = free_port()
        self.processes, self._answers = [], []
        for rank in range(world):
            env = {
                "RANK": str(rank),
                "WORLD_SIZE": str(world),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                "OMP_NUM_THREADS": "1",
            }
            if places:
                env["ELASTICRUN_SNAPSHOTS"] = places[rank]
            ours, theirs = context.Pipe()
            process = context.Process(target=_rank, args=(body, env, theirs, args), daemon=True)
            process.start()
            theirs.close()
            self.processes.append(process)
            self._answers.append(ours)

    def results(self, last_first: bool = False) -> list[Any]:
        """What each rank's body has returned; an AssertionError with what the first one, or the
        last, has raised."""
        found = []
        try:
            for answer in reversed(self._answers) if last_first else self._answers:
                assert answer.poll(LIMIT), "a rank does not answer"
                word, what = answer.recv()
                assert word == "ok", what
                found.append(what)
            for answer in self._answers:  # now they may end
                answer.close()
            for process in self.processes:
                process.join(LIMIT)
        finally:
            self.close()
        return found

    def close(self) -> None:
        for process in self.processes:
            if process.is_alive():
                process.kill()
            process.join(LIMIT)
        for answer in self._answers:
            answer.close()


def life(body: Body, *args: Any, world: int, agent: PlayedAgent | None = None) -> list[Any]:
    """What each rank's body returns in a life of so many; with an agent each has its place."""
    places = None if agent is None else [agent.place(rank) for rank in range(world)]
    return Ranks(body, *args, world=world, places=places).results()


@contextmanager
def fork_server(*more: str) -> Iterator[None]:
    """Ends the fork server with the tests that need it. `more`: modules that their ranks need."""
    multiprocessing.set_forkserver_preload(
        [
            "torch",
            "torch.distributed.fsdp",
            "torch.distributed.tensor",
            "elasticrun.training.checkpointing.checkpointer",
            *more,
        ]
    )
    try:
        yield
    finally:
        _forkserver._stop()
