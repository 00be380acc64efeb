"""Code that the interpreter runs at its start runs in each rank: sitecustomize and a .pth file."""

import witness

witness.look("before")
import os
import sys

for name in ("sitecustomize", "fidelity_pth"):
    witness.say(
        name, [name in sys.modules, getattr(sys.modules.get(name), "pid", 0) == os.getpid()]
    )
witness.say("site", os.environ.get("FIDELITY_SITE"))
witness.say("pth", os.environ.get("FIDELITY_PTH"))
import torch

torch.manual_seed(1)
witness.generators("seeded", "torch", "torch seed")
witness.look("torch")
witness.end()
