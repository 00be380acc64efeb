"""Imports packages one after the other and looks at the process after each. torch is imported
first, unless it is one of them."""

import importlib
import sys

import witness

witness.look("before")
SEEDED = () if "torch" in sys.argv else ("torch", "torch seed")
if SEEDED:
    import torch

    torch.manual_seed(1)
for name in sys.argv[1:]:
    try:
        importlib.import_module(name)
    except Exception as error:  # to be the same under torchrun
        witness.say(f"{name} failed", f"{type(error).__name__}: {error}")
    witness.look(name)
    if "torch" in sys.modules:
        witness.generators(f"{name}: imported", *SEEDED)
witness.identities()
witness.end()
