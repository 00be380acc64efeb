"""torch.compile with the default backend, where there is a C++ compiler."""

import shutil

from parts import compiled

compiled.BACKENDS.append("inductor")


def run(name):
    assert shutil.which("g++"), "no C++ compiler"
    compiled.run(name)
