"""--preload: what is refused and why, what is stale, and what --preload=learn tells.

The table of what C code reads at import is stale when the installed torch reads more. getenv is
interposed by a small library that is compiled here, without a C compiler nobody sees the reads.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import elasticrun
from elasticrun.forkserver.renew import C_READS, C_READS_OF_NO_INTEREST, REREAD
from elasticrun.wire.spawning import Learned, Notice, Stale
from tests import planted
from tests.forkserver.driver import LIMIT, Driver, forking, plain_environment, script, tells
from tests.further import further

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
        spoils("import sys\nsys.path.append('/nowhere')\n", "changed sys.path"),
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


@pytest.mark.parametrize("name", ["beside", "no_such_module_anywhere"])
def test_only_installed_packages_are_preloaded(tmp_path: Path, name: str) -> None:
    (tmp_path / "beside.py").write_text("value = 1\n")
    entry = script(tmp_path / "s.py", "")
    environ = plain_environment(PYTHONPATH=str(tmp_path))
    with forking(entry, env=environ, preload=[name]) as driver:
        text = driver.wait(Notice).text
        assert text.startswith(f"{name} is not preloaded: ")
        assert ("not an installed package" in text) or ("no such module" in text)


IMPORTS = """
import json, os, sys
ran = []
sys.addaudithook(lambda event, args: event == "exec" and ran.append(args[0].co_filename))
import torch
import torch.distributed.checkpoint
torch.optim.SGD(torch.nn.Linear(1, 1).parameters())
import elasticrun.checkpointing.checkpointer
ours = f"elasticrun{os.sep}checkpointing"
found = [name for name in ran if "distributed" in name or "_dynamo" in name or ours in name]
json.dump(found, open(sys.argv[1], "w"))
"""


@pytest.mark.parametrize(
    ("text", "preload", "there"),
    [
        ("from elasticrun.training import Checkpointer", [], True),
        ("checkpointer = None", ["elasticrun.training"], True),
        ("checkpointer = None", [], False),
    ],
)
def test_what_a_checkpointer_needs_is_there_for_a_script_that_names_it(
    tmp_path: Path, text: str, preload: list[str], there: bool
) -> None:
    """Without a word of the user's, or by our name for it; other scripts do not wait for it at
    their start."""
    out = tmp_path / "out"
    entry = script(tmp_path / "s.py", IMPORTS + text + "\n", str(out))
    with forking(entry, preload=preload) as driver:
        assert driver.run(entry).code == 0
        assert (json.loads(out.read_text()) == []) is there
        assert driver.all_of(Notice) == []


OWN = """
# names elasticrun's Checkpointer
import sys
import elasticrun, elasticrun.wire
assert not [name for name in sys.modules if name.startswith(("torch", "elasticrun.checkpointing"))]
import elasticrun.training
assert "torch" not in sys.modules
assert elasticrun.training.__spec__.loader.get_source("elasticrun.training")
from elasticrun.training import Checkpointer
assert "torch" in sys.modules
from elasticrun.wire import env
from elasticrun.shm import segment
assert elasticrun.wire.env is env is sys.modules["elasticrun.wire.env"]
assert not [name for name in sys.modules if name.startswith("elasticrun.forkserver")]
import elasticrun.config
Checkpointer("/nowhere", x={"n": 1}).close()
"""


def test_our_own_modules_come_back_one_by_one(tmp_path: Path) -> None:
    """Fresh ones that the server has not run on; torch with those alone that need it."""
    entry = script(tmp_path / "s.py", OWN)
    with forking(entry) as driver:
        for _ in range(2):
            assert driver.run(entry).code == 0
        assert driver.all_of(Notice) == []


def test_a_script_beside_the_package_it_uses_is_forked(tmp_path: Path) -> None:
    """An editable install, or a checkout in PYTHONPATH."""
    folder = Path(elasticrun.__file__).parent
    (tmp_path / "elasticrun").symlink_to(folder)
    entry = script(tmp_path / "s.py", OWN)
    with forking(entry):
        pass
    (tmp_path / "elasticrun").unlink()
    (tmp_path / "elasticrun").mkdir()
    (tmp_path / "elasticrun" / "__init__.py").touch()
    with Driver(entry, env=plain_environment()) as driver:
        assert "stands in front of the installed elasticrun" in driver.ready().reason


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


def test_learn_tells_what_ranks_import_while_they_run(tmp_path: Path, package: Path) -> None:
    text = (
        f"import sqlite3, psutil, {NAME}\nimport sqlite3.dbapi2\n"
        "try:\n    import no_such_thing\nexcept ImportError:\n    pass\n"
        "import json, time, csv\nsay('on')\nwhile True:\n    time.sleep(0.05)\n"
    )
    with forking(script(tmp_path / "s.py", ""), learn=True) as driver:
        tells(driver, tmp_path, text)
        # A rank that imports slowly is told of in parts, each with all before it.
        wanted = {"psutil", NAME}
        learned = driver.wait(Learned, lambda said: wanted <= set(said.modules)).modules
    assert "no_such_thing" not in learned
    assert not [name for name in learned if name.startswith(("sqlite3", "torch", "json"))]


def test_lightning_is_shared_and_told_its_rank_again(tmp_path: Path) -> None:
    pytest.importorskip("lightning")
    out = tmp_path / "out"
    entry = script(
        tmp_path / "s.py",
        "import sys\nfrom lightning.pytorch.utilities.rank_zero import rank_zero_only\n"
        "from torchmetrics.utilities.prints import rank_zero_only as metrics\n"
        "print(rank_zero_only.rank, metrics.rank, file=open(sys.argv[1], 'w'))\n",
        str(out),
    )
    with forking(entry, preload=["lightning"]) as driver:
        for env, ranks in (({"RANK": "3", "LOCAL_RANK": "1"}, "3 1\n"), ({}, "0 0\n")):
            assert driver.run(entry, env=env, stderr="/dev/null").code == 0
            assert out.read_text() == ranks
        assert driver.all_of(Notice) == []


@further("test_what_must_not_be_shared_is_refused")
def test_the_environment_of_a_preloaded_library_is_compared(tmp_path: Path) -> None:
    pytest.importorskip("huggingface_hub")
    entry = script(
        tmp_path / "s.py",
        "import os\nos.environ['HF_HOME'] = '/scratch/hf'\nimport huggingface_hub.constants\n",
    )
    environ = plain_environment()
    environ.pop("HF_HOME", None)
    with forking(entry, env=environ, preload=["huggingface_hub.constants"]) as driver:
        driver.start(entry)
        assert "HF_HOME" in driver.wait(Notice).text


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


def test_the_table_names_all_that_the_installed_torch_reads(tmp_path: Path) -> None:
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler to interpose getenv with")
    source, shim = tmp_path / "shim.c", tmp_path / "shim.so"
    source.write_text(SHIM)
    subprocess.run([compiler, "-shared", "-fPIC", "-o", shim, source], check=True, timeout=LIMIT)
    plain = names_read_by(shim, "import ctypes", tmp_path / "plain")
    read = names_read_by(shim, "import torch", tmp_path / "torch") - plain
    assert "OMP_PROC_BIND" in read, "the interposer sees nothing"
    known = set().union(*C_READS.values(), os.environ.keys() & {"LD_PRELOAD"}) | REREAD.keys()
    new = {name for name in read - known if not name.startswith(C_READS_OF_NO_INTEREST)}
    assert new == set(), "C_READS is stale: these are read at import and not compared"
