"""Scripts of others, as they are but for the device and sizes, under both launchers, with a rank
killed in the middle: both restart, the script goes on from its own checkpoint and ends alike.

They are read from checkouts that are named by variables (`Example.checkout`); no line of them is
here but those that name a device or a size, and the data that they train on is made up.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import random
import re
import shutil
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import psutil
import pytest

from tests import needs
from tests.harness import ELASTICRUN, TORCHRUN, Launched, World

pytestmark = [pytest.mark.soak, pytest.mark.timeout(1800)]

LIMIT: Final = 400.0
MODULES: Final = {ELASTICRUN: "elasticrun", TORCHRUN: "torch.distributed.run"}
ENVIRONMENT: Final = {
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
}
"""The last one is for torchrun: without it its store is one over all restarts, so that half of them
fail (docs/torchrun.md)."""

Start = Callable[..., Launched]
"""Starts a command line of a launcher in the folder of the example."""


@dataclass(frozen=True)
class Example:
    """`words`: what is typed in `folder` of the checkout that the variable `checkout` names.
    `device`: lines about a GPU or a size, and what they are here. `mark`: what it prints in the
    middle; `back`: what it prints once more when it has gone on; `last`: what it prints at its end,
    `times` times. `prepared`: done once before, in the folder: data, and a checkpoint to begin
    with where the script wants one. `imports`: packages that it needs."""

    checkout: str
    folder: str
    words: tuple[str, ...]
    device: dict[str, str]
    mark: str
    back: str
    last: str
    times: int = 2
    prepared: Callable[[Path, Start], None] | None = None
    imports: tuple[str, ...] = field(default=())


def words_of(folder: Path, lines: int, vocabulary: int) -> str:
    drawn = random.Random(1)
    text = "\n".join(
        " ".join(f"w{drawn.randrange(vocabulary)}" for _ in range(20)) for _ in range(lines)
    )
    folder.mkdir(parents=True, exist_ok=True)
    return text


def nanogpt_first(folder: Path, start: Start) -> None:
    """A short run, the checkpoint of which the second one resumes from."""
    data = folder / "data/shakespeare_char"
    (data / "input.txt").write_text(words_of(data, 1000, 50))
    assert start(sys.executable, str(data / "prepare.py")).wait(LIMIT) == 0
    assert start(*NANOGPT_SIZES, "--init_from=scratch", "--max_iters=20").wait(LIMIT) == 0


def clm_first(folder: Path, start: Start) -> None:
    """A tokenizer, the arguments as a file, and a short run as above."""
    needs.packages("tokenizers", "transformers")
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    (folder / "train.txt").write_text(words_of(folder, 1000, 50))
    vocabulary = {"<unk>": 0, **{f"w{number}": number + 1 for number in range(50)}}
    bare = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    bare.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    whole = PreTrainedTokenizerFast(tokenizer_object=bare, unk_token="<unk>", model_max_length=64)
    whole.save_pretrained(str(folder / "tokenizer"))
    arguments = {
        "model_type": "gpt2",
        "config_overrides": "n_embd=64,n_layer=2,n_head=2,vocab_size=64,"
        "bos_token_id=0,eos_token_id=0",
        "tokenizer_name": "tokenizer", "train_file": "train.txt", "block_size": 32,
        "do_train": True, "output_dir": "out", "use_cpu": True, "ddp_backend": "gloo",
        "per_device_train_batch_size": 4, "save_steps": 20, "logging_steps": 30,
        "report_to": [], "max_steps": 20,
    }  # fmt: skip
    (folder / "first.json").write_text(json.dumps(arguments))
    assert start("run_clm.py", "first.json").wait(LIMIT) == 0
    arguments.update(max_steps=60, resume_from_checkpoint=True)
    (folder / "second.json").write_text(json.dumps(arguments))


def lightning_first(folder: Path, start: Start) -> None:
    """The text that the demo would download."""
    (folder / "data/wikitext-2.txt").write_text(words_of(folder / "data", 8000, 500))


NANOGPT_SIZES: Final = (
    "train.py", "--device=cpu", "--backend=gloo", "--dtype=float32", "--compile=False",
    "--dataset=shakespeare_char", "--eval_iters=2", "--eval_interval=20", "--log_interval=1",
    "--block_size=64", "--batch_size=8", "--gradient_accumulation_steps=2", "--n_layer=2",
    "--n_head=4", "--n_embd=64", "--wandb_log=False",
)  # fmt: skip
EXAMPLES: Final = {
    "ddp": Example(
        "ELASTICRUN_EXAMPLES",
        "distributed/ddp",
        ("example.py", "--local_world_size=2"),
        {
            'backend="nccl"': 'backend="gloo"',
            ".cuda(device_ids[0])": "",
            ".to(device_ids[0])": "",
            "DDP(model, device_ids)": "DDP(model)",
            "    optimizer.step()": '    optimizer.step()\n    print("a step", flush=True)',
        },
        mark="backend=gloo",
        back="backend=gloo",
        last="a step",
    ),
    "ddp-tutorial-series": Example(
        "ELASTICRUN_EXAMPLES",
        "distributed/ddp-tutorial-series",
        ("multigpu_torchrun.py", "60", "3"),
        {
            'backend="nccl"': 'backend="gloo"',
            ".to(self.gpu_id)": '.to("cpu")',
            ", device_ids=[self.gpu_id]": "",
        },
        mark="Epoch 5 |",
        back="Resuming training from snapshot at Epoch",
        last="Epoch 59 |",
    ),
    "FSDP2": Example(
        "ELASTICRUN_EXAMPLES",
        "distributed/FSDP2",
        ("example.py", "--dcp-api"),
        {
            "if not verify_min_gpu_count(min_gpus=_min_gpu_count):": "if False:",
            ", device_id=device)": ')\n    print("the group stands", flush=True)',
            "    torch.distributed.destroy_process_group()": '    print("saved", flush=True)\n'
            "    torch.distributed.destroy_process_group()",
        },
        mark="the group stands",
        back="the group stands",
        last="saved",
    ),
    "nanoGPT": Example(
        "ELASTICRUN_NANOGPT",
        "",
        (*NANOGPT_SIZES, "--init_from=resume", "--max_iters=100"),
        {
            "device = f'cuda:{ddp_local_rank}'": "pass",
            "torch.cuda.set_device(device)": "pass",
            ", device_ids=[ddp_local_rank]": "",
        },
        mark="iter 50:",
        back="step 40: train loss",
        last="iter 100:",
        times=1,
        prepared=nanogpt_first,
        imports=("numpy", "requests"),
    ),
    "run_clm": Example(
        "ELASTICRUN_TRANSFORMERS",
        "examples/pytorch/language-modeling",
        ("run_clm.py", "second.json"),
        {},
        mark="'loss'",
        back="Loading model from out/checkpoint-20",
        last="***** train metrics *****",
        times=1,
        prepared=clm_first,
        imports=("transformers", "accelerate", "datasets", "evaluate"),
    ),
    "lightning": Example(
        "ELASTICRUN_LIGHTNING",
        "examples/pytorch/basics",
        ("transformer.py",),
        {
            "max_epochs=20": 'max_epochs=2, accelerator="cpu", devices=2',
            'self.log("train_loss"': 'print(f"batch {batch_idx}", flush=True)\n'
            '        self.log("train_loss"',
            "    trainer.test(model, test_dataloader)": "    trainer.test(model, test_dataloader)\n"
            '    print("tested", flush=True)',
        },
        mark="batch 5",
        back="batch 5",
        last="tested",
        prepared=lightning_first,
        imports=("lightning", "requests"),
    ),
}


def checkout_of(example: Example) -> Path:
    """Where it lies; skips where none is named."""
    named = os.environ.get(example.checkout)
    if not named:
        pytest.skip(f"{example.checkout} names no checkout; see docs/matrix.md")
    return Path(named)


def copied(example: Example, folder: Path) -> None:
    """The folder for a CPU, without other people's caches and results."""
    unwanted = shutil.ignore_patterns(".git", "__pycache__", "*.bin", "out*")
    shutil.copytree(checkout_of(example) / example.folder, folder, ignore=unwanted)
    script = folder / example.words[0]
    text = script.read_text()
    for theirs, ours in example.device.items():
        assert theirs in text, f"{script} has no {theirs!r}: it is of another version"
        text = text.replace(theirs, ours)
    script.write_text(text)


def signal_rank_1(job: Launched, signum: int) -> None:
    for process in job.below():
        with contextlib.suppress(psutil.Error):
            if process.environ().get("RANK") == "1":
                process.send_signal(signum)
                return
    raise AssertionError("there is no rank 1")


HANGS: Final = {
    "stopped": ("", "", r"hang \(strong\): rank 1 .* is stopped by a signal"),
    "loader": (
        "    ix = torch.randint",
        "    if split == 'train' and iter_num == 50 and ddp and ddp_rank == 1: os.mkfifo('pipe')\n"
        "    if os.path.exists('pipe') and ddp_rank == 1: open('pipe')\n",
        r"hang \(strong\): rank 1 .* is idle at train\.py:\d+ get_batch",
    ),
    "loop": (
        "    t1 = time.time()",
        "    while iter_num == 50 and ddp_rank == 1: pass\n",
        r"hang \(weak\): rank 1 .* is busy at train\.py:\d+ <module>",
    ),
}
"""A line of nanoGPT's train.py, what comes to stand before it, and what is said."""


@pytest.mark.parametrize("fault", HANGS)
def test_a_rank_of_nanogpt_hangs(fault: str, world: World) -> None:
    before, planted, said = HANGS[fault]
    example = EXAMPLES["nanoGPT"]
    device = {**example.device, **({before: planted + before} if before else {})}
    folder = world.scratch / "example"
    copied(dataclasses.replace(example, device=device), folder)
    data = folder / "data/shakespeare_char"
    (data / "input.txt").write_text(words_of(data, 1000, 50))
    prepared = world.command((sys.executable, str(data / "prepare.py")), cwd=folder)
    assert prepared.wait(LIMIT) == 0
    words = (*NANOGPT_SIZES, "--init_from=scratch", "--max_iters=100000")
    head = ("--standalone", "--nproc-per-node=2", "--max-restarts=0", "--on-hang=tell")
    job = world.launch(ELASTICRUN, *head, *words, env=ENVIRONMENT, cwd=folder)
    job.until_text("iter 45:", LIMIT, stream="stdout")
    if fault == "stopped":
        signal_rank_1(job, signal.SIGSTOP)
    told = job.until_text("hang (", LIMIT)
    assert re.search(said, told), told
    job.signal(signal.SIGTERM)
    job.wait()


@pytest.mark.parametrize("launcher", [ELASTICRUN, TORCHRUN])
@pytest.mark.parametrize("name", EXAMPLES)
def test_a_rank_is_killed_in_the_middle(
    name: str, launcher: str, world: World, torchrun_world: World
) -> None:
    example = EXAMPLES[name]
    where = world if launcher == ELASTICRUN else torchrun_world
    folder = where.scratch / "example"
    checkout_of(example)
    needs.packages(*example.imports)
    copied(example, folder)

    def start(*words: str) -> Launched:
        head = [sys.executable, "-m", MODULES[launcher], "--standalone", "--nproc-per-node=2",
                "--max-restarts=3"]  # fmt: skip
        argv = words if words[0] == sys.executable else (*head, *words)
        env = {**ENVIRONMENT, "HF_HOME": str(where.scratch / "hf")}
        return where.command(argv, env=env, cwd=folder)

    if example.prepared is not None:
        example.prepared(folder, start)
    job = start(*example.words)
    job.until_text(example.mark, LIMIT, stream="stdout")
    before = (job.stdout + job.stderr).count(example.back)
    signal_rank_1(job, signal.SIGKILL)
    assert job.wait(LIMIT) == 0, job.stdout[-4000:] + job.stderr[-4000:]
    assert (job.stdout + job.stderr).count(example.back) > before
    assert job.stdout.count(example.last) == example.times, job.stdout[-4000:]
