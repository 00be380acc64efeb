"""Which line is the user's, and which ranks stand at the same place."""

from __future__ import annotations

import queue
import sysconfig
import threading

import pytest

import elasticrun
from elasticrun.agent.sight.stacks import Frame, group_stacks, place_of
from elasticrun.wire import messages as m

TORCH = "/venv/lib/python3.11/site-packages/torch"
WAIT: list[Frame] = [
    (f"{TORCH}/distributed/distributed_c10d.py", 3004, "all_reduce"),
    (f"{TORCH}/distributed/c10d_logger.py", 83, "wrapper"),
]
STEP: list[Frame] = [("/home/u/train.py", 131, "step"), ("/home/u/train.py", 9, "<module>")]
CALLER: list[Frame] = [
    ("<frozen runpy>", 88, "_run_code"),
    (f"{elasticrun.__path__[0]}/forkserver/child.py", 70, "run"),
]
QUEUE: Frame = (queue.__file__, 171, "get")
THREAD: Frame = (threading.__file__, 1002, "_bootstrap")


@pytest.mark.parametrize(
    ("frames", "place", "library"),
    [
        ([*WAIT, *STEP, *CALLER], "train.py:131 step", "torch.distributed"),
        ([QUEUE, *STEP], "train.py:131 step", "queue"),
        (
            [
                (f"{TORCH}/storage.py", 5, "write"),
                (f"{TORCH}/serialization.py", 5, "save"),
                (f"{TORCH}/utils/_contextlib.py", 5, "decorate_context"),
                *STEP,
            ],
            "train.py:131 step",
            "torch.serialization",
        ),
        (
            [
                (f"{TORCH}/_inductor/codecache.py", 5, "compile"),
                (f"{TORCH}/_dynamo/eval_frame.py", 5, "__call__"),
                (f"{TORCH}/nn/modules/module.py", 5, "_call_impl"),
                *STEP,
            ],
            "train.py:131 step",
            "torch._dynamo",
        ),
        (
            [(f"{TORCH}/distributed/distributed_c10d.py", 5, "init_process_group"), *STEP],
            "train.py:131 step",
            "torch.distributed.init_process_group",
        ),
        ([("<string>", 3, "<module>")], "<string>:3 <module>", ""),
        ([("/home/u/data/__init__.py", 3, "load")], "data/__init__.py:3 load", ""),
        (
            [QUEUE, ("/v/site-packages/corp/loop.py", 7, "fit"), ("<frozen runpy>", 8, "_run")],
            "corp.loop fit",
            "queue",
        ),
        ([QUEUE, THREAD], "", ""),
        (CALLER, "", ""),
        ([], "", ""),
    ],
)
def test_place(frames: list[Frame], place: str, library: str) -> None:
    assert place_of(frames) == (place, library)


def test_the_standard_library_is_nobodys_own() -> None:
    path = sysconfig.get_path("stdlib")
    assert place_of([(f"{path}/json/decoder.py", 3, "decode"), *STEP])[1] == "json.decoder"


def test_groups_say_who_is_where() -> None:
    odd: list[Frame] = [("/data/u/data.py", 40, "__next__"), ("/data/u/train.py", 88, "load")]
    by_rank: dict[int, dict[str, list[Frame]]] = {
        rank: {
            "MainThread": [("<frozen x>", rank, "inside")] * rank + [*WAIT, *STEP, *CALLER],
            "QueueFeederThread": [QUEUE, THREAD],
            f"reader-{rank}": [("/home/u/read.py", 5, "read"), THREAD],
        }
        for rank in range(6)
    }
    by_rank[3]["MainThread"] = odd
    groups = group_stacks(by_rank)
    assert [(g.ranks, g.count, g.thread) for g in groups] == [
        ("3", 1, ""),
        ("0-2,4-5", 5, ""),
        ("0-5", 6, "reader-*"),
    ]
    assert groups[0].text == "data.py:40 __next__\ntrain.py:88 load"
    assert groups[1].text == (
        "torch.distributed.distributed_c10d all_reduce\ntrain.py:131 step\ntrain.py:9 <module>"
    )
    elsewhere = group_stacks({7: {"": [*WAIT, *STEP, *CALLER]}})
    assert elsewhere[0].key == groups[1].key


def test_what_is_told_is_bounded() -> None:
    deep = [(f"/u/{i}\n{'x' * 900}.py", i, "f" * 900) for i in range(300)]
    groups = group_stacks({rank: {"": deep[rank:]} for rank in range(200)})
    assert len(groups) == m.MAX_STACKS
    assert all(len(group.text) <= 4096 for group in groups)
    many = {rank * rank: {"": [*WAIT, *STEP, *CALLER]} for rank in range(2000)}
    assert len(group_stacks(many)[0].ranks) <= 1024
