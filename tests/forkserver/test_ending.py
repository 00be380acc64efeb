"""What libraries say when the interpreter ends, of objects that a rank shares with its siblings."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from tests.forkserver.driver import Driver, plain_environment, script

pytestmark = pytest.mark.slow

COUNTED = """
import ctypes, os
from types import ModuleType
from elasticrun.forkserver.renew import prepare_end

def of_nanobind(name, *bases, **more):
    return (more.pop('meta', type))(name, bases, {'__module__': 'nanobind'} | more)

nb_meta = of_nanobind('nb_meta', type)
nb_type_0 = of_nanobind('nb_type_0', type, meta=nb_meta)
nb_func = of_nanobind('nb_func', __init__=lambda self, default: setattr(self, 'default', default))

class Attribute(metaclass=nb_type_0):
    def __del__(self, write=os.write):
        write(1, b'freed ')

class Builder(metaclass=nb_type_0):
    method = nb_func(Attribute())

module = ModuleType('bindings')
module.function = nb_func(Attribute())
prepare_end([module])
for kept in (module, Builder):
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(kept))  # as the fork server keeps what it shares
"""


def test_what_nanobind_counts_is_freed() -> None:
    done = subprocess.run([sys.executable, "-c", COUNTED], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("freed freed ", "")


@pytest.mark.skipif(
    importlib.util.find_spec("triton") is None,
    reason="this torch has no triton, whose bindings are made with nanobind",
)
def test_a_rank_with_triton_ends_without_a_word(tmp_path: Path) -> None:
    entry = script(tmp_path / "s.py", "import torch\n")
    with Driver(entry, env=plain_environment(), preload=["triton"]) as driver:
        assert driver.ready().mode == "fork"
        assert driver.run(entry, stderr=str(tmp_path / "err")).code == 0
    assert (tmp_path / "err").read_text() == ""
