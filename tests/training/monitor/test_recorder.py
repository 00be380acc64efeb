"""What torch's flight recorders say, read as positions; by hand, and of a real hooked backend."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import pytest

from elasticrun.training.monitor import recorder
from elasticrun.training.monitor.recorders import FlightRecorder, TorchGroup, recorders
from elasticrun.wire.progress import GroupAnswer
from tests import needs
from tests.harness import SCRIPTS

GLOO = {"gloo": frozenset({"cpu", "cuda"})}
NCCL2 = {"nccl2": frozenset({"cuda"})}
MIXED = {"gloo": frozenset({"cpu"}), "nccl2": frozenset({"cuda"})}


def entry(number: int, *, lib: str = "nccl2", retired: bool = True, **more: Any) -> dict[str, Any]:
    row = {"pg_id": 0, "process_group": ["0", "default_pg"], "collective_seq_id": number,
           "p2p_seq_id": 0, "profiling_name": f"{lib}:all_reduce", "is_p2p": False,
           "retired": retired, "state": "scheduled", "input_sizes": [[4]],
           "input_dtypes": ["Float"], "timeout_ms": 600000, "time_created_ns": 1}  # fmt: skip
    return {**row, **more}


def one(
    entries: Sequence[dict[str, Any]],
    enqueued: int,
    completed: int = -1,
    devices: Any = NCCL2,
    backend: str = "nccl2",
) -> GroupAnswer:
    """The position in one group, as a recorder of this backend tells it."""
    status = {"0": {"last_enqueued_collective": str(enqueued), "last_started_collective": "-1",
                    "last_completed_collective": str(completed)}}  # fmt: skip

    def dump(collectives: bool, active: bool) -> bytes:
        said = {"pg_status": status, **({"entries": entries} if collectives else {})}
        return json.dumps(said).encode()

    read = FlightRecorder("" if backend == "gloo" else backend, frozenset({backend}), dump)
    group = TorchGroup("0", "default_pg", range(4), devices)
    (found,) = recorder._positions(read, [group])
    return found


def test_a_hooks_counters_run_one_behind() -> None:
    """Three collectives of which the last is open; torch 2.15 counts 2 calls enqueued, from 0."""
    found = one([entry(1), entry(2), entry(3, retired=False)], 2, 1)
    assert (found.entered, found.done, found.call) == (3, 2, "all_reduce [4] float32")
    assert (found.key, found.name, found.members, found.limit) == ("nccl2:0", "0", "0-3", 600.0)
    assert one([entry(1), entry(2)], 1).done == 2, "this backend does not tell what is complete"


def test_a_hook_counts_calls_between_two_ranks_too() -> None:
    """Ranks of a pipeline make different numbers of these: nobody is behind for that."""
    pairs = [entry(1, is_p2p=True, p2p_seq_id=number) for number in range(1, 40)]
    found = one([entry(1), *pairs, entry(2, retired=False)], 40, 39)
    assert (found.entered, found.done) == (2, 1)
    waits = one([entry(1), *pairs, entry(1, is_p2p=True, retired=False)], 40, 39)
    assert (waits.entered, waits.done) == (1, 1)


def test_a_call_that_raised_under_a_hook_is_not_open_for_ever() -> None:
    found = one([entry(1), entry(2, retired=False), entry(3), entry(4, retired=False)], 3)
    assert (found.entered, found.done) == (4, 3)


def test_a_group_of_which_the_ring_has_nothing_left() -> None:
    other = entry(9, pg_id=1, process_group=["1", ""])
    found = one([other], 4)
    assert (found.entered, found.done) == (5, 5)


def test_entries_that_are_ahead_of_the_counters_count() -> None:
    rows = [entry(number, lib="gloo", retired=number < 3) for number in (1, 2, 3)]
    found = one(rows, 2, 2, GLOO, "gloo")
    assert (found.entered, found.done, found.key) == (3, 2, "0")


@pytest.mark.parametrize(
    ("devices", "backend", "name"),
    [(GLOO, "gloo", "0"), (NCCL2, "nccl2", "0"), (MIXED, "gloo", "0/cpu"), (MIXED, "nccl2", "0")],
)
def test_a_group_has_a_second_name_only_where_it_has_a_second_backend(
    devices: Any, backend: str, name: str
) -> None:
    """A CUDA build has NCCL's recorder also where no group is NCCL's."""
    assert one([entry(1, lib=backend)], 1, 1, devices, backend).name == name


HOOKED = """
import json, sys, time
sys.path.append(sys.argv[1])
import stored, torch, torch.distributed as dist
from elasticrun.training.monitor import recorder

class Looks(stored.Stored):
    def broadcast(self, tensors, options):
        said.append(recorder.positions())
        said.append(counters.read())
        said.append(counters.read())
        return super().broadcast(tensors, options)

said, counters = [], recorder.Counters()
stored.Stored = Looks
dist.init_process_group("cpu:gloo,cuda:gloo" if sys.argv[2] == "gloo" else "stored",
                        store=dist.HashStore(), rank=0, world_size=1)
for _ in range(3):
    dist.all_reduce(torch.ones(4))
if sys.argv[2] != "gloo":
    dist.broadcast(torch.ones(2, 3), 0)
limit = time.monotonic() + 60  # gloo records the end of a call after the call has returned
while any(g.done < g.entered for g in recorder.positions()) and time.monotonic() < limit:
    pass
said.append(recorder.positions())
print(json.dumps([[[g.key, g.name, g.entered, g.done, g.call] for g in one] for one in said]))
dist.destroy_process_group()  # gloo's threads would end the process at its exit
"""


def positions_in(backend: str) -> list[list[list[Any]]]:
    command = [sys.executable, "-c", HOOKED, str(SCRIPTS / "site-packages"), backend]
    ring = {"TORCH_FR_BUFFER_SIZE": "2000"}  # torch before 2.11 keeps none by itself
    said = subprocess.check_output(command, text=True, env={**os.environ, **ring})
    return json.loads(said.splitlines()[-1])  # gloo prints a line of its own


def test_a_real_backend_that_does_not_record_itself() -> None:
    """While it is in a call, and after it."""
    needs.hooked_backends()
    key, call = "stored:0", "broadcast [2, 3] float32"
    assert positions_in("stored") == [
        [[key, "0", 4, 3, call]],
        [[key, "", 4, 0, ""]],
        [[key, "", 4, 3, ""]],
        [[key, "0", 4, 4, ""]],
    ]


def test_a_real_group_of_gloo_alone() -> None:
    """Also in a CUDA build, which can read NCCL's recorder."""
    assert positions_in("gloo") == [[["0", "0", 3, 3, ""]]]


def test_no_group_no_recorder() -> None:
    assert recorders([]) == ()
