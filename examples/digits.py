"""Trains a small convolutional network to read handwritten digits, on any number of ranks.

An ordinary script for torchrun or elasticrun: DDP over gloo, a checkpoint file after each epoch,
and a start from that file if it exists. It prints its progress, one line per fact, and reports its
steps to elasticrun if that is installed; nothing depends on that.

    elasticrun --nproc-per-node=2 examples/digits.py --folder runs/digits
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

try:
    from elasticrun.training import progress
except ImportError:

    def progress(step: int) -> None:
        """No-op without elasticrun."""


TEST_COUNT = 360
"""Images kept out of training, of the 1797 in the data set: every fifth one."""


def digits(folder: Path, rank: int) -> tuple[TensorDataset, TensorDataset]:
    """Training and test images (1 x 8 x 8, from 0 to 1). Rank 0 prepares them once, as a file; all
    ranks must call this."""
    prepared = folder / "digits.pt"
    if rank == 0 and not prepared.exists():
        from sklearn.datasets import load_digits

        data = load_digits()
        images = torch.tensor(data.images, dtype=torch.float32).unsqueeze(1) / 16
        save({"images": images, "labels": torch.tensor(data.target)}, prepared)
    dist.barrier()
    data = torch.load(prepared)
    test = torch.zeros(len(data["labels"]), dtype=torch.bool)
    test[::5] = True
    return tuple(
        TensorDataset(data["images"][part], data["labels"][part]) for part in (~test, test)
    )


def network() -> nn.Module:
    """Two convolutions and a linear layer: 12,000 weights."""
    return nn.Sequential(
        *(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(16, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(64 * 4, 10)),
    )


def print_line(text: str) -> None:
    """Print a line in one write, so that the lines of several ranks do not get mixed."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def save(state: object, path: Path) -> None:
    """Save a state to a file atomically: if the process dies, the file is the old one or the
    complete new one."""
    part = path.with_suffix(".part")
    torch.save(state, part)
    part.replace(path)


def accuracy(model: nn.Module, test: TensorDataset) -> float:
    """The fraction of the test images that the model classifies correctly."""
    images, labels = test.tensors
    model.eval()
    with torch.no_grad():
        right = (model(images).argmax(1) == labels).float().mean()
    model.train()
    return float(right)


def call_barrier_alone(folder: Path) -> None:
    """A common mistake, made here on purpose, once per folder: a collective that only one rank
    calls. It then waits forever."""
    once = folder / "forgot"
    if not once.exists():
        once.touch()
        dist.barrier()


def train(folder: Path, epochs: int, mistake: int) -> None:
    """Train from the checkpoint, if there is one, to the last epoch, then test. `mistake`: the
    epoch after which rank 0 hangs once; 0: none."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    train_set, test_set = digits(folder, rank)
    model = DistributedDataParallel(network())
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    checkpoint, first_epoch = folder / "checkpoint.pt", 0
    if checkpoint.exists():
        state = torch.load(checkpoint)
        model.module.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        first_epoch = state["epochs"]
    life = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    print_line(f"start rank={rank} pid={os.getpid()} life={life} epoch={first_epoch}")

    sampler = DistributedSampler(train_set, shuffle=True, seed=0)
    loader = DataLoader(train_set, batch_size=64 // world_size, sampler=sampler)
    for epoch in range(first_epoch, epochs):
        sampler.set_epoch(epoch)
        total = torch.zeros(1)
        for step, (images, labels) in enumerate(loader):
            loss = nn.functional.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.detach()
            progress(epoch * len(loader) + step)
            if rank == 0 and step == 0 and epoch == first_epoch:
                print_line(f"step life={life} epoch={epoch}")
        dist.all_reduce(total)
        if rank == 0:
            state = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict()}
            save({**state, "epochs": epoch + 1}, checkpoint)
            mean = float(total) / len(loader) / world_size
            print_line(f"epoch number={epoch + 1} of={epochs} loss={mean:.4f}")
            if epoch + 1 == mistake:
                call_barrier_alone(folder)
    dist.barrier()
    if rank == 0:
        print(
            f"done accuracy={accuracy(model.module, test_set):.4f} images={TEST_COUNT}", flush=True
        )


def main() -> None:
    """Read the arguments, join the process group, train."""
    parser = argparse.ArgumentParser(description="Digits on any number of ranks.")
    parser.add_argument("--folder", type=Path, default=Path("runs/digits"))
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument(
        "--mistake", type=int, default=0, help="epoch after which the job hangs once"
    )
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    dist.init_process_group("gloo")
    train(arguments.folder, arguments.epochs, arguments.mistake)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
