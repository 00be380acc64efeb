"""Variables that torch reads while it is imported, set by the script before and after that import.

The first lines print and write: a rank that starts itself anew must not do that twice.
"""

import os

with open(os.path.join(os.environ["FIDELITY_OUT"], f"lines-{os.environ['RANK']}"), "a") as file:
    file.write("first line\n")
print("the first line", flush=True)

import witness

os.environ["PYTORCH_JIT"] = "0"
os.environ["OMP_NUM_THREADS"] = "3"
os.environ["FIDELITY_SETTING"] = "mine"
witness.look("before")
import torch

witness.say("jit", torch.jit._state._enabled.enabled)
witness.look("torch")
os.environ["TORCH_ALLOW_TF32_CUBLAS_OVERRIDE"] = "1"  # too late for torch, here and there
os.environ["TORCH_LOGS"] = "+dynamo"
torch.manual_seed(1)
witness.generators("seeded", "torch", "torch seed")
with open(file.name) as lines:
    witness.say("lines", lines.read().count("\n") - witness.LIFE)
witness.say("tf32", torch.backends.cuda.matmul.allow_tf32)
witness.look("end")
witness.end()
