"""--preload: what is refused and why, and what is stale; what C code reads of the environment.

getenv is interposed by a small library that is compiled here: without a C compiler nobody sees the
reads.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from elasticrun.forkserver.renew import NUMPYS, read_by_c
from elasticrun.wire.spawning import Execed, Notice, Stale
from tests import planted
from tests.forkserver.driver import LIMIT, Driver, forking, plain_environment, script
from tests.further import cases, further

pytestmark = pytest.mark.slow

USE = """
import sys, json, time
before = "pre" in sys.modules
t = time.perf_counter()
import pre
json.dump([before, pre.value], open(sys.argv[1], "w"))
"""


@pytest.fixture
def package() -> Iterator[Path]:
    """An installed module, which tests may write to."""
    with planted.written() as place:
        yield place


NAME = planted.NAME
SCRIPT = USE.replace("pre", NAME)


def test_a_preloaded_module_is_there_when_it_is_imported(tmp_path: Path, package: Path) -> None:
    out = tmp_path / "out"
    count = tmp_path / "count"
    package.write_text(f"value = 1\nopen({str(count)!r}, 'a').write('x')\n")
    entry = script(tmp_path / "s.py", SCRIPT, str(out))
    with forking(entry, preload=[NAME], cold=True) as driver:
        for _ in range(2):
            assert driver.run(entry).code == 0
            assert json.loads(out.read_text()) == [False, 1]
        assert driver.all_of(Notice) == []
    assert count.read_text() == "x"


def spoils(text: str, word: str, *, soaked: bool = False) -> Any:
    """`soaked`: a torch that does it is refused by the same look (`test_trust`), in less time."""
    return pytest.param(text, word, marks=[pytest.mark.soak] if soaked else [], id=word)


THREAD = "import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()\n"
SPOILT_CUDA = "import torch\ntorch.cuda._is_in_bad_fork = lambda: True\n"


@pytest.mark.parametrize(
    ("text", "word"),
    [
        spoils("import os\nrank = os.environ.get('RANK')\n", "reads RANK"),
        spoils(THREAD, "outlast a fork", soaked=True),
        spoils("import sys\nsys.path.append('/nowhere')\n", "changed sys.path", soaked=True),
        spoils(SPOILT_CUDA, "torch.cuda", soaked=True),
        spoils("raise RuntimeError('no licence')\n", "no licence"),
    ],
)
def test_what_must_not_be_shared_is_refused(
    tmp_path: Path, package: Path, text: str, word: str
) -> None:
    out = tmp_path / "out"
    package.write_text(f"{text}\nvalue = 2\n".replace("raise", "if True: raise"))
    entry = script(tmp_path / "s.py", f"import sys\nsys.exit('{NAME}' in sys.modules)\n", str(out))
    with forking(entry, preload=[NAME, "sqlite3"]) as driver:
        notice = driver.wait(Notice).text
        assert notice.startswith(f"{NAME} is not preloaded: ")
        assert word in notice
        if "RANK" in word:
            assert str(package) in notice
        assert driver.run(entry).code == 0


@pytest.mark.parametrize("name", cases(["beside", "no_such_module_anywhere"], kept=["beside"]))
def test_only_installed_packages_are_preloaded(tmp_path: Path, name: str) -> None:
    (tmp_path / "beside.py").write_text("value = 1\n")
    entry = script(tmp_path / "s.py", "")
    environ = plain_environment(PYTHONPATH=str(tmp_path))
    with forking(entry, env=environ, preload=[name]) as driver:
        text = driver.wait(Notice).text
        assert text.startswith(f"{name} is not preloaded: ")
        assert ("not an installed package" in text) or ("no installed package has" in text)


def test_a_changed_file_is_run_as_it_is_now(tmp_path: Path, package: Path) -> None:
    out = tmp_path / "out"
    entry = script(tmp_path / "s.py", SCRIPT, str(out))
    with forking(entry, preload=[NAME]) as driver:
        assert driver.run(entry).code == 0
        package.write_text("value = 22\n")
        os.utime(package, ns=(1, 1))
        key = driver.start(entry)
        stale = driver.wait(Stale)
        assert str(package) in stale.reason
        assert not driver.spawned(key).forked
        assert driver.exited(key).code == 0
        assert json.loads(out.read_text()) == [False, 22]


@further("test_what_must_not_be_shared_is_refused")
def test_the_environment_of_a_preloaded_library_is_compared(tmp_path: Path) -> None:
    pytest.importorskip("huggingface_hub")
    entry = script(
        tmp_path / "s.py",
        "import os\nos.environ['HF_HOME'] = '/scratch/hf'\nimport huggingface_hub.constants\n",
    )
    environ = plain_environment()
    environ.pop("HF_HOME", None)
    with Driver(entry, env=environ, preload=["huggingface_hub.constants"]) as driver:
        assert "HF_HOME" in driver.ready().reason
    hidden = entry.target.replace("s.py", "t.py")
    text = Path(entry.target).read_text().replace("'HF_HOME'", "'HF_' + 'HOME'")
    entry = script(Path(hidden), text)
    with forking(entry, env=environ, preload=["huggingface_hub.constants"]) as driver:
        key = driver.start(entry)
        assert "HF_HOME" in driver.wait(Notice).text
        assert driver.wait(Execed).key == key


def test_a_submodule_of_torch_that_was_preloaded_stays_hidden(tmp_path: Path) -> None:
    entry = script(
        tmp_path / "s.py",
        "import sys, torch\nassert 'torch.utils.tensorboard' not in sys.modules\n"
        "assert 'torch.distributions.normal' in sys.modules\n"
        "assert 'torch.utils.benchmark' not in sys.modules\n"
        "import torch.utils.benchmark\nassert 'torch.utils.benchmark' in sys.modules\n",
    )
    with forking(entry, preload=["torch.utils.benchmark"]) as driver:
        assert driver.run(entry).code == 0


def test_a_part_of_a_preloaded_module_may_be_imported_before_it(tmp_path: Path) -> None:
    """The part comes from the same import, so it is no reason for exec."""
    text = """
    import torch, sys
    import torch.distributed.tensor
    assert "torch.distributed.checkpoint" not in sys.modules
    import torch.distributed.checkpoint
    assert sys.modules["torch.distributed.tensor"] is torch.distributed.tensor
    """
    entry = script(tmp_path / "s.py", textwrap.dedent(text))
    with forking(entry, preload=["torch.distributed.checkpoint"]) as driver:
        assert driver.run(entry).code == 0
        assert driver.all_of(Notice) == []


def test_the_package_above_a_preloaded_module_brings_all_that_its_import_loaded(
    tmp_path: Path, package: Path
) -> None:
    """Among it a submodule of torch, whose code must not run a second time (TORCH_LIBRARY)."""
    (tmp_path / "trainer.py").write_text("import torch.utils.mkldnn as other\nother.once = 1\n")
    package.write_text(f"__path__ = [{str(tmp_path)!r}]\n")
    entry = script(
        tmp_path / "s.py",
        f"import torch, {NAME}\nimport torch.utils.mkldnn as other\nassert other.once\n",
    )
    with forking(entry, preload=[f"{NAME}.trainer"]) as driver:
        assert driver.run(entry).code == 0


# ---------------------------------------------------------------- what C code reads

SHIM = r"""
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>
extern char **environ;
static char *lookup(const char *name) {
    size_t length = strlen(name);
    for (char **each = environ; each && *each; each++)
        if (!strncmp(*each, name, length) && (*each)[length] == '=') return *each + length + 1;
    return 0;
}
static char *seen(const char *name) {
    char *path = lookup("SHIM_OUT"), line[300];
    int fd = path ? open(path, O_WRONLY | O_APPEND | O_CREAT, 0600) : -1;
    if (fd >= 0) {
        int size = snprintf(line, sizeof line, "%s\n", name);
        if (write(fd, line, size) < 0) _exit(9);
        close(fd);
    }
    return lookup(name);
}
char *getenv(const char *name) { return seen(name); }
char *secure_getenv(const char *name) { return seen(name); }
"""


def names_read_by(shim: Path, code: str, out: Path) -> set[str]:
    environ = plain_environment(LD_PRELOAD=str(shim), SHIM_OUT=str(out))
    subprocess.run([sys.executable, "-c", code], env=environ, check=True, timeout=LIMIT)
    return set(out.read_text().split("\n")) - {""}


def test_what_c_code_reads_is_known_by_the_beginnings_of_names(tmp_path: Path) -> None:
    """Of the installed torch and numpy. To be run for each torch that is promised."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler to interpose getenv with")
    source, shim = tmp_path / "shim.c", tmp_path / "shim.so"
    source.write_text(SHIM)
    subprocess.run([compiler, "-shared", "-fPIC", "-o", shim, source], check=True, timeout=LIMIT)
    plain = names_read_by(shim, "import ctypes", tmp_path / "plain")
    numpys = names_read_by(shim, "import numpy", tmp_path / "numpy") - plain
    torchs = names_read_by(shim, "import torch", tmp_path / "torch") - plain
    assert "OMP_PROC_BIND" in torchs, "the interposer sees nothing"
    unknown = [name for name in numpys if not read_by_c(name, NUMPYS)]
    unknown += [name for name in torchs if not read_by_c(name) and name not in OF_NO_INTEREST]
    assert unknown == [], "FAMILIES is stale: these are read at import and not compared"


OF_NO_INTEREST = ("bar", "LD_PRELOAD", *os.environ)
"""What a library of CUDA's asks for to see whether getenv works; what Python asks for by itself."""
