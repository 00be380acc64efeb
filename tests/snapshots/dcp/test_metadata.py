"""What the saver commits is read by an untouched torch, at any world size; what is no whole state
is not committed."""

from __future__ import annotations

import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import FileSystemReader

from elasticrun.snapshots.dcp.metadata import MetadataError, PartFile, build
from elasticrun.snapshots.shm.layout import Layout, items_of
from elasticrun.snapshots.storage.folder import Folder
from tests.further import further
from tests.harness import program
from tests.snapshots.dcp.checkpoints import bits, load, same, save
from tests.snapshots.dcp.slots import HandMade, renamed

ROWS = torch.randn(10, 3)
COLUMNS = torch.randn(4, 7)
SCRIPT = Path(__file__).parent / "scripts" / "load_sharded.py"

KINDS = {
    "scalar": torch.tensor(3.5, dtype=torch.float64),
    "empty": torch.zeros(0),
    "no_rows": torch.zeros(0, 5),
    "half": torch.randn(33).half(),
    "brain": torch.randn(5, 1000).bfloat16(),
    "whole": torch.arange(-7, 7),
    "truth": torch.tensor([True, False]),
    "complex": torch.randn(3, dtype=torch.complex64),
    "eight": torch.randn(9).to(torch.float8_e4m3fn),
    "turned": torch.randn(6, 4).t(),
    "strided": torch.arange(20.0)[::3],
    "nan": torch.tensor([float("nan"), -0.0, float("inf")]),
}


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    return Folder(str(tmp_path))


def two_ranks() -> list[HandMade]:
    """DTensor's chunks, uneven ones; a tensor that both have; own state."""
    ranks = []
    for rank, (row, column) in enumerate(((0, 0), (6, 4))):
        rows = ROWS[:6] if rank == 0 else ROWS[6:]
        columns = COLUMNS[:, :4] if rank == 0 else COLUMNS[:, 4:]
        one = HandMade(rank)
        one.chunk("rows", is_=rows, shape=(10, 3), at=(row, 0))
        one.chunk("columns", is_=columns, shape=(4, 7), at=(0, column))
        one.tensor("both", is_=torch.arange(5.0)).value("lr", is_=0.125)
        one.tensor("rng", is_=torch.arange(9) + rank, own=True)
        one.value("loader", "position", is_={"at": rank}, own=True)
        ranks.append(one)
    return ranks


def expected() -> dict[str, torch.Tensor]:
    return {"rows": ROWS, "columns": COLUMNS, "both": torch.arange(5.0)}


@pytest.mark.parametrize("image_problem", ["", "for this test"], ids=["image", "write_data"])
def test_every_kind_of_tensor_is_read_bit_by_bit(folder: Folder, image_problem: str) -> None:
    one = HandMade()
    for name, tensor in KINDS.items():
        one.tensor("model", name, is_=tensor)
    one.value("config", is_={"lr": 0.1, "names": ["a", "b"]})
    save(folder, [one], image_problem=image_problem)
    empty = {name: torch.zeros(t.shape, dtype=t.dtype) for name, t in KINDS.items()}
    found = load(folder.path(7), {"model": empty, "config": None})
    assert same(found["model"], KINDS)
    assert found["config"] == {"lr": 0.1, "names": ["a", "b"]}


@pytest.mark.parametrize("image_problem", ["", "for this test"], ids=["image", "write_data"])
def test_at_one_rank(folder: Folder, image_problem: str) -> None:
    save(folder, two_ranks(), image_problem=image_problem)
    wanted = expected()
    into = {name: torch.zeros_like(t) for name, t in wanted.items()} | {
        "lr": 0.0,
        "__rank0": {"rng": torch.zeros(9, dtype=torch.int64), "loader": {"position": None}},
        "__rank1": {"rng": torch.zeros(9, dtype=torch.int64), "loader": {"position": None}},
    }
    found = load(folder.path(7), into)
    assert same({name: found[name] for name in wanted}, wanted)
    assert found["lr"] == 0.125
    for rank in (0, 1):
        assert bits(found[f"__rank{rank}"]["rng"]) == bits(torch.arange(9) + rank)
        assert found[f"__rank{rank}"]["loader"]["position"] == {"at": rank}


@further(
    "training/checkpointing/test_ranks::test_with_torch_alone_checkpoints_are_plain_and_come_back_at_any_number",
)
@pytest.mark.slow
def test_at_three_ranks(tmp_path: Path) -> None:
    folder = Folder(str(tmp_path / "run"))
    save(folder, two_ranks())
    torch.save(expected(), tmp_path / "expected.pt")
    at, meeting = str(tmp_path / "expected.pt"), str(tmp_path / "meeting")
    done = program(str(SCRIPT), "3", folder.path(7), at, meeting)
    assert done.stdout == "[0, 0, 0]\n", done.stderr


@pytest.mark.slow
@further("test_at_one_rank")
def test_torchs_own_command_makes_one_file_of_it(tmp_path: Path) -> None:
    folder, out = Folder(str(tmp_path / "run")), tmp_path / "out.pt"
    save(folder, two_ranks())
    command = ("-m", "torch.distributed.checkpoint.format_utils", "dcp_to_torch")
    done = program(*command, folder.path(7), str(out))
    assert done.returncode == 0, done.stderr
    found = torch.load(out, weights_only=False)
    wanted = expected()
    assert same({name: found[name] for name in wanted}, wanted)
    assert bits(found["__rank1"]["rng"]) == bits(torch.arange(9) + 1)
    assert found["lr"] == 0.125


def test_a_rank_may_give_its_own_state_alone(folder: Folder) -> None:
    ranks = [
        HandMade(r)
        .tensor("w", is_=torch.arange(3000.0))
        .value("lr", is_=0.5)
        .value("seen", is_=r, own=True)
        .tensor("rng", is_=torch.full((4,), r), own=True)
        for r in range(2)
    ]
    parts = save(folder, ranks, alone=[1])
    assert parts[1].file.size < 8192 < parts[0].file.size
    into = {"w": torch.zeros(3000), "lr": 0, "__rank1": {"rng": torch.zeros(4).long(), "seen": 9}}
    found = load(folder.path(7), into)
    assert same({"w": found["w"]}, {"w": torch.arange(3000.0)})
    assert found["__rank1"]["seen"] == 1
    assert bits(found["__rank1"]["rng"]) == bits(torch.ones(4).long())


def test_paths_with_numbers_and_dots_come_back_as_they_were(folder: Folder) -> None:
    one = (
        HandMade()
        .tensor("opt", "state", "a.b", is_=torch.ones(2))
        .tensor("list", 0, is_=KINDS["nan"])
    )
    save(folder, [one])
    metadata = FileSystemReader(folder.path(7)).read_metadata()
    assert metadata.planner_data == {
        "opt.state.a.b": ("opt", "state", "a.b"),
        "list.0": ("list", 0),
    }
    found = load(
        folder.path(7), {"opt": {"state": {"a.b": torch.zeros(2)}}, "list": [torch.zeros(3)]}
    )
    assert same({"x": found["list"][0]}, {"x": KINDS["nan"]})


def part(rank: int, layout: Layout, shared: bool = True) -> PartFile:
    values = sum(1 for i in items_of(layout, shared) if not i.dtype)
    return PartFile(rank, layout, f"__{rank}_1.1.a.distcp", shared, (10,) * values)


def test_what_is_no_whole_state_is_refused() -> None:
    first, second = (one.layout() for one in two_ranks())
    build([part(0, first), part(1, second)], "/x", "a")
    cases = {
        "invalid fill": [part(0, first)],
        "overlapping chunks": [part(0, first), part(1, renamed(second, "rows", offsets=(5, 0)))],
        "two parts": [part(0, first), part(0, second)],
        "per-rank state of two ranks": [part(0, first), part(1, first)],
        "has 0 lengths": [part(0, first), replace(part(1, second), lengths=())],
        "no type 'float3'": [
            part(0, renamed(first, "both", dtype="float3")),
            part(1, renamed(second, "both", dtype="float3")),
        ],
        "float16 .* for rank 1": [
            part(0, first),
            part(1, renamed(second, "rows", dtype="float16")),
        ],
        "the location of each": [part(0, first), replace(part(1, second), places=((0, 1),))],
    }
    for said, parts in cases.items():
        with pytest.raises(MetadataError, match=said):
            build(parts, "/x", "a")


def meaning(marker: bytes) -> Any:
    return pickle.loads(marker)


def test_a_marker_of_the_same_layouts_is_as_if_made_anew() -> None:
    first, second = (one.layout() for one in two_ranks())
    parts = [part(0, first), part(1, second)]
    later = [replace(one, file=one.file.replace(".1.a.", ".2.b.")) for one in parts]
    longer = [replace(parts[0], lengths=(11, 10)), parts[1]]
    other = [part(0, HandMade().tensor("w", is_=torch.ones(2)).layout())]
    calls: list[tuple[list[PartFile], str, str]] = [
        *((parts, "/x/step-1", "a"), (later, "/x/step-2", "b"), (longer, "/x/step-2", "b")),
        *((parts, "/x/step-1000", "a"), (later, "/x/step-2", "long attempt")),
    ]
    anew = []
    for call in calls:
        build(other, "/x", "a")
        anew.append(meaning(build(*call)))
    for _ in range(2):
        for call, wanted in zip(calls, anew, strict=True):
            assert meaning(build(*call)) == wanted
    assert anew[1].storage_meta.checkpoint_id == "/x/step-2"
    assert {where.relative_path for where in anew[1].storage_data.values()} == {
        *(one.file for one in later)
    }
    assert anew[2].storage_data != anew[0].storage_data


def test_a_name_that_also_stands_elsewhere_is_no_harm() -> None:
    """An item called as the file is: the marker is made anew each time."""
    name = "__0_1.1.a.distcp"
    layout = HandMade().tensor(name, is_=torch.ones(2)).layout()
    build([part(0, layout)], "/x", "a")
    found = meaning(build([replace(part(0, layout), file="__0_1.2.b.distcp")], "/x", "b"))
    ((index, where),) = found.storage_data.items()
    assert (index.fqn, where.relative_path) == (name, "__0_1.2.b.distcp")
