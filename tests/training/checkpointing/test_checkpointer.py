"""A Checkpointer in this process, and an agent that the test plays."""

from __future__ import annotations

import os
import re
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict

from elasticrun.core.rounds.failures import cut
from elasticrun.snapshots.dcp.items import pieces
from elasticrun.snapshots.storage.writing import StorageError
from elasticrun.training import Checkpointer, Keep, progress
from elasticrun.training.checkpointing.agent_connection import ConflictError
from elasticrun.training.checkpointing.memory.mapped import MappedSegment
from elasticrun.training.checkpointing.parts import StateError
from elasticrun.training.checkpointing.state import TrainingState
from elasticrun.wire import snapshots as s
from tests.training.checkpointing.played import PlayedAgent
from tests.training.checkpointing.ranks import USUAL

New = Callable[..., Checkpointer]


class Training:
    """A small one whose every number follows from the step."""

    def __init__(self, new: New, seed: int = 0, **options: Any) -> None:
        torch.manual_seed(seed)
        self.model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 2))
        self.optim = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.sched = torch.optim.lr_scheduler.MultiStepLR(self.optim, [2, 4])
        self.progress: dict[str, Any] = {"seen": 0, "by": {"x": torch.zeros(3)}, "none": {}}
        self.loader = {"at": 0}
        self.ckpt = new(
            model=self.model,
            optim=self.optim,
            sched=self.sched,
            progress=self.progress,
            **{**USUAL, **options},
        )
        self.ckpt.per_rank("loader", self.loader)

    def run(self, first: int, last: int) -> None:
        for step in range(first, last):
            data = torch.Generator().manual_seed(step)
            self.model(torch.randn(4, 8, generator=data)).square().sum().backward()
            self.optim.step()
            self.sched.step()
            self.optim.zero_grad()
            self.progress["seen"] += 4
            self.progress["by"]["x"] += 1
            self.loader["at"] = step + 1
            self.ckpt.step(step + 1)

    def all(self) -> list[Any]:
        """Every number of it, for comparison."""
        tensors = [*self.model.state_dict().values(), self.progress["by"]["x"]]
        for entries in self.optim.state.values():
            tensors += entries.values()
        groups = [{k: v for k, v in g.items() if k != "params"} for g in self.optim.param_groups]
        plain = [groups, self.sched.state_dict(), self.progress["seen"], self.loader]
        return [[t.tolist() for t in tensors], plain, sorted(self.progress)]


def test_all_of_a_training_comes_back_and_goes_on_bit_by_bit(agent: PlayedAgent, new: New) -> None:
    one = Training(new)
    assert one.ckpt.restore() == 0
    one.run(0, 5)
    assert one.ckpt.stats.snapshots == 5
    agent.next_life(5, 1)
    other = Training(new, seed=1)
    inner = other.progress["by"]
    weights = [p.data_ptr() for p in other.model.parameters()]
    assert other.ckpt.restore() == 5
    assert other.all() == one.all()
    assert [p.data_ptr() for p in other.model.parameters()] == weights
    assert other.progress["by"] is inner
    assert type(other.sched.milestones) is type(one.sched.milestones)
    one.ckpt.close()
    other.run(5, 9)
    alone = Training(new, every_steps=1 << 40)
    alone.run(0, 9)
    assert other.all() == alone.all()
    assert agent.of(s.Restored)[1] == s.Restored(5, "memory")
    assert other.ckpt.stats.skipped == 0


def test_a_snapshot_changes_no_optimizer_without_state(agent: PlayedAgent, new: New) -> None:
    """torch's own get_optimizer_state_dict makes a step of it, and Adam counts that."""
    one = Training(new)
    one.ckpt.save_now(1)
    assert not one.optim.state
    one.run(1, 4)
    layouts = [m.layout for m in agent.of(s.NeedSegment)]
    assert len(layouts) == len(set(layouts)) == 2
    never = Training(new, every_steps=1 << 40)
    never.run(1, 4)
    assert one.all() == never.all()
    agent.next_life(4, 1)
    other = Training(new, seed=1)
    assert other.ckpt.restore() == 4
    assert other.all() == one.all()


def test_a_restore_to_before_the_first_step_of_the_optimizer(agent: PlayedAgent, new: New) -> None:
    one = Training(new)
    one.ckpt.save_now(1)
    agent.next_life(1, 1)
    other = Training(new, seed=1)
    other.model(torch.ones(4, 8)).sum().backward()
    other.optim.step()
    assert other.ckpt.restore() == 1
    assert not other.optim.state


def test_names_are_those_of_torchs_own_state_dicts(new: New) -> None:
    training = Training(new)
    training.model(torch.ones(4, 8)).sum().backward()
    training.optim.step()
    state = TrainingState({"model": training.model, "optim": training.optim}, 0)
    theirs = {
        "model": get_model_state_dict(training.model),
        "optim": get_optimizer_state_dict(training.model, training.optim),
    }
    mine = {one.item.fqn: one for one in state.take().pieces}
    wanted = {one.item.fqn: one for one in pieces(theirs)}
    assert mine.keys() == wanted.keys()
    buffers = {f"model.{name}" for name, _ in training.model.named_buffers()}
    for fqn, one in wanted.items():
        assert mine[fqn].item == one.item._replace(buffer=fqn in buffers)
        same = mine[fqn].value == one.value
        assert bool(same.all()) if isinstance(same, torch.Tensor) else same


def test_objects_in_state_are_parts_by_their_keys(agent: PlayedAgent, new: New) -> None:
    """Beside plain values, and saved as if each were given by its name."""

    def made(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(seed)
        model = nn.Linear(4, 4)
        optim = torch.optim.Adam(model.parameters())
        model(torch.ones(2, 4)).sum().backward()
        optim.step()
        return model, optim

    (model, optim), (second, other) = made(1), made(2)
    state = {"m": model, "optim": optim, "tokens": 7, "seen": {"a": 1}}
    one = new(state=state, every_steps=1, persist_every_seconds=None)
    one.restore()
    state["late"] = torch.ones(2)
    one.step(1)
    names = {piece.item.fqn for piece in one._state.take().pieces}
    by_name = TrainingState({"m": model, "optim": optim, "state": {"tokens": 7}}, 0)
    assert {piece.item.fqn for piece in by_name.take().pieces} < names
    agent.next_life(1, 1)
    after: dict[str, Any] = {"m": second, "optim": other, "tokens": 0, "seen": {}, "gone": 1}
    two = new(state=after, every_steps=1, persist_every_seconds=None)
    assert two.restore() == 1
    one.close()
    assert torch.equal(second.weight, model.weight)
    assert str(other.state_dict()) == str(optim.state_dict())
    assert after["m"] is second
    rest = {key: after[key] for key in after if key not in ("m", "optim", "late")}
    assert rest == {"tokens": 7, "seen": {"a": 1}}
    assert torch.equal(after["late"], torch.ones(2))
    after["m"] = nn.Linear(1, 1)
    with pytest.raises(StateError, match="is no longer the Linear that it was when"):
        two._state.take()


def test_the_plan_is_kept_until_something_is_replaced() -> None:
    model = nn.Linear(3, 3)
    state = TrainingState({"model": model, "loose": {"a": 1, "t": torch.zeros(2)}}, 0)
    plan = state.take()
    assert state.take() is plan
    with torch.no_grad():
        model.weight.data = torch.ones(3, 3)
    again = state.take()
    assert again is not plan
    assert torch.equal(again.tensors[0], torch.ones(3, 3))
    model.extra = nn.Parameter(torch.zeros(1))
    assert len(state.take().tensors) == len(again.tensors) + 1


def test_no_slot_is_overwritten_before_a_newer_step_is_whole(agent: PlayedAgent, new: New) -> None:
    agent.watermark = False
    one = Training(new, on_busy="skip")
    one.run(0, 4)
    assert (one.ckpt.stats.snapshots, one.ckpt.stats.skipped) == (2, 2)
    assert [m.step for m in agent.until(s.Committed, 2)] == [1, 2]
    agent.current[0].segment.watermark = 2
    one.run(4, 5)
    assert one.ckpt.stats.snapshots == 3


def test_what_is_written_out_is_pinned_and_never_in_the_way(
    agent: PlayedAgent, tmp_path: Path, new: New
) -> None:
    agent.watermark = False
    one = Training(new, persist_every_steps=2, slots=3)
    one.run(0, 2)
    first, second = agent.until(s.Committed, 2)
    assert (first.persist, second.persist) == (False, True)
    segment = agent.current[0].segment
    assert [segment.pinned(slot) for slot in range(3)].count(True) == 1
    assert segment.pinned(second.slot)
    assert one.ckpt.stats.persists == 1
    here = agent.of(s.RankHere)[0]
    assert (here.folder, here.keep_last, here.keep_every) == (str(tmp_path), 3, 0)


def test_values_that_grow_out_of_their_room_get_more(agent: PlayedAgent, new: New) -> None:
    notes: dict[str, Any] = {"text": "a"}
    ckpt = new(notes=notes, every_steps=1, strict_save=True)
    ckpt.step(1)
    notes["text"] = "b" * 300_000
    ckpt.step(2)
    assert len(agent.of(s.NeedSegment)) == 2
    agent.next_life(2, 1)
    found: dict[str, Any] = {}
    other = new(notes=found, every_steps=1, strict_save=True)
    assert other.restore() == 2
    assert found == notes
    other.step(3)
    assert len({m.layout for m in agent.of(s.NeedSegment)}) == 2  # the room of before


def test_a_failed_save_is_told_and_training_goes_on(agent: PlayedAgent, new: New) -> None:
    agent.no_segment = "there are 3 GiB in /dev/shm and 4 are needed"
    one = Training(new, strict_save=False)
    one.run(0, 3)
    assert one.ckpt.stats.failed == 3
    assert len(agent.of(s.NeedSegment)) == 1  # it is not asked again for what was refused
    failed = agent.until(s.SaveFailed, 3)
    assert [(one.step, "3 GiB" in one.reason) for one in failed] == [
        (1, True),
        (2, True),
        (3, True),
    ]
    assert agent.of(s.Remark) == [], "the master names all ranks in one line"


def test_strict_save_raises(agent: PlayedAgent, new: New) -> None:
    agent.no_segment = "there is no room"
    one = Training(new)
    with pytest.raises(StateError, match="there is no room"):
        one.run(0, 1)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("strict", [False, True])
def test_a_save_that_torch_fails_at_ends_nothing(tmp_path: Path, strict: bool) -> None:
    """Without an agent; torch raises what is no Exception."""
    folder = tmp_path / "ckpt"
    folder.write_text("in the way")
    ckpt = Checkpointer(folder, n={"x": 1}, persist_every_steps=1, strict_save=strict)
    for step in (1, 2):
        if strict:
            with pytest.raises(StorageError, match=f"checkpoint of step {step} was not written"):
                ckpt.step(step)
        else:
            ckpt.step(step)
    assert ckpt.stats.failed == 2
    ckpt.close()
    folder.unlink()
    ckpt.step(3)
    assert (folder / "step-000000003" / ".metadata").exists()


def test_an_agent_that_hangs_up_does_not_end_training(agent: PlayedAgent, new: New) -> None:
    one = Training(new, strict_save=False)
    one.run(0, 2)
    agent.until(s.Committed, 2)
    agent.close()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        one.run(2, 6)
    assert one.ckpt.stats.failed == 1
    assert any("no more snapshots" in str(one.message) for one in said)


def test_steps_that_begin_anew_are_told_once(agent: PlayedAgent, new: New) -> None:
    """One epoch after the other, say, each counted from 0."""
    ckpt = new(n={"x": 1}, every_steps=4, strict_save=True)
    for step in [*range(1, 6), 5, *range(4), *range(9)]:
        ckpt.step(step)
    (said,) = agent.until(s.Remark)
    assert "count steps over the whole training, not per epoch" in said.text
    assert ckpt.stats.snapshots == 2


def test_an_unhealthy_step_is_left_out(agent: PlayedAgent, new: New) -> None:
    ckpt = new(n={"x": 1}, every_steps=1)
    ckpt.step(1)
    ckpt.step(2, healthy=False)
    ckpt.step(3)
    assert [m.step for m in agent.until(s.Committed, 2)] == [1, 3]


def test_a_shard_that_is_not_whole_is_said_and_ends_the_rank(agent: PlayedAgent, new: New) -> None:
    one = Training(new)
    one.run(0, 3)
    agent.next_life(3, 1)
    agent.unwhole = {0}
    other = Training(new, seed=1)
    with pytest.raises(RuntimeError, match="a byte was flipped"):
        other.ckpt.restore()
    assert agent.of(s.CannotRestore) == [s.CannotRestore(0, "a byte was flipped")]


def test_a_script_that_has_changed_is_told_what_is_missing(agent: PlayedAgent, new: New) -> None:
    ckpt = new(model=nn.Linear(2, 2), every_steps=1, strict_save=True)
    ckpt.step(1)
    agent.next_life(1, 1)
    for changed, words in (
        (nn.Linear(2, 3), r"model.(weight|bias) was saved with shape"),
        (nn.Sequential(nn.Linear(2, 2)), r"model.0.weight is not in what was saved"),
    ):
        other = new(model=changed, every_steps=1)
        before = [p.clone() for p in changed.parameters()]
        with pytest.raises(RuntimeError, match=words):
            other.restore()
        assert all(map(torch.equal, before, changed.parameters()))
        other.close()


def test_a_tensor_by_its_name_and_what_was_not_saved(agent: PlayedAgent, new: New) -> None:
    tensor = torch.arange(4.0)
    ckpt = new(t=tensor, every_steps=1, strict_save=True)
    ckpt.step(1)
    agent.next_life(1, 1)
    target, late = torch.zeros(4), {"fresh": 1}
    other = new(t=target, late=late, every_steps=1)
    assert other.restore() == 1
    assert torch.equal(target, tensor)
    assert late == {"fresh": 1}
    assert "late was not saved" in agent.until(s.Remark)[0].text


def test_a_slot_holds_what_torch_would_have_written(agent: PlayedAgent, new: New) -> None:
    one = Training(new)
    one.run(0, 2)
    agent.until(s.Committed, 2)
    mapped = MappedSegment(os.dup(agent.current[0].fd))
    layout = mapped.segment.layout()
    newest = mapped.segment.snapshots()[-1]
    weights = {f"model.{k}": v for k, v in one.model.state_dict().items()}
    names = [item.fqn for item in layout.tensors]
    found = dict(zip(names, mapped.tensors(newest.slot, layout), strict=True))
    assert weights.keys() <= found.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in weights.items())


@pytest.mark.parametrize("number", [-1, 1.5, 2**53, None])
def test_what_is_no_step_is_refused(agent: PlayedAgent, new: New, number: Any) -> None:
    ckpt = new(n={"x": 1}, every_steps=1, persist_every_seconds=None)
    for call in (ckpt.step, ckpt.save_now):
        with pytest.raises(ValueError, match=r"is not a step: steps are whole numbers from 0"):
            call(number)
    ckpt.step(torch.tensor(3))
    assert agent.until(s.Committed)[0].step == 3


def test_what_cannot_be_state_is_refused(tmp_path: Path) -> None:
    class FullyShardedDataParallel(nn.Module):
        pass

    class Half:
        def state_dict(self) -> dict[str, Any]:
            return {}

    wrongs: list[tuple[dict[str, Any], str]] = [
        ({"m": FullyShardedDataParallel()}, "fully_shard"),
        ({"__rank0": {"x": 1}}, "cannot be a name"),
        ({"d": {"m": nn.Linear(1, 1)}}, "under its own name"),
        ({"state": {"m": nn.Linear(1, 1)}, "m": {}}, r"and m= is also an argument"),
        ({"state": {1: nn.Linear(1, 1)}}, r"state\[1\] is a Linear: its key must be a string"),
        ({}, "there is no state"),
        ({"half": Half()}, r"half is a Half, which has state_dict\(\) and no load_state_dict"),
        (
            {"m": nn.Linear},
            r"m is the class torch\.nn\.\S+\.Linear, which has no state: pass an obj",
        ),
        (
            {"progress": progress},
            r"progress is the function elasticrun\.\S+\.progress, which has no",
        ),
        ({"f": lambda: 0}, "f is the function .*<lambda>, which has no state"),
        ({"tokens": 7}, r"tokens is 7, a plain value: put it into a dict, as in state=\{\.\.\.\}"),
        (
            {"persit_every": 100},
            r"no option persit_every \(100\): did you mean persist_every_steps\?",
        ),
        ({"evry_seconds": 1.0}, r"did you mean every_seconds\?"),
        ({"onbusy": "wait"}, r"did you mean on_busy\?"),
        ({"kep": Keep()}, r"did you mean keep\?"),
    ]
    for wrong, words in wrongs:
        with pytest.raises(ValueError, match=words):
            Checkpointer(tmp_path, **wrong)
    ckpt = Checkpointer(tmp_path, x={"y": 1})
    for own, words in ((7, "n is 7, a plain value"), (progress, "n is the function")):
        with pytest.raises(ValueError, match=words):
            ckpt.per_rank("n", own)
    with pytest.raises(ValueError, match="on_resize is 3"):
        ckpt.per_rank("n", {}, on_resize=3)


def test_a_folder_that_nobody_names_is_in_the_run_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ELASTICRUN_RUN_FOLDER", raising=False)
    with pytest.raises(ValueError, match="unless the job was started with --run-dir"):
        Checkpointer(x={"y": 1})
    monkeypatch.setenv("ELASTICRUN_RUN_FOLDER", "/runs/a")
    assert Checkpointer(x={"y": 1})._setting.folder.url == "/runs/a/checkpoints"


def test_options_that_cannot_be_are_refused(tmp_path: Path) -> None:
    wrongs: list[tuple[dict[str, Any], str]] = [
        ({"slots": 1}, "slots is 1"),
        ({"on_busy": "panic"}, "on_busy is 'panic'"),
        ({"replicas": 2}, "replicas is 2; it must be 0 or 1"),
        ({"verify": "no"}, "verify is 'no'; it must be True or False"),
        ({"rng": 0}, "rng is 0; it must be True or False"),
        ({"keep": 3}, r"keep is 3; it must be a Keep, as in keep=Keep\(last=3\)"),
        (
            {"every_steps": 10.0},
            "every_steps is 10.0; it must be a whole number above 0; seconds are ev",
        ),
        ({"every_steps": 0}, "every_steps is 0; it must be a whole number above 0$"),
        ({"every_steps": True}, "every_steps is True"),
        ({"every_seconds": "often"}, "every_seconds is 'often'; it must be a number above 0"),
        ({"persist_every_seconds": 0}, "persist_every_seconds is 0; it must be a number above 0"),
        ({"persist_every_steps": 5, "persist_every_seconds": 5}, "give one of persist_every_steps"),
        ({"every": 5}, r"no option every \(5\): did you mean every_steps or every_seconds\?"),
        (
            {"persist_every": None},
            r"no option persist_every \(None\): did you mean persist_every_st",
        ),
    ]
    for wrong, words in wrongs:
        with pytest.raises(ValueError, match=words):
            Checkpointer(tmp_path, x={"y": 1}, **wrong)
    with pytest.raises(ValueError, match="last=-1"):
        Keep(last=-1)
    with pytest.raises(TypeError, match="positional"):
        Checkpointer(tmp_path, x={"y": 1}).step(1, 0.25)


def test_steps_and_seconds_are_two_options(tmp_path: Path) -> None:
    paces: list[tuple[dict[str, Any], tuple[Any, Any]]] = [
        ({}, ("auto", 1800.0)),
        ({"every_steps": 10, "persist_every_seconds": 60}, (10, 60.0)),
        ({"every_seconds": 10, "persist_every_steps": 60}, (10.0, 60)),
        ({"persist_every_seconds": None}, ("auto", None)),
    ]
    for options, expected in paces:
        ckpt = Checkpointer(tmp_path, x={"y": 1}, **options)
        assert (ckpt._every, ckpt._persist_every) == expected
        assert [type(one) for one in (ckpt._every, ckpt._persist_every)] == [*map(type, expected)]


@pytest.mark.parametrize(
    ("given", "keys"),
    [
        ({"state": {5: 1, "5": 2}}, ("state[5]", "state['5']")),
        ({"state": {"a.b": 1, "a": {"b": 2}}}, ("state['a.b']", "state['a']['b']")),
        ({"state": {"a": [{"b": 1}], "a.0.b": 2}}, ("state['a'][0]['b']", "state['a.0.b']")),
        ({"a": {"b.c": 1}, "a.b": {"c": 2}}, ("a['b.c']", "a.b['c']")),
        ({"m": nn.Linear(1, 1), "m.weight": {0: 1}, "m.weight.0": {}}, ()),
        ({"m": nn.Linear(1, 1), "m.weight": torch.ones(1)}, ("m['weight']", "m.weight")),
    ],
)
def test_two_values_with_one_name_are_refused_before_training(
    given: dict[str, Any], keys: tuple[str, ...], tmp_path: Path
) -> None:
    """torch names only the flat name, at every snapshot again."""

    def made() -> Checkpointer:
        return Checkpointer(tmp_path, **given, persist_every_steps=1)

    calls: list[Callable[[], object]] = [made().restore, lambda: made().step(1)]
    for call in calls:
        if not keys:
            call()
            continue
        with pytest.raises(StateError) as refused:
            call()
        assert str(refused.value).startswith(f"{keys[0]} and {keys[1]} would both be saved under")
    assert len(list(tmp_path.iterdir())) == (0 if keys else 1)


@pytest.mark.parametrize("before", ["", "simplecache::", "dir::"])
def test_storage_that_ends_with_its_process_is_refused(before: str, tmp_path: Path) -> None:
    url = f"{before}memory://{tmp_path}"
    with pytest.raises(ValueError, match=f"checkpoints cannot be stored in {re.escape(url)}: "):
        Checkpointer(url, state={"a": 1})
    with pytest.raises(ValueError, match="blockcache caches files on each node"):
        Checkpointer(f"blockcache::file://{tmp_path}", state={"a": 1})
    Checkpointer(f"dir::file://{tmp_path}", state={"a": 1})


@pytest.mark.parametrize("name", ["file", "file/below"])
def test_storage_that_cannot_be_read_is_one_sentence(
    agent: PlayedAgent, tmp_path: Path, name: str
) -> None:
    """Without the frames that led to it, and without the error of the system that it tells of."""
    (tmp_path / "file").write_text("")
    ckpt = Checkpointer(tmp_path / name, state={"a": torch.zeros(1)}, **USUAL)
    with pytest.raises(StorageError, match=f"{name} was not listed: Not a directory") as raised:
        ckpt.restore()
    shown = traceback.format_exception(raised.value)
    assert len(shown) == 1 + 2 + 1, "the heading, two frames, the sentence"


def test_a_rank_has_one_state(agent: PlayedAgent, tmp_path: Path) -> None:
    """What memory holds of a rank is restored as a whole, by whichever Checkpointer asks first."""
    a, b = torch.zeros(3), torch.zeros(3)

    def made(folder: str, **state: Any) -> Checkpointer:
        return Checkpointer(tmp_path / folder, **state, **USUAL)

    unused = made("a", model=a)
    with pytest.raises(ConflictError, match=r"in .*/a, so there cannot be one of model in .*/b$"):
        made("b", model=b)
    with pytest.raises(ConflictError, match=r"Checkpointer\(folder, ema=\.\.\., model=\.\.\.\): "):
        made("a", ema=b)
    with pytest.raises(ConflictError) as refused:
        made("b", model=b, optim={})
    assert cut(f"ConflictError: {refused.value}").startswith(
        "ConflictError: use one Checkpointer per process: pass all state to it under different "
        "names, as in Checkpointer(folder, model1=..., model2=..., optim=...): this process has"
    )
    with pytest.raises(
        ConflictError, match=r"folder, a=\.\.\., b=\.\.\., c=\.\.\., d=\.\.\., \.\.\.\)"
    ):
        made("b", a=b, b=b, c=b, d=b)
    assert not (tmp_path / "b").exists()
    assert not agent.said
    del unused
    first = made("b", ema=b)
    first.step(1)
    again = made("b", ema=b)
    with pytest.raises(ConflictError, match=r"of the same names in .*/b has replaced this one"):
        first.step(2)
    again.step(2)
    again.close()
    with pytest.raises(ConflictError, match=r"of ema in .*/b, so"):  # memory has that state
        made("a", model=a)
    made("b", ema=b)


def test_without_an_agent_two_states_have_two_folders(tmp_path: Path) -> None:
    made = {
        (folder, name): Checkpointer(tmp_path / folder, **{name: {"x": 1}}, persist_every_steps=1)
        for folder, name in (("a", "m"), ("b", "m"), ("a", "ema"))
    }
    for one in made.values():
        assert one.restore() == 0
    made["a", "m"].step(1)
    made["b", "m"].step(1)
    with pytest.raises(ConflictError, match=r"of m in .*/a, so there cannot be one of ema in"):
        made["a", "ema"].step(1)
    made["a", "m"].close()
    made["a", "ema"].step(2)
    assert [len(list((tmp_path / folder).iterdir())) for folder in "ab"] == [2, 1]
