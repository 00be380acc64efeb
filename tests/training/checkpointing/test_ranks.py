"""Ranks as processes: sharded state at other numbers of ranks, deaths in mid-copy, torch alone."""

from __future__ import annotations

import os
import random
import shutil
import time
import warnings
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from elasticrun.snapshots.storage.folder import CheckpointFault, Folder
from elasticrun.snapshots.storage.writing import StorageError
from elasticrun.training import Checkpointer, Keep
from elasticrun.training.checkpointing.agent_connection import ConflictError
from elasticrun.training.checkpointing.memory.mapped import MappedSegment
from elasticrun.training.checkpointing.restore_choice import NotAgreed, RankExchange
from elasticrun.wire.snapshots import Committed, NeedSegment, Remark, Restored, WantShard
from tests.further import cases
from tests.training.checkpointing.played import playing
from tests.training.checkpointing.ranks import USUAL, Ranks, fork_server, life
from tests.training.checkpointing.test_stored import add_manifest

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


@pytest.fixture(scope="module", autouse=True)
def server() -> Iterator[None]:
    with fork_server("torch.distributed.fsdp", "torch._dynamo"):
        yield


def whole(step: int) -> dict[str, torch.Tensor]:
    """The job's state at a step, as one rank would have it."""
    random = torch.Generator().manual_seed(step)
    return {
        "rows": torch.randn(7, 3, generator=random),
        "columns": torch.randn(4, 5, generator=random).to(torch.bfloat16),
        "few": torch.randn(2, generator=random),  # fewer rows than ranks: empty shards
        "same": torch.randn(3, generator=random),
        "plain": torch.randn(2, 2, generator=random),
        "scalar": torch.tensor(float(step)),
    }


PLACEMENTS: dict[str, Any] = {
    "rows": [Shard(0)],
    "columns": [Shard(1)],
    "few": [Shard(0)],
    "same": [Replicate()],
}


def sharded(step: int) -> dict[str, torch.Tensor]:
    state = whole(step)
    if not dist.is_initialized():
        return state
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return {
        name: distribute_tensor(tensor, mesh, PLACEMENTS[name]) if name in PLACEMENTS else tensor
        for name, tensor in state.items()
    }


def parts(state: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    return [t.to_local() if isinstance(t, DTensor) else t for t in state.values()]


def two_steps(folder: str) -> int:
    """Two snapshots, the second one written out where nobody plays an agent."""
    state, notes = sharded(0), {"step": 0}
    rank = int(os.environ["RANK"])
    own = {"rank": rank, "random": torch.zeros(3)}
    ckpt = Checkpointer(folder, state=state, notes=notes, persist_every_steps=2, **USUAL)
    ckpt.per_rank("own", own)
    start = ckpt.restore()
    for step in (start + 1, start + 2):
        for target, source in zip(parts(state), parts(sharded(step)), strict=True):
            target.copy_(source)
        notes["step"] = step
        own["random"].fill_(float(rank + step))
        ckpt.step(step)
    ckpt.close()
    return start


def restored(folder: str, step: int) -> tuple[int, list[Any]]:
    """Restores, and compares every bit of this rank's part."""
    state, notes, states = sharded(99), {"step": 0}, []
    own: dict[str, Any] = {"rank": -1}
    ckpt = Checkpointer(folder, state=state, notes=notes, every_steps=1, persist_every_seconds=None)
    ckpt.per_rank("own", own, on_resize=states.extend)
    start = ckpt.restore()
    for name, mine, wanted in zip(state, parts(state), parts(sharded(step)), strict=True):
        assert torch.equal(mine, wanted), name
    assert notes == {"step": step}
    ckpt.step(start + 1)
    assert ckpt.stats.failed == 0, ckpt.stats.error
    ckpt.close()
    if own["rank"] >= 0:
        assert own["random"].tolist() == [own["rank"] + float(step)] * 3
    return own["rank"], [(one["rank"], one["random"].tolist()) for one in states]


@pytest.mark.parametrize(
    ("old", "new"), cases([(2, (1, 3, 2)), (4, (2,))], kept=[(2, (1, 3, 2))], several=True)
)
def test_sharded_state_from_memory_at_another_number_of_ranks(
    old: int, new: tuple[int, ...], tmp_path: Path
) -> None:
    with playing(old) as agent:
        assert life(two_steps, str(tmp_path), world=old, agent=agent) == [0] * old
        first = agent.resume.present
        for number, world in enumerate(new, start=2):
            agent.next_life(2, old, number, world, of=first)
            again = life(restored, str(tmp_path), 2, world=world, agent=agent)
            states = [(rank, [float(rank + 2)] * 3) for rank in range(old)]
            for rank, (own, given) in enumerate(again):
                assert own == (rank if world == old else -1)
                assert given == ([] if world == old else states)
        assert {m.source for m in agent.of(Restored)} == {"nothing", "memory"}


def test_a_shard_that_is_gone_is_had_from_the_others_if_they_have_it_all(tmp_path: Path) -> None:
    """One rank's is lost: what is sharded cannot be had, and that is said of this rank."""
    with playing(2) as agent:
        life(two_steps, str(tmp_path), world=2, agent=agent)
        agent.next_life(2, 2)
        agent.no_shard = {1}
        places = [agent.place(rank) for rank in range(2)]
        ranks = Ranks(restored, str(tmp_path), 2, world=2, places=places)
        with pytest.raises(AssertionError, match=r"is in no shard that was found"):
            ranks.results(last_first=True)
        assert {m.rank for m in agent.of(WantShard, 1)} == {0, 1}


class Mute(dist.ProcessGroup):
    """Has no backend, so that every collective of it raises; but a name, which a mesh asks for."""

    def _set_group_name(self, name: str) -> None:
        self.name = name

    def getGroupName(self) -> str:
        return self.name


def mute() -> None:
    """From now on no rank can call a collective."""
    kept: Any = dist.distributed_c10d._get_default_store()
    rank, world = dist.get_rank(), dist.get_world_size()
    # gloo's connections are made by each rank in its own time: who left before the others are
    # through would fail them
    kept.set(f"connected/{rank}", "")
    kept.wait([f"connected/{other}" for other in range(world)])
    dist.destroy_process_group()
    make = lambda store, rank, world, limit: Mute(rank, world)  # noqa: E731
    dist.Backend.register_backend("mute", make, devices=["cpu"])
    store = dist.PrefixStore("mute", kept)
    dist.init_process_group("mute", store=store, rank=rank, world_size=world)
    for call in (dist.barrier, lambda: dist.all_reduce(torch.ones(1))):
        with pytest.raises(RuntimeError):
            call()


def three_steps(folder: str, source: str, first: int) -> None:
    """A restore, snapshots, one that is asked for; but for the first life without a collective."""
    if source != "nothing":
        mute()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    rows = DTensor.from_local(torch.zeros(3, 2), mesh, [Shard(0)], run_check=False)
    model = torch.nn.Linear(2, 2)
    optim = torch.optim.AdamW(model.parameters())
    state, options = {"rows": rows}, {**USUAL, "persist_every_steps": 2}
    ckpt = Checkpointer(folder, model=model, optim=optim, state=state, **options)
    ckpt.per_rank("own", {"rank": dist.get_rank()})
    assert ckpt.restore() == first
    assert ckpt.stats.source == source
    assert torch.all(rows.to_local() == first)
    for step in range(first + 1, first + 4):
        model(torch.ones(1, 2)).sum().backward()
        optim.step()
        rows.to_local().fill_(step)
        ckpt.step(step)
    rows.to_local().fill_(first + 4)
    assert ckpt.save_now(first + 4)
    ckpt.close()


def test_no_collective_is_called_with_an_agent(tmp_path: Path) -> None:
    """In a restore from storage, one from memory, and snapshots after them."""
    life(three_steps, str(tmp_path), "nothing", 0, world=2)
    with playing(2) as agent:
        for source, first in (("storage", 4), ("memory", 8)):
            life(three_steps, str(tmp_path), source, first, world=2, agent=agent)
            if first == 4:
                agent.next_life(8, 2)


def two_steps_of_hsdp(folder: str, seed: int) -> tuple[int, list[list[float]], list[list[float]]]:
    """From what is restored, two steps on: where that was, and this rank's part of the model and of
    the optimizer's state before and after."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("copies", "shards"))
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Linear(16, 4))
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters())
    ckpt = Checkpointer(folder, model=model, optim=optimizer, **USUAL)

    def parts() -> list[list[float]]:
        moments = [of["exp_avg"] for of in optimizer.state.values()]
        every = [*model.parameters(), *moments]
        assert all(isinstance(one, DTensor) for one in every)
        return [one.to_local().flatten().tolist() for one in every if isinstance(one, DTensor)]

    start = ckpt.restore()
    before = parts()
    for step in (start + 1, start + 2):
        data = torch.Generator().manual_seed(step * 4 + dist.get_rank())
        model(torch.randn(4, 8, generator=data)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        ckpt.step(step)
    assert ckpt.stats.failed == 0, ckpt.stats.error
    after = parts()
    ckpt.close()
    return start, before, after


def test_a_copy_of_a_shard_stands_for_it(tmp_path: Path) -> None:
    """HSDP: shards in one dimension of the mesh, copies in the other. A rank's shard stands on
    another node too, under the same content key, and either of them is as good: ranks 2 and 3 are
    lost with their memory, and 0 and 1 have the same, bit by bit."""
    with playing(4) as agent:
        first = life(two_steps_of_hsdp, str(tmp_path), 1, world=4, agent=agent)
        contents = [agent.of(NeedSegment, rank)[-1].content for rank in range(4)]
        assert contents[:2] == contents[2:]
        assert contents[0] != contents[1]
        agent.next_life(2, 4)
        agent.no_shard = {2, 3}
        second = life(two_steps_of_hsdp, str(tmp_path), 2, world=4, agent=agent)
        assert [(start, before) for start, before, _ in second] == [(2, end) for _, _, end in first]
        assert first[0][2] == first[2][2] != first[1][2] == first[3][2]
        restored = {one.source for one in agent.of(Restored)[4:]}
        assert restored == {"memory"}
        assert {one.rank for one in agent.of(WantShard, 3)} >= {1, 3}


def test_with_torch_alone_checkpoints_are_plain_and_come_back_at_any_number(tmp_path: Path) -> None:
    folder = str(tmp_path / "runs")
    assert life(two_steps, folder, world=2) == [0, 0]
    found = {f"state.{name}": torch.zeros_like(tensor) for name, tensor in whole(2).items()}
    nested = {"state": {name: found[f"state.{name}"] for name in whole(2)}}
    dcp.load(nested, checkpoint_id=f"{folder}/step-000000002", no_dist=True)
    assert all(torch.equal(nested["state"][name], tensor) for name, tensor in whole(2).items())
    states = [(rank, [float(rank + 2)] * 3) for rank in range(2)]
    assert life(restored, folder, 2, world=1) == [(-1, states)]
    assert life(restored, folder, 2, world=2) == [(0, []), (1, [])]
    assert life(two_steps, folder, world=2) == [2, 2]


def test_torch_alone_in_one_process_warns_once_and_keeps_the_newest(tmp_path: Path) -> None:
    state = {"x": torch.zeros(4)}
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        ckpt = Checkpointer(
            tmp_path, state=state, persist_every_steps=2, keep=Keep(last=2, every=4)
        )
        assert ckpt.restore() == 0
        for step in range(1, 11):
            state["x"] += 1
            ckpt.step(step)
    assert [str(w.message) for w in said if "elasticrun" in str(w.message)] == [
        "elasticrun: this process was not started by elasticrun, so nothing is kept in memory; "
        "torch's own "
        "save writes the checkpoints"
    ]
    assert sorted(p.name for p in tmp_path.iterdir()) == [f"step-{step:09d}" for step in (4, 8, 10)]
    assert ckpt.stats.persists == 5
    ckpt.close()


def test_the_newer_of_memory_and_storage_is_taken(tmp_path: Path, monkeypatch) -> None:
    state = {"x": torch.zeros(4)}
    ckpt = Checkpointer(tmp_path, state=state, persist_every_steps=5)
    state["x"].fill_(5.0)
    ckpt.step(5)
    ckpt.close()
    for memory, source in ((4, "storage"), (5, "memory"), (6, "memory")):
        with playing() as agent:
            monkeypatch.setenv("ELASTICRUN_SNAPSHOTS", agent.place(0))
            first = {"x": torch.full((4,), float(memory))}
            taking = Checkpointer(tmp_path, state=first, persist_every_seconds=None)
            taking.save_now(memory)
            agent.next_life(memory, 1)
            state = {"x": torch.zeros(4)}
            ckpt = Checkpointer(tmp_path, state=state, every_steps=1, strict_save=True)
            assert ckpt.restore() == max(memory, 5)
            assert ckpt.stats.source == source
            assert torch.equal(state["x"], torch.full((4,), float(max(memory, 5))))
            assert agent.until(Restored, 2)[-1] == Restored(max(memory, 5), source)
            ckpt.step(max(memory, 5) + 1)
            assert ckpt.stats.snapshots == 1
            ckpt.close()
            taking.close()


class Odd:
    """Raises when the state of one step is taken, on one rank."""

    def __init__(self, rank: int, wrong: int) -> None:
        self.step, self._wrong = 0, wrong if rank == 1 else -1

    def state_dict(self) -> dict[str, Any]:
        if self.step == self._wrong:
            raise RuntimeError("planted")
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step = state["step"]


def fails_once(folder: str) -> tuple[list[int], list[list[int]], list[str]]:
    """One rank cannot take step 2; then nobody can write any more. What had failed after each step
    and which checkpoints stood."""
    state, odd = sharded(0), Odd(dist.get_rank(), 2)
    failed, stood = [], []
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        ckpt = Checkpointer(folder, state=state, odd=odd, persist_every_steps=1, keep=Keep(last=1))
        ckpt.restore()
        for step in (1, 2, 3, 4, 5):
            for target, source in zip(parts(state), parts(sharded(step)), strict=True):
                target.copy_(source)
            odd.step = step
            dist.barrier()
            if step == 5 and dist.get_rank() == 0:
                (Path(folder) / "step-000000005").write_text("in the way")
            dist.barrier()
            ckpt.step(step)
            failed.append(ckpt.stats.failed)
            stood.append(sorted(int(p.parent.name[5:]) for p in Path(folder).glob("*/.metadata")))
        ckpt.close()
        failed.append(ckpt.stats.failed)
    return failed, stood, [str(one.message) for one in said if "failed" in str(one.message)]


def test_a_save_that_fails_ends_nothing_and_costs_no_other(tmp_path: Path) -> None:
    """torch raises what is no Exception. Saves of several steps are never taken for one, and there
    is never a moment without a checkpoint (the newest of two that stand may be just written)."""
    folder = str(tmp_path / "runs")
    (failed, stood, said), (other, _, _) = life(fails_once, folder, world=2)
    assert failed == [0, 0, 1, 1, 1, 2]
    assert other == [0, 1, 1, 1, 1, 2]
    assert [steps[0] for steps in stood[1:]] == [1, 1, 3, 4]
    assert len(said) == 2
    assert "step 2 was not written (rank 1: RuntimeError('planted'))" in said[0]
    assert "a save failed: the checkpoint of step 5 was not written" in said[1]
    os.unlink(f"{folder}/step-000000005")
    assert life(restores, folder, 4, True, world=2) == [(4, ""), (4, "")]


def restores(folder: str, step: int, verify: bool, away: int = -1) -> tuple[int, str]:
    """The step that is restored, with all its bits; or what is said on a rank. Rank `away` cannot
    look into storage."""
    if dist.get_rank() == away:
        Folder.faults = refuse
    state = sharded(99)
    ckpt = Checkpointer(folder, state=state, persist_every_seconds=None, verify=verify)
    try:
        found = ckpt.restore()
    except (NotAgreed, StorageError) as error:
        return -1, f"{type(error).__name__}: {error}"
    for mine, wanted in zip(parts(state), parts(sharded(step)), strict=True):
        assert torch.equal(mine, wanted)
    return found, ""


def refuse(*_: Any) -> str:
    raise StorageError("it is on fire")


def test_what_one_rank_finds_spoiled_all_pass_over_in_the_same_life(tmp_path: Path) -> None:
    """Rank 1 alone compares what is changed in step 4, and rank 0 what is cut in step 3."""
    folder = Folder(str(tmp_path))
    assert life(two_steps, str(tmp_path), world=2) == [0, 0]
    for step in (3, 4):
        shutil.copytree(folder.path(2), folder.path(step))
    for step in (2, 3, 4):
        add_manifest(folder, step)
    changed, cut = Path(folder.path(4)) / "__1_0.distcp", Path(folder.path(3)) / "__0_0.distcp"
    data = bytearray(changed.read_bytes())
    data[len(data) // 2] ^= 1
    changed.write_bytes(data)
    os.truncate(cut, 10)
    assert life(restores, str(tmp_path), 2, True, world=2) == [(2, ""), (2, "")]
    assert folder.condemned() == [3, 4]
    ours, theirs = life(restores, str(tmp_path), 2, True, 1, world=2)
    assert theirs == (-1, "StorageError: it is on fire")
    assert ours[1] == (
        "NotAgreed: step 2 in storage cannot be restored by all ranks: rank 1: it is on fire"
    )
    assert folder.condemned() == [3, 4]


def restores_last(folder: str) -> tuple[int, list[str]]:
    """Rank 0 looks once rank 1 has found a fault. The step, and what is said of it on a rank."""
    faults, object_ = Folder.faults, RankExchange.abort_agreement

    def faults_last(*args: Any) -> Iterator[CheckpointFault]:
        dist.barrier()
        return faults(*args)

    def object_first(*args: Any) -> str:
        stands = object_(*args)
        dist.barrier()
        return stands

    if dist.get_rank() == 0:
        Folder.faults = faults_last
    else:
        RankExchange.abort_agreement = object_first
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        found, _ = restores(folder, 99, True)
    return found, [str(one.message) for one in said if "spoiled" in str(one.message)]


def test_what_is_said_of_a_spoiled_checkpoint_is_what_was_found(tmp_path: Path) -> None:
    """However late rank 0, which says it, looks itself."""
    folder = Folder(str(tmp_path))
    life(two_steps, str(tmp_path), world=2)
    add_manifest(folder, 2)
    with open(f"{folder.path(2)}/__1_0.distcp", "r+b") as changed:
        changed.write(b"other")
    ours, theirs = life(restores_last, str(tmp_path), world=2)
    found = "__1_0.distcp was changed between bytes 0 and "
    assert (ours[0], theirs) == (0, (0, []))
    (said,) = ours[1]
    assert f"step 2 in {folder.url} is spoiled: {found}" in said
    assert said.endswith("; it will not be used again")
    assert Path(f"{folder.path(2)}/elasticrun.bad").read_text().startswith(found)


def test_a_rank_whose_agent_gives_it_nothing_says_so_itself(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("ELASTICRUN_PROGRESS", "anywhere")
    ckpt = Checkpointer(tmp_path, state={"x": torch.zeros(4)})
    with pytest.warns(UserWarning, match="the agent has given this process no address"):
        ckpt.step(1)
    ckpt.close()


def train_until_killed(folder: str) -> None:
    """Every element of the state is the step; nothing but snapshots is done."""
    torch.set_num_threads(1)
    state = {f"t{i}": torch.zeros(1 << 18) for i in range(16)}
    ckpt = Checkpointer(folder, state=state, rng=False, **USUAL)
    step = ckpt.restore()
    for tensor in state.values():
        assert torch.all(tensor == step), "a torn state was restored"
    while True:
        step += 1
        for tensor in state.values():
            tensor.fill_(step)
        ckpt.step(step)


@pytest.mark.parametrize("times", cases([4, 40], kept=[4]))
def test_a_death_at_any_moment_leaves_the_step_before_whole(tmp_path: Path, times: int) -> None:
    """So many times, and on until one was in the middle of a copy; each life goes on from the one
    before."""
    moments = random.Random(5)
    torn = 0
    with playing() as agent:
        for number in count(1):
            if number > times and torn:
                break
            seen = len(agent.of(Committed))
            ranks = Ranks(train_until_killed, str(tmp_path), world=1, places=[agent.place(0)])
            agent.until(Committed, seen + 3)
            time.sleep(moments.uniform(0.0, 0.05))  # the moment is what is tested
            ranks.close()
            mapped = MappedSegment(os.dup(agent.current[0].fd))
            layout = mapped.segment.layout()
            snapshots = mapped.segment.snapshots()
            assert snapshots, "no whole snapshot was left"
            torn += len(snapshots) < mapped.segment.slots
            for snapshot in snapshots:
                for tensor in mapped.tensors(snapshot.slot, layout):
                    assert torch.all(tensor == snapshot.step)
            known = agent.of(Committed)[-1].step
            assert snapshots[-1].step in (known, known + 1)  # it may have died before it said so
            newest = snapshots[-1]
            committed = Committed(newest.step, newest.slot, newest.sequence, False)
            agent.held[str(number), newest.step, 0] = (agent.current[0], committed)
            agent.next_life(newest.step, 1, number + 1)
            mapped.close()
        assert not agent.of(Remark)


def with_options(folder: str, keep: int) -> str:
    rank = int(os.environ["RANK"])
    options = {"keep": Keep(last=keep + rank), "every_steps": 1 + rank}
    ckpt = Checkpointer(folder, state={"x": torch.zeros(2)}, **options)
    try:
        ckpt.restore()
    except ConflictError as error:
        return str(error)
    return ""


def test_ranks_with_other_options_than_rank_0_are_refused(tmp_path: Path) -> None:
    first, second = life(with_options, str(tmp_path), 3, world=2)
    assert first == ""
    assert second.startswith(
        "the Checkpointers of ranks 1 and 0 differ: every=2 and 1, "
        "keep=Keep(last=4, every=0) and Keep(last=3, every=0). Give all ranks"
    )
