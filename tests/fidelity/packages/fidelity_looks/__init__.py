"""Looks around while it is imported, as most packages do; scripts/trainer/imports.py says what is
to be seen."""

import functools
import logging
import os
import sys
import threading

import numpy as np
import torch
from torch.nn.functional import dropout

try:
    import fidelity_optional

    OPTIONAL = fidelity_optional.__name__
except ImportError:
    OPTIONAL = "missing"

DROPOUT = dropout
COMPILE = torch.compile
LOGGER = logging.getLogger("fidelity_looks")
VARIABLE = os.environ.get("FIDELITY_SETTING", "none")
ARGV = sys.argv[1:]
MAIN = sys.modules["__main__"].__name__
MAIN_FILE = os.path.basename(getattr(sys.modules["__main__"], "__file__", None) or "")
DTYPE = str(torch.tensor([0.5]).dtype)
GRAD = torch.is_grad_enabled()
DRAWN = [*torch.randn(2).tolist(), np.random.rand()]
PATH = sys.path[0]
MAIN_THREAD = threading.current_thread() is threading.main_thread()

_stack = threading.local()
_stack.frames = []


def frames():
    """Of this thread; the importing thread's are made by the import."""
    return len(_stack.frames)


@functools.cache
def once():
    return os.getpid()


once()
