"""The thread that answers in a rank: real ranks of a real fork server, asked as the agent asks."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, TypeVar

from elasticrun.agent.sight.asking import RankQueries
from elasticrun.training.monitor.recorder import signature
from elasticrun.wire.progress import GroupAnswer, RankAnswer
from elasticrun.wire.spawning import SendSignal
from elasticrun.wire.types import EntryKind, Entrypoint
from tests.forkserver.driver import Driver, script
from tests.further import further

T = TypeVar("T")

LIMIT = 60.0
"""Seconds for what takes one."""

WAITS = {"0": (4, 3), "1": (1, 1)}
READS = {"0": (3, 3), "1": (1, 1)}
"""Collectives entered and complete; torch notes that one is a moment after the script has it."""

TRAINS = """
import os, sys, threading
import torch, torch.distributed as dist

def main():
    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo", init_method=sys.argv[1], rank=rank, world_size=2)
    group = dist.new_group([0, 1], group_desc="dp")
    tensor = torch.ones(4)
    for _ in range(3):
        dist.all_reduce(tensor)
    dist.broadcast(tensor, 0, group=group)
    threading.Thread(target=threading.Event().wait, name="helper", daemon=True).start()
    if dist.get_rank() == 1:
        load_shard()
    dist.all_reduce(tensor)

def load_shard():
    os.read(os.open(sys.argv[2], os.O_RDONLY), 1)

main()
"""

BUSY = """
import os, sys, threading
import torch, torch.distributed as dist

def work(depth=0):
    return depth if depth == 30 else work(depth + 1) + len([None] * depth)

def busy():
    while not os.path.exists(sys.argv[2]):
        work()

dist.init_process_group("gloo", init_method=sys.argv[1], rank=0, world_size=1)
thread = threading.Thread(target=busy)
thread.start()
while thread.is_alive():
    work()
    dist.all_reduce(torch.ones(4))
dist.destroy_process_group()
"""

FORKS = """
import json, os, sys, threading, warnings
first = os.open(sys.argv[1], os.O_RDONLY)
with warnings.catch_warnings(record=True) as warned:
    warnings.simplefilter("always")
    child = os.fork()
if not child:
    files = [int(fd) for fd in os.listdir("/proc/self/fd")]
    os._exit(len(os.listdir("/proc/self/task")) != 1 or max(files) > first + 1)
_, status = os.waitpid(child, 0)
said = [first, status, len(threading.enumerate()), [str(one.message) for one in warned]]
print(json.dumps(said), flush=True)
os.read(first, 1)
"""

FORKS_OFTEN = """
import json, os, sys, threading

threads = lambda: len(os.listdir("/proc/self/task"))
seen = []
os.register_at_fork(before=lambda: seen.append(threads()))  # hears of a fork after the monitor
from elasticrun.training.monitor import monitor

monitor.start(sys.argv[1])

def fork(times):
    for _ in range(times):
        child = os.fork()
        if not child:
            if os.fork():  # a child's own child has none either
                os.wait()
            os._exit(threads() != 1)
        assert not os.waitpid(child, 0)[1]

print("on", flush=True)
while times := int(sys.stdin.readline()):
    fork(times)
    print(json.dumps([seen, threads()]), flush=True)
    seen.clear()
several = [threading.Thread(target=fork, args=(20,)) for _ in range(4)]
[one.start() for one in several]
[one.join() for one in several]
print("over", flush=True)
sys.stdin.readline()
"""


def asked(work: Callable[[RankQueries], Coroutine[Any, Any, T]], limit: float = LIMIT) -> T:
    async def whole() -> T:
        asking = RankQueries()
        try:
            return await asyncio.wait_for(work(asking), limit)
        finally:
            asking.stop()

    return asyncio.run(whole())


async def until(asking: RankQueries, rank: int, there: Callable[[RankAnswer], bool]) -> RankAnswer:
    """Ask this rank until it answers so."""
    while True:
        said = (await asking.ask([rank], 1.0, full=True, stacks=True)).get(rank)
        if said is not None and there(said):
            return said
        await asyncio.sleep(0)


def test_counters_names_and_stacks_of_two_ranks(server: Driver, tmp_path: Path) -> None:
    """One waits in an all_reduce, the other reads a pipe that nobody writes to."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    args = (f"file://{tmp_path / 'store'}", str(pipe))
    entry = Entrypoint(EntryKind.SCRIPT, script(tmp_path / "train.py", TRAINS).target, args)

    async def work(asking: RankQueries) -> None:
        places = asking.start(2, {})
        keys = [
            server.start(
                entry,
                local_rank=rank,
                env={"RANK": str(rank)},
                monitor=places[rank],
            )
            for rank in range(2)
        ]
        for key in keys:
            server.spawned(key)
        try:
            # torch counts a call a moment before it stands among its entries
            waits = await until(
                asking, 0, lambda said: _counts(said) == WAITS and any(g.call for g in said.groups)
            )
            reads = await until(
                asking, 1, lambda said: _in(said, "load_shard") and _counts(said) == READS
            )
            _look(waits, reads)
            for _ in range(500):
                both = await asking.ask([0, 1], LIMIT)
            assert [_counts(said) for said in both.values() if said is not None] == [WAITS, READS]
        finally:
            for key in keys:
                server.tell(SendSignal(key, signal.SIGKILL))
                server.exited(key)
        assert await asking.ask([0, 1], LIMIT) == {}

    asked(work)


def _look(waits: RankAnswer, reads: RankAnswer) -> None:
    default, group = sorted(waits.groups, key=lambda row: row.name)
    assert (default.call, default.limit) == ("all_reduce [4] float32", 1800.0)
    assert 0.0 <= default.age < LIMIT
    assert (default.name, default.title, default.members) == ("0", "default_pg", "0-1")
    assert (group.name, group.title, group.call) == ("1", "dp", "")
    assert {(row.entered, row.done) for row in reads.groups} == {(3, 3), (1, 1)}
    assert [one.name for one in reads.threads] == ["main", "helper"]
    assert [frame[2] for frame in reads.threads[0].frames][:3] == ["load_shard", "main", "<module>"]
    assert reads.threads[0].frames[0][0].endswith("train.py")


def _in(said: RankAnswer, function: str) -> bool:
    return bool(said.threads) and said.threads[0].frames[0][2] == function


def _counts(said: RankAnswer) -> dict[str, tuple[int, int]]:
    return {row.key: (row.entered, row.done) for row in said.groups}


@further("test_counters_names_and_stacks_of_two_ranks")
def test_a_storm_of_questions_harms_no_busy_rank(server: Driver, tmp_path: Path) -> None:
    """Hundreds, for counters and the stacks of two threads that compute; then it ends well."""
    over = tmp_path / "over"
    args = (f"file://{tmp_path / 'store'}", str(over))
    entry = Entrypoint(EntryKind.SCRIPT, script(tmp_path / "busy.py", BUSY).target, args)

    async def work(asking: RankQueries) -> int:
        key = server.start(entry, env={"RANK": "0"}, monitor=asking.start(1, {})[0])
        server.spawned(key)
        try:
            await until(asking, 0, lambda said: len(said.threads) >= 2 and bool(said.groups))
            said = [await asking.ask([0], LIMIT, full=True, stacks=True) for _ in range(300)]
        finally:
            over.touch()
        assert all(one[0] is not None for one in said)
        return server.exited(key).code

    assert asked(work, 5 * LIMIT) == 0


def test_a_script_does_not_find_it_and_its_child_has_none(server: Driver, tmp_path: Path) -> None:
    """Its first file is number 3 and it counts one thread; a child has neither thread nor socket.
    Without torch there are no groups."""
    pipe, out = tmp_path / "pipe", tmp_path / "out"
    os.mkfifo(pipe)
    writer = os.open(pipe, os.O_RDWR)
    entry = Entrypoint(EntryKind.SCRIPT, script(tmp_path / "forks.py", FORKS).target, (str(pipe),))

    async def work(asking: RankQueries) -> None:
        key = server.start(entry, monitor=asking.start(1, {})[0], stdout=str(out))
        said = await until(asking, 0, lambda said: out.stat().st_size > 0)
        assert said.groups == ()
        os.write(writer, b"x")
        assert server.exited(key).code == 0

    try:
        asked(work)
    finally:
        os.close(writer)
    assert json.loads(out.read_text()) == [3, 0, 1, []]


def test_it_ends_before_each_fork_and_answers_again() -> None:
    """Whoever counts threads at a fork finds those of the script; no question is lost, and threads
    that fork at once lose no answering thread either."""

    async def work(asking: RankQueries) -> None:
        words = ("-c", FORKS_OFTEN, asking.start(1, {})[0])
        pipe = asyncio.subprocess.PIPE
        rank = await asyncio.create_subprocess_exec(sys.executable, *words, stdin=pipe, stdout=pipe)
        assert rank.stdin is not None
        assert rank.stdout is not None
        assert await rank.stdout.readline() == b"on\n"
        for times in (1, 50):
            rank.stdin.write(f"{times}\n".encode())
            forked = asyncio.create_task(rank.stdout.readline())
            while not forked.done():
                said = await asking.ask([0], LIMIT)
                assert said[0] is not None, "a question that came during a fork is lost"
            counted, threads = json.loads(await forked)
            assert counted == [1] * times
            assert threads in (1, 2)  # the new one may not have begun
        rank.stdin.write(b"0\n")
        assert await rank.stdout.readline() == b"over\n"
        assert (await asking.ask([0], LIMIT))[0] is not None
        rank.stdin.write(b"end\n")
        assert await rank.wait() == 0

    asked(work)


def test_an_older_torch_is_told_to_keep_collectives() -> None:
    """Once for each version, in a process of its own; what the user has set stands."""
    code = (
        "import os, sys; from elasticrun.training.monitor.recorder import enable\n"
        "for version in sys.argv[1:]:\n"
        " os.unsetenv('TORCH_FR_BUFFER_SIZE'); enable(version)\n"
        " os.system('echo $TORCH_FR_BUFFER_SIZE,')\n"
    )
    versions = ("2.11.0+cpu", "2.14", "3.0.1", "", "odd.one", "2.8.0+cu128", "2.10.0")
    for set_by, kept in (({}, "2000"), ({"TORCH_NCCL_TRACE_BUFFER_SIZE": "7"}, "")):
        command = [sys.executable, "-c", code, *versions]
        said = subprocess.check_output(command, env={**os.environ, **set_by}, text=True)
        assert said.split() == [","] * 5 + [f"{kept},"] * 2


def test_words_for_calls() -> None:
    call = {
        "profiling_name": "nccl:all_gather",
        "input_sizes": [[2, 3]] * 6,
        "input_dtypes": ["BFloat16"] * 6,
    }
    assert signature(call) == "all_gather [2, 3] [2, 3] [2, 3] [2, 3] and 2 more bfloat16"
    assert GroupAnswer("0", 1, -1, 1).call == ""
