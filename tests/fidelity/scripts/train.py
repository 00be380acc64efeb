"""Trains one part of `parts` after the other: `train.py [--late] ddp compiled ...`.

Without `--late` all parts are imported before the first seed, else each one after its seeds.

A guarded script, as `multiprocessing` wants: a spawned loader worker runs this file again.
"""

if __name__ == "__main__":
    import witness

    witness.look("before")

    import importlib
    import random
    import sys

    import torch
    import torch.distributed as dist

    witness.generators("torch")
    late = "--late" in sys.argv
    names = [word for word in sys.argv[1:] if word != "--late"]
    parts = {} if late else {name: importlib.import_module(f"parts.{name}") for name in names}

    def seed(number):
        import numpy as np

        random.seed(number)
        np.random.seed(number)
        torch.manual_seed(number)

    seed(2)
    dist.init_process_group("gloo")
    witness.generators("process group", *witness.ALL)
    witness.look("imports")
    witness.identities()
    for number, name in enumerate(names):
        seed(3 + number)
        part = parts.get(name) or importlib.import_module(f"parts.{name}")
        witness.generators(f"{name}: imported", *witness.ALL)
        part.run(name)
        witness.generators(f"{name}: end", *witness.ALL)
        witness.look(name)
    if dist.is_initialized():
        dist.destroy_process_group()
    witness.end()
