"""The samples of a step are the same at every world size, and each is used once in an epoch."""

from __future__ import annotations

from collections import Counter
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st
from torch.utils.data import DataLoader, TensorDataset

from elasticrun.training import Checkpointer, ElasticBatchSampler


def samplers(world_size: int, samples: int = 100, **options: Any) -> list[ElasticBatchSampler]:
    """Those of all ranks."""
    return [
        ElasticBatchSampler(samples, place=(rank, world_size), **options)
        for rank in range(world_size)
    ]


def used(ranks: list[ElasticBatchSampler], start: int, stop: int) -> list[Counter[int]]:
    """For each step, how often each sample is used, with a weight above 0."""
    passes = []
    for sampler in ranks:
        sampler.set_step(start)
        passes.append(iter(sampler))
    found = []
    for step in range(start, stop):
        count: Counter[int] = Counter()
        for sampler, batches in zip(ranks, passes, strict=True):
            for weight in sampler.weights(step):
                batch = next(batches)
                assert batch  # a loader cannot collate an empty batch
                if weight:
                    count.update(batch)
        found.append(count)
    return found


WORLDS = st.integers(1, 9)
SIZES: dict[str, Any] = {
    "samples": st.integers(1, 60),
    "global_batch": st.integers(1, 20),
    "micro_batch": st.none() | st.integers(1, 8),
    "shuffle": st.booleans(),
    "seed": st.integers(-(2**40), 2**70),
}


@given(world_size=WORLDS, other=WORLDS, **SIZES)
def test_each_sample_once_in_an_epoch_and_the_same_steps_in_every_world(
    world_size: int, other: int, **options: Any
) -> None:
    ranks = samplers(world_size, total_steps=10**6, **options)
    each = ranks[0].steps_per_epoch
    steps = used(ranks, 0, 2 * each)
    for epoch in (steps[:each], steps[each:]):
        assert sum(epoch, Counter()) == Counter(range(options["samples"]))
    again = used(samplers(other, total_steps=10**6, **options), each, 2 * each)
    assert again == steps[each:]


@given(world_size=WORLDS, **SIZES)
def test_weighted_means_of_ranks_are_the_mean_of_the_global_batch(
    world_size: int, **options: Any
) -> None:
    """DDP averages over ranks what each has added up over its micro-batches."""
    ranks = samplers(world_size, **options)
    counts = {len(sampler.weights(0)) for sampler in ranks}
    assert counts == {ranks[0].accumulation}
    found = 0.0
    for sampler in ranks:
        for weight, batch in zip(sampler.weights(0), sampler, strict=False):
            assert len(batch) <= (options["micro_batch"] or 20)
            found += weight * sum(batch) / len(batch) / world_size
    wanted = ranks[0].global_indices(0)
    assert found == pytest.approx(sum(wanted) / len(wanted))


@given(world_size=WORLDS, total=st.none() | st.integers(0, 90), **SIZES)
def test_the_length_of_a_pass(world_size: int, total: int | None, **options: Any) -> None:
    for sampler in samplers(world_size, total_steps=total, **options):
        length = len(sampler)
        steps = sampler.steps_per_epoch if total is None else total
        each = [len(sampler.weights(step)) for step in range(steps)]
        assert length == len(list(sampler)) == sum(each)
        assert length == len(sampler)
        found = [sampler.batches_until(step) for step in range(len(each) + 1)]
        assert found == [sum(each[:step]) for step in range(len(each) + 1)]


def test_epochs_have_orders_of_their_own() -> None:
    (sampler,) = samplers(1, global_batch=100)
    orders = [sampler.global_indices(epoch) for epoch in range(3)]
    (another,) = samplers(1, global_batch=100, seed=1)
    orders += [another.global_indices(epoch) for epoch in range(3)]
    assert len({tuple(order) for order in orders}) == 6
    (plain,) = samplers(1, global_batch=100, shuffle=False)
    assert plain.global_indices(1) == list(range(100))


def test_the_rest_is_left_out() -> None:
    ranks = samplers(3, global_batch=30, drop_last=True)
    assert ranks[0].steps_per_epoch == 3
    assert [count.total() for count in used(ranks, 0, 3)] == [30, 30, 30]


def test_passes_follow_each_other() -> None:
    (sampler,) = samplers(1, global_batch=40)
    assert [len(batch) for batch in sampler] == [40, 40, 20]
    assert (sampler.step, sampler.epoch) == (3, 1)
    assert len(list(islice(sampler, len(sampler)))) == 3  # as Lightning does: not one more
    assert sampler.step == 6
    sampler.set_step(4)
    sampler.set_epoch(1)  # a framework does it at each epoch, the interrupted one among them
    assert [len(batch) for batch in sampler] == [40, 20]
    sampler.set_epoch(1)
    assert sampler.step == 3


@pytest.mark.parametrize("workers", [0, 2])
def test_a_loader_goes_on_at_the_step(workers: int) -> None:
    """One that reads ahead, over the end of an epoch."""
    data = TensorDataset(torch.arange(50))
    ranks = samplers(2, samples=50, global_batch=12, micro_batch=4, total_steps=13)
    whole = [[b[0].tolist() for b in DataLoader(data, batch_sampler=each)] for each in ranks]
    for sampler, all_batches in zip(ranks, whole, strict=True):
        sampler.set_step(3)
        loader = DataLoader(
            data, batch_sampler=sampler, num_workers=workers, persistent_workers=workers > 0
        )
        first = [b[0].tolist() for b in islice(loader, 4)]
        before = sum(len(sampler.weights(step)) for step in range(3))
        assert first == all_batches[before : before + 4]
        sampler.set_step(3)
        assert [b[0].tolist() for b in loader] == all_batches[before:]


def test_a_state_of_other_data_is_refused() -> None:
    (sampler,) = samplers(1, global_batch=10)
    (same,) = samplers(1, global_batch=10, micro_batch=2)
    same.load_state_dict(sampler.state_dict())
    (other,) = samplers(1, samples=101, global_batch=10, seed=3)
    with pytest.raises(ValueError, match="samples is 101 and was 100, seed is 3 and was 0"):
        other.load_state_dict(sampler.state_dict())


def test_numbers_that_are_not_whole() -> None:
    for options in ({"global_batch": 24.0}, {"global_batch": 8, "seed": None}):
        with pytest.raises(
            TypeError, match=r"(global_batch is 24.0|seed is None); it must be a whole"
        ):
            ElasticBatchSampler(100, **options)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="step is -1"):
        samplers(1, global_batch=8)[0].weights(-1)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"global_batch": 0}, "global_batch is 0; it must be at least 1"),
        ({"global_batch": 8, "micro_batch": 0}, "micro_batch is 0"),
        ({"global_batch": 8, "total_steps": -1}, "total_steps is -1"),
        ({"global_batch": 101, "drop_last": True}, "has no step of 101 samples"),
        ({"global_batch": 8, "place": (2, 2)}, "it must be .rank, world size."),
    ],
)
def test_impossible_numbers(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        ElasticBatchSampler(100, **options)


def test_an_empty_dataset_and_a_stream() -> None:
    with pytest.raises(ValueError, match="a dataset of 0 samples"):
        ElasticBatchSampler([], global_batch=1)
    with pytest.raises(TypeError, match="a generator, has no length"):
        ElasticBatchSampler((i for i in range(3)), global_batch=1)  # type: ignore[arg-type]


def test_a_checkpointer_sets_the_place_at_each_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pass that was broken off goes on behind the last step, however far the loader has read."""
    monkeypatch.delenv("ELASTICRUN_SNAPSHOTS", raising=False)
    (sampler,) = samplers(1, samples=40, global_batch=8)
    loader = DataLoader(TensorDataset(torch.arange(40)), batch_sampler=sampler, num_workers=2)
    ckpt = Checkpointer(tmp_path, sampler=sampler, persist_every_seconds=None)
    with pytest.warns(UserWarning, match="nothing is kept in memory"):
        assert ckpt.restore() == 0
    for step, _ in zip(range(2), loader, strict=False):
        ckpt.step(step + 1)
    assert sampler.step == 2
    assert next(iter(loader))[0].tolist() == sampler.global_indices(2)
    ckpt.close()
