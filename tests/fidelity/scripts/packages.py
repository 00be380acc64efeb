"""Imports packages one after the other and looks at the process after each."""

import importlib
import sys

import witness

witness.look("before")
import torch

torch.manual_seed(1)
for name in sys.argv[1:]:
    try:
        importlib.import_module(name)
    except Exception as error:  # to be the same under torchrun
        witness.say(f"{name} failed", f"{type(error).__name__}: {error}")
    witness.look(name)
    witness.generators(f"{name}: imported", "torch", "torch seed")
witness.identities()
witness.end()
