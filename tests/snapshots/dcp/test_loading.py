"""Bytes of elsewhere become plain values, and nothing runs that they name."""

from __future__ import annotations

import collections
import datetime
import os
import pathlib
import pickle
import random
import sys
import types
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorProperties

from elasticrun.snapshots.dcp.items import serialise
from elasticrun.snapshots.dcp.loading import NotAllowed, deserialise, read_metadata
from elasticrun.training import Checkpointer
from elasticrun.training.checkpointing.parts import StateError
from elasticrun.training.checkpointing.restore_choice import UnreadableError

pytestmark = pytest.mark.filterwarnings("ignore")


class Evil:
    """Runs something when it is unpickled."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.trace),)


class Place:
    def __init__(self, seen: int = 0) -> None:
        self.seen = seen


def test_plain_values_of_all_kinds_are_loaded() -> None:
    values: list[Any] = [
        *(b"a\xff", "b", 1, 1.5, None, True, 1j, float("inf"), (1, ("2",)), [[1], {"x": {2}}]),
        *(frozenset([1]), range(3), bytearray(b"x"), collections.Counter("aab")),
        *(
            collections.OrderedDict(a=1),
            datetime.datetime(2026, 1, 2, tzinfo=datetime.UTC),
            datetime.timedelta(1),
        ),
        *(np.float64(1.5), np.int64(3), np.bool_(True), random.getstate(), torch.float32),
        *(torch.Size([1, 2]), torch.device("cpu")),
    ]
    for value in values:
        found = deserialise(serialise(value))
        assert found == value
        assert type(found) is type(value)
    kept = np.random.get_state()
    assert all(map(np.array_equal, deserialise(serialise(kept)), kept))
    assert torch.equal(deserialise(serialise(torch.eye(3).to_sparse())).to_dense(), torch.eye(3))
    assert not any(getattr(one, "__module__", "") == "numpy" for one in _allowed_by_torch())


def _allowed_by_torch() -> list[Any]:
    return torch.serialization.get_safe_globals()


def test_what_needs_more_is_refused_unless_it_was_asked_for(tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    with pytest.raises(NotAllowed, match=r"seen has a \S*mkdir, which .*add_safe_globals"):
        deserialise(serialise(Evil(trace)), name="seen")
    assert not trace.exists()
    with pytest.raises(NotAllowed, match=r"has a \S*Place, which"):
        deserialise(serialise(Place(3)))
    assert deserialise(serialise(Place(3)), weights_only=False).seen == 3
    before = _allowed_by_torch()
    torch.serialization.add_safe_globals([Place])
    try:
        assert deserialise(serialise(Place(4))).seen == 4
        assert set(_allowed_by_torch()) == {*before, Place}
    finally:
        torch.serialization.clear_safe_globals()
        torch.serialization.add_safe_globals(before)


def checkpoint(folder: Path, value: Any) -> None:
    """One that torch alone has written, in the place of step 3."""
    state = {"state": {"x": torch.ones(2), "seen": value}}
    dcp.save(state, checkpoint_id=str(folder / "step-000000003"), no_dist=True)


def test_a_checkpoint_that_names_a_function_is_not_loaded_and_stays(tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    checkpoint(tmp_path, Evil(trace))
    state = {"x": torch.zeros(2), "seen": 0}
    with pytest.raises(UnreadableError, match=r"is not loaded: state\.seen has a \S*mkdir"):
        Checkpointer(tmp_path, state=state).restore()
    assert not trace.exists()
    assert state["seen"] == 0
    assert not list(tmp_path.glob("*/elasticrun.bad"))


def test_a_marker_that_names_a_function_is_not_loaded(tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    checkpoint(tmp_path, 7)
    folder = tmp_path / "step-000000003"
    reader = FileSystemReader(folder)
    expected = reader.read_metadata()
    assert read_metadata(reader, True) == expected == reader.read_metadata()
    (folder / ".metadata").write_bytes(pickle.dumps(Evil(trace)))
    state = {"x": torch.zeros(2), "seen": 0}
    with pytest.raises(UnreadableError, match=r"is not loaded: \.metadata has a posix\.mkdir"):
        Checkpointer(tmp_path, state=state).restore()
    assert not trace.exists()
    assert not (folder / "elasticrun.bad").exists()


class OtherPath:
    """How Python 3.13 pickles a PosixPath."""

    def __reduce__(self) -> Any:
        return type(self), ("/elsewhere",)


class OtherArray:
    """How numpy 1 pickles an array."""

    def __reduce__(self) -> Any:
        _, args, state = np.arange(3).__reduce__()
        return sys.modules["numpy.core.multiarray"]._reconstruct, args, state


def _reconstruct() -> None: ...


@contextmanager
def other_versions() -> Iterator[None]:
    """Pickles are made as Python 3.13, numpy 1 and torch 2.15 make them."""
    old: Any = TensorProperties.__getstate__
    with pytest.MonkeyPatch.context() as patch:
        named: tuple[tuple[Any, str, str], ...] = (
            (OtherPath, "pathlib._local", "PosixPath"),
            (_reconstruct, "numpy.core.multiarray", "_reconstruct"),
        )
        for one, module, name in named:
            made: Any = types.ModuleType(module)
            setattr(made, name, one)
            patch.setitem(sys.modules, module, made)
            one.__module__, one.__qualname__ = module, name
        more: Any = lambda it: (*old(it)[:5], (1,))  # noqa: E731
        patch.setattr(TensorProperties, "__getstate__", more)
        yield


@pytest.mark.parametrize("weights_only", [True, False])
def test_a_checkpoint_of_a_newer_python_and_torch_is_restored(
    weights_only: bool, tmp_path: Path
) -> None:
    checkpoint(tmp_path, 7)
    folder = tmp_path / "step-000000003"
    metadata: Any = FileSystemReader(folder).read_metadata()
    properties = metadata.state_dict_metadata["state.x"].properties
    metadata.storage_meta.checkpoint_id = OtherPath()
    with other_versions():
        (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    state: dict[str, Any] = {"x": torch.zeros(2), "seen": 0}
    assert Checkpointer(tmp_path, state=state, weights_only=weights_only).restore() == 3
    assert state["seen"] == 7
    assert torch.equal(state["x"], torch.ones(2))
    found = read_metadata(FileSystemReader(folder), weights_only)
    assert found.storage_meta.checkpoint_id == pathlib.PosixPath("/elsewhere")
    assert found.state_dict_metadata["state.x"].properties == properties


@pytest.mark.parametrize("weights_only", [True, False])
def test_values_of_other_versions_are_loaded(weights_only: bool) -> None:
    with other_versions():
        path, array = serialise(OtherPath()), serialise(OtherArray())
    assert np.array_equal(deserialise(array, weights_only), np.arange(3))
    before = _allowed_by_torch()
    torch.serialization.add_safe_globals([pathlib.PosixPath])
    try:
        assert deserialise(path, weights_only) == pathlib.PosixPath("/elsewhere")
    finally:
        torch.serialization.clear_safe_globals()
        torch.serialization.add_safe_globals(before)


@pytest.mark.parametrize("name", ["os", "sys.modules", "dataclass", "field"])
def test_what_a_module_of_torch_has_imported_is_not_allowed(name: str, tmp_path: Path) -> None:
    module = "torch.distributed.checkpoint.metadata"
    (tmp_path / ".metadata").write_bytes(b"\x80\x04c" + f"{module}\n{name}\n".encode() + b".")
    with pytest.raises(NotAllowed):
        read_metadata(FileSystemReader(tmp_path), True)


def test_state_that_could_not_be_loaded_again_is_refused_before_training(tmp_path: Path) -> None:
    state: dict[str, Any] = {"place": Place()}
    with pytest.raises(StateError, match=r"state\.place has a \S+Place, which"):
        Checkpointer(tmp_path, state=state).restore()
    with warnings.catch_warnings():
        ckpt = Checkpointer(tmp_path, state=state, persist_every_steps=1, weights_only=False)
        assert ckpt.restore() == 0
        state["place"].seen = 5
        ckpt.step(1)
        ckpt.close()
        again: dict[str, Any] = {"place": Place()}
        assert Checkpointer(tmp_path, state=again, weights_only=False).restore() == 1
    assert again["place"].seen == 5
    late: dict[str, Any] = {"x": 1}
    ckpt = Checkpointer(tmp_path / "late", state=late, persist_every_steps=1)
    ckpt.step(1)
    late["x"] = Place()
    ckpt.step(2)
    assert ckpt.stats.failed == 1
    assert "state.x has a" in ckpt.stats.error
    ckpt.close()
