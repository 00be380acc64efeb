"""Imported by a .pth file."""

import os
import sys

os.environ["FIDELITY_PTH"] = f"{os.environ.get('RANK')} {os.environ.get('OMP_NUM_THREADS')}"
pid = os.getpid()


def hook(kind, value, trace):
    sys.__excepthook__(kind, value, trace)


sys.excepthook = hook
