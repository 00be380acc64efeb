"""What a script does between two imports, and what imports do to the process.

Run as `-m trainer.imports --debug`, with the packages of ../../packages installed.
"""

import witness

witness.look("before")
witness.generators("before")

import logging
import os
import random
import sys
import threading

random.seed(11)
os.environ["FIDELITY_EARLY"] = "set before torch"
import numpy as np

np.random.seed(11)
witness.generators("numpy", "random", "numpy")
import torch
import torch.nn.functional as F

witness.look("torch")
witness.generators("torch", "random", "numpy")
witness.identities()
witness.say("names", [__spec__.name, __package__, __name__, os.path.basename(__file__)])

torch.manual_seed(11)
witness.generators("seeded", "random", "numpy", "torch", "torch seed")
witness.say("dropout before", [F.dropout.__module__, F.dropout(torch.ones(16), 0.5).tolist()])
from . import local  # it seeds

witness.generators("local", "random", "numpy", "torch", "torch seed")

# ---- what the script has set is seen by the packages that it imports afterwards


class Logger(logging.Logger):
    pass


def stub(*arguments, **more):
    return arguments[0]


original = {"dropout": F.dropout, "compile": torch.compile}
logging.setLoggerClass(Logger)
sys.modules["fidelity_optional"] = None  # as if it were not installed
F.dropout = torch.compile = stub
torch.set_default_dtype(torch.float64)
torch.set_grad_enabled(False)
os.environ["FIDELITY_SETTING"] = "set before the import"
import fidelity_looks as looks

torch.set_grad_enabled(True)
torch.set_default_dtype(torch.float32)
F.dropout, torch.compile = original["dropout"], original["compile"]
witness.generators("looked", "random", "numpy", "torch", "torch seed")
witness.say("looked: stubs", [looks.OPTIONAL, looks.DROPOUT is stub, looks.COMPILE is stub])
witness.say("looked: logger", type(looks.LOGGER).__name__)
witness.say("looked: settings", [looks.VARIABLE, looks.DTYPE, looks.GRAD, looks.DRAWN])
witness.say("looked: main", [looks.ARGV, looks.MAIN, looks.MAIN_FILE, looks.PATH])
witness.say("looked: thread", [looks.MAIN_THREAD, looks.frames(), looks.once() == os.getpid()])

# ---- a folder in front of the installed packages

sys.path.insert(
    0, os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "vendor")
)
import fidelity_patches

witness.say("vendored", [fidelity_patches.WHERE, F.dropout.__module__])
del sys.path[0], sys.modules["fidelity_patches"]
import fidelity_patches  # the installed one

witness.say("installed", [fidelity_patches.WHERE, F.dropout.__module__])
witness.look("looked")

# ---- what a package does to the process happens in this process, at its import

logging.basicConfig(level=logging.INFO, format="script %(message)s")
import fidelity_effects as effects

witness.look("effects")
witness.generators("effects", "random", "numpy", "torch", "torch seed")
variables = [os.environ.get(f"FIDELITY_{name}") for name in ("NEW", "CHANGED", "REMOVED", "EARLY")]
witness.say("effects: variables", variables)
witness.say("effects: process", [os.getpid() == effects.PID, effects.MAIN_THREAD])
witness.say("effects: stdout", effects.STDOUT is sys.__stdout__)
witness.say("effects: context", effects.VARIABLE.get("missing"))
witness.say("effects: loop", [effects.LOOP.is_closed(), os.path.isdir(effects.FOLDER)])
for name in ("RUN", "FOLDER", "RANDOM"):
    witness.unique(f"effects: {name}", getattr(effects, name))
import fidelity_effects.torchy

witness.look("torchy")
witness.generators("torchy", "random", "numpy", "torch", "torch seed")

# ---- and modules of torch that come late bring nothing with them

np.random.seed(12)
torch.manual_seed(12)
import torch.utils.data.distributed

torch.save({}, os.devnull)
torch.get_default_device()
witness.generators("late", "random", "numpy", "torch", "torch seed")
model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Dropout(0.5), torch.nn.Linear(4, 1))
for _ in range(5):
    loss = model(torch.rand(2, 4) + np.random.rand() + random.random()).pow(2).mean()
    loss.backward()
    witness.loss(loss, "imports")
    with torch.no_grad():
        for weight in model.parameters():
            weight -= 0.1 * weight.grad
            weight.grad = None
witness.weights(model, "imports")
witness.look("steps")
thread = threading.Thread(target=lambda: witness.say("thread", threading.current_thread().name))
thread.start()
thread.join()
witness.end()
