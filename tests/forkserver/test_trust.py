"""When a fork cannot be trusted, ranks are exec'd and the reason is one sentence."""

from __future__ import annotations

import os
import queue
import sys
import zipfile
from pathlib import Path

import pytest

from elasticrun.forkserver import trust
from elasticrun.forkserver.renew import read_by_c
from elasticrun.wire.spawning import SpawnerReady
from elasticrun.wire.types import EntryKind, Entrypoint
from tests.forkserver.driver import Driver, forking, plain_environment, script, started
from tests.further import cases, further

pytestmark = pytest.mark.slow

THREAD = "import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()\n"


def ready_of(entry: Entrypoint, **environ: str) -> SpawnerReady:
    with Driver(entry, env=plain_environment(**environ)) as driver:
        return driver.ready()


def is_execed(entry: Entrypoint, *words: str, **environ: str) -> None:
    """And each of these is named in the reason."""
    ready = ready_of(entry, **environ)
    assert ready.mode == "exec"
    assert [word for word in words if word not in ready.reason] == [], ready.reason


@pytest.mark.parametrize(
    ("name", "value", "word"),
    [
        ("CUDA_INJECTION64_PATH", "/opt/nvidia/libToolsInjection64.so", "nsys"),
        ("ROCP_TOOL_LIB", "librocprofiler.so", "rocprof"),
        ("LD_PRELOAD", "libnsys-none.so", "LD_PRELOAD"),
        ("DEBUGPY_LAUNCHER_PORT", "5678", "debugpy"),
        ("PYTHONINSPECT", "1", "PYTHONINSPECT"),
        ("PYTHONPROFILEIMPORTTIME", "1", "PYTHONPROFILEIMPORTTIME"),
    ],
)
def test_what_follows_exec_alone(tmp_path: Path, name: str, value: str, word: str) -> None:
    entry = script(tmp_path / "s.py", "")
    assert trust.before_import(entry, numa=False, environ=plain_environment()) == ""
    with_it = plain_environment(**{name: value})
    assert word in trust.before_import(entry, numa=False, environ=with_it)


def test_a_server_that_a_tool_follows_starts_ranks_by_exec(tmp_path: Path) -> None:
    entry = script(tmp_path / "s.py", "")
    with Driver(entry, env=plain_environment(LD_PRELOAD="libnsys-none.so")) as driver:
        ready = driver.ready()
        assert ready.mode == "exec"
        assert "LD_PRELOAD" in ready.reason
        assert driver.run(entry).code == 0


SETS = [
    ("import os\nos.environ['OMP_PROC_BIND'] = 'true'\nimport torch\n", "OMP_PROC_BIND"),
    ("import os\nos.environ['PYTORCH_CUDA_ALLOC_CONF'] = f()\n", "PYTORCH_CUDA_ALLOC_CONF"),
    ("import os\nos.environ.update(TORCH_CPP_LOG_LEVEL='INFO')\nimport torch.nn\n", "TORCH_CPP"),
    ("import os\nos.environ.update({'MKL_CBWR': 'AVX2'})\nfrom torch import nn\n", "MKL_CBWR"),
    ("import os\nos.environ.setdefault('MKL_CBWR', 'AVX2')\nimport numpy\n", "MKL_CBWR"),
    ("import os\nos.putenv('GOMP_DEBUG', '1')\n", "GOMP_DEBUG"),
    ("import os\ndel os.environ['OMP_NUM_THREADS']\nimport torch\n", "OMP_NUM_THREADS"),
    ("import os\nos.environ.pop('OMP_NUM_THREADS')\nimport torch\n", "OMP_NUM_THREADS"),
    ("def main():\n    os.environ['OMP_PLACES'] = 'cores'\n    import torch\n", "OMP_PLACES"),
    ("import torch\nos.environ['OMP_PLACES'] = 'cores'\n", ""),
    ("import os\nos.environ['OMP_NUM_THREADS'] = '1'\nimport torch\n", ""),
    ("import os\nos.environ.setdefault('OMP_NUM_THREADS', '8')\nimport torch\n", ""),
    ("import os\nos.environ.pop('OMP_PLACES', None)\nimport torch\n", ""),
    ("os.environ['CUDA_VISIBLE_DEVICES'] = '0'\nos.environ['NCCL_DEBUG'] = 'INFO'\n", ""),
    ("# OMP_PROC_BIND\nprint('OMP_PROC_BIND', d['OMP_PLACES'])\nimport torch\n", ""),
    ("this is no Python: OMP_PLACES", ""),
]
"""A text, and the variable that it sets too late for a forked rank."""


@pytest.mark.parametrize(("text", "name"), SETS)
def test_a_script_that_sets_what_an_import_reads(
    tmp_path: Path, monkeypatch, text: str, name: str
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    entry = script(tmp_path / "s.py", text)
    said = trust.sets_too_late(entry, read_by_c, os.environ)
    assert (name in said, bool(said)) == (True, bool(name))


def test_a_module_that_speaks_of_it(tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "pack").mkdir()
    (tmp_path / "pack" / "__init__.py").touch()
    (tmp_path / "pack" / "run.py").write_text("import os\nos.environ['OMP_PLACES'] = 'cores'\n")
    monkeypatch.chdir(tmp_path)
    is_execed(Entrypoint(EntryKind.MODULE, "pack.run"), "OMP_PLACES")


def test_another_interpreter_is_execed(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\necho wrapped\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    entry = script(tmp_path / "s.py", "print('script')\n")
    with Driver(entry, env=plain_environment(PYTHON_EXEC=str(python))) as driver:
        ready = driver.ready()
        assert ready.mode == "exec"
        assert str(python) in ready.reason
        assert driver.run(entry, stdout=str(tmp_path / "out")).code == 0
    assert (tmp_path / "out").read_text() == "wrapped\nscript\n"


def test_a_thread_that_a_startup_file_began(tmp_path: Path) -> None:
    folder = tmp_path / "path"
    folder.mkdir()
    (folder / "usercustomize.py").write_text(THREAD)
    (folder / "sitecustomize.py").write_text(THREAD)
    is_execed(script(tmp_path / "s.py", ""), "sitecustomize.py runs", PYTHONPATH=str(folder))


CUSTOM = """
import os, sys
def told(*words):
    print("the hook", os.environ["RANK"], file=sys.stderr)
sys.excepthook = told
os.environ["SEEN_RANK"] = os.environ.get("RANK", "none")
"""


def test_a_sitecustomize_runs_in_each_rank_and_its_hook_is_kept(tmp_path: Path) -> None:
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(CUSTOM)
    text = "import os\nprint(os.environ['SEEN_RANK'])\nraise RuntimeError('boom')\n"
    entry = script(tmp_path / "s.py", text)
    out, err = tmp_path / "out", tmp_path / "err"
    with Driver(entry, env=plain_environment(PYTHONPATH=str(tmp_path / "site"))) as driver:
        ready = driver.ready()
        assert "sitecustomize.py runs at each start of Python" in ready.reason
        assert driver.run(entry, env={"RANK": "3"}, stdout=str(out), stderr=str(err)).code == 1
    assert out.read_text() == "3\n"
    assert err.read_text() == "the hook 3\n"


LINES = {
    "import os; var = 'SETUPTOOLS_USE_DISTUTILS'; enabled = os.environ.get(var, 'local') == "
    "'local'; enabled and __import__('_distutils_hack').add_shim();": True,
    "import _virtualenv": True,
    "import __editable___pack_1_0_finder; __editable___pack_1_0_finder.install()": True,
    "import _pack_editable_loader": True,
    "import sys; exec('try: import coverage; coverage.process_startup()\\nexcept: pass')": True,
    "import coverage; coverage.process_startup()": True,
    "import os, sys;exec('if \"COV_CORE_SOURCE\" in os.environ: pass')": True,
    "import sys, types, os;has_mfs = sys.version_info > (3, 5);p = os.path.join(sys._getframe(1)."
    "f_locals['sitedir'], *('google',));m = sys.modules.setdefault('google', types.ModuleType("
    "'google'));mp = (m or []) and m.__dict__.setdefault('__path__',[]);": True,
    "import ddtrace.bootstrap.sitecustomize": False,
    "import os; os.environ['RANK']": False,
}
"""Lines of `.pth` files, and whether they do the same in every process."""


@pytest.mark.parametrize("line", LINES)
def test_lines_of_pth_files(line: str) -> None:
    assert trust._is_inert(line, {}) is LINES[line]


def test_coverage_that_is_on_sees_each_rank() -> None:
    line = "import coverage; coverage.process_startup()"
    assert not trust._is_inert(line, {"COVERAGE_PROCESS_START": "x"})


def test_debians_sitecustomize_is_inert(tmp_path: Path) -> None:
    """And only as Debian has it."""
    file = tmp_path / "sitecustomize.py"
    for text, inert in ((f"# Debian's\n{trust.APPORT}", True), ("", True), ("import os\n", False)):
        file.write_text(text)
        assert trust._is_inert_module(str(file)) is inert


def backend(place: Path, body: str) -> str:
    """An installed torch backend, as a package with an entry point."""
    place.mkdir()
    (place / "fake_npu.py").write_text(body)
    info = place / "fake_npu-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: fake-npu\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[torch.backends]\nfake_npu = fake_npu:start\n")
    return str(place)


def test_an_untested_backend_is_not_loaded_in_the_server(tmp_path: Path) -> None:
    loaded = tmp_path / "loaded"
    body = (
        "import os\ndef start():\n"
        f"    open({str(loaded)!r}, 'a').write(os.environ.get('LOCAL_RANK', 'None') + ' ')\n"
    )
    entry = script(tmp_path / "s.py", "import torch\n")
    folder = backend(tmp_path / "site", body)
    with Driver(entry, env=plain_environment(PYTHONPATH=folder)) as driver:
        ready = driver.ready()
        assert ready.mode == "exec"
        assert "fake_npu" in ready.reason
        assert not loaded.exists()
        assert driver.run(entry, env={"LOCAL_RANK": "1"}).code == 0
    assert loaded.read_text() == "1 "


def fake_torch(place: Path, text: str) -> str:
    """A package named torch in a folder that stands first on the path."""
    (place / "torch").mkdir(parents=True)
    (place / "torch" / "__init__.py").write_text(text)
    return str(place)


SOUND = """
import types
__version__ = "9.9"
version = types.SimpleNamespace(hip=None, xpu=None)
_C = types.SimpleNamespace()
cuda = types.SimpleNamespace(_is_in_bad_fork=lambda: False)
default_generator = types.SimpleNamespace(seed=lambda: 0)
"""


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("cuda._is_in_bad_fork = lambda: True\n", "torch.cuda"),
        ("version.hip = '6.4'\n", "ROCm"),
        ("version.xpu = '2025'\n", "XPU"),
        (THREAD, "threads that outlast a fork"),
        ("import os\nos.environ.get('LOCAL_RANK')\n", "reads LOCAL_RANK"),
        ("raise OSError('libgomp.so.1 is missing')\n", "libgomp.so.1 is missing"),
    ],
)
def test_a_torch_that_spoils_forks(tmp_path: Path, text: str, word: str) -> None:
    folder = fake_torch(tmp_path / "site", SOUND + text)
    is_execed(script(tmp_path / "s.py", ""), word, PYTHONPATH=folder)


KNOWS_FORKS = """
import ctypes, threading
named, last = threading.Event(), threading.Event()
def run():
    ctypes.CDLL(None).prctl(15, b'jemalloc_bg_thd', 0, 0, 0)
    named.set()
    last.wait()
threading.Thread(target=run, daemon=True).start()
named.wait()
"""
"""A thread whose library knows forks: pyarrow's allocator begins one of this name (PR_SET_NAME)."""


@pytest.mark.parametrize("text", ["", KNOWS_FORKS], ids=["the fake itself", "knows forks"])
def test_a_torch_that_does_not_spoil_forks(tmp_path: Path, text: str) -> None:
    folder = fake_torch(tmp_path / "site", SOUND + text)
    ready = ready_of(script(tmp_path / "s.py", ""), PYTHONPATH=folder)
    assert (ready.mode, ready.torch) == ("fork", "9.9"), ready.reason


def test_an_open_device_means_exec(tmp_path: Path) -> None:
    device = tmp_path / "nvidia0"
    device.touch()
    with device.open(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(trust, "DEVICE_FILES", (str(device),))
        assert str(device) in trust.trial()
    assert trust._open_device() == ""


# ---------------------------------------------------------------- the user's own modules


def test_a_torch_folder_in_the_cwd_does_not_disturb(tmp_path: Path, monkeypatch) -> None:
    """The server's path begins with neither the cwd nor our folder."""
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("raise ImportError('the wrong torch')\n")
    (tmp_path / "protocol.py").write_text("raise ImportError('not ours')\n")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    entry = script(tmp_path / "elsewhere" / "s.py", "import torch\ntorch.ones(1)\n")
    with forking(entry) as driver:
        assert driver.run(entry).code == 0


@pytest.mark.parametrize(
    ("module", "found"),
    cases(
        [
            ("numpy", "numpy.py"),
            ("random", "random.py"),
            ("threading", "threading.py"),
            ("queue", "queue/__init__.py"),
        ],
        kept=[("numpy", "numpy.py"), ("queue", "queue/__init__.py")],
        several=True,
    ),
)
def test_a_file_beside_the_script_with_the_name_of_a_loaded_module(
    tmp_path: Path, module: str, found: str
) -> None:
    file = tmp_path / found
    file.parent.mkdir(exist_ok=True)
    file.write_text("mine = True\n")
    entry = script(tmp_path / "s.py", f"import {module}\nassert {module}.mine\n")
    with Driver(entry, env=plain_environment()) as driver:
        ready = driver.ready()
        assert driver.run(entry).code == 0
    assert (ready.mode, str(file) in ready.reason) == ("exec", True), ready.reason


def test_names_that_no_file_can_take(tmp_path: Path) -> None:
    """What every interpreter has imported before it looks beside the script, frozen and built-in
    modules, folders without modules: as in a plain interpreter the file is not seen."""
    for name in ("os.py", "site.py", "itertools.py", "runpy.py", "zipimport.py", "random.txt"):
        (tmp_path / name).write_text("raise ImportError('not this one')\n")
    (tmp_path / "json").mkdir()
    text = "import itertools, json, os, random, runpy, site, zipimport\njson.dumps, random.random\n"
    entry = script(tmp_path / "s.py", text)
    with forking(entry) as driver:
        assert driver.run(entry).code == 0


@further("test_a_file_beside_the_script_with_the_name_of_a_loaded_module")
def test_such_a_file_in_other_first_places(tmp_path: Path, monkeypatch) -> None:
    """In the working directory it counts for `-m` alone; in PYTHONPATH for all, the server's own
    imports included."""
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(tmp_path)
    (tmp_path / "random.py").write_text("mine = True\nfrom _random import *\n")
    plain = script(elsewhere / "s.py", "import random\nassert not hasattr(random, 'mine')\n")
    (tmp_path / "m.py").write_text("import random\nassert random.mine\n")
    for entry, mode, file in (
        (plain, "fork", ""),
        (Entrypoint(EntryKind.MODULE, "m"), "exec", str(tmp_path / "random.py")),
    ):
        with Driver(entry, env=plain_environment()) as driver:
            ready = driver.ready()
            assert (ready.mode, file in ready.reason) == (mode, True), ready.reason
            assert driver.run(entry).code == 0


def test_an_archive_is_executed(tmp_path: Path, monkeypatch) -> None:
    """The import of torch looks into it; and it may have modules in front of installed ones."""
    monkeypatch.chdir(tmp_path)
    with zipfile.ZipFile(tmp_path / "app.zip", "w") as archive:
        archive.writestr("__main__.py", "import queue\nassert queue.mine\n")
        archive.writestr("queue.py", "mine = True\n")
    entry = Entrypoint(EntryKind.SCRIPT, "app.zip")
    with Driver(entry, env=plain_environment()) as driver:
        ready = driver.ready()
        assert ready.mode == "exec"
        assert ready.reason.endswith("app.zip is an archive, which the import of torch reads")
        assert driver.run(entry).code == 0


def test_such_a_file_in_pythonpath_is_the_servers_too(tmp_path: Path) -> None:
    (tmp_path / "queue.py").write_text(Path(queue.__file__).read_text() + "mine = True\n")
    (tmp_path / "scripts").mkdir()
    entry = script(tmp_path / "scripts" / "s.py", "import queue\nassert queue.mine\n")
    with Driver(entry, env=plain_environment(PYTHONPATH=str(tmp_path))) as driver:
        driver.ready()
        assert driver.run(entry).code == 0


def test_our_package_is_not_the_ranks(tmp_path: Path) -> None:
    """No module of ours is in sys.modules, and none of our folders on the path."""
    entry = script(
        tmp_path / "s.py",
        "import sys\nassert not [m for m in sys.modules if m.partition('.')[0] == 'elasticrun']\n"
        "assert not [p for p in sys.path if 'forkserver' in p], sys.path\n",
    )
    with forking(entry) as driver:
        assert driver.run(entry).code == 0


# ---------------------------------------------------------------- exec


def test_launch_exec_imports_no_torch(tmp_path: Path) -> None:
    entry = script(tmp_path / "s.py", "import sys\nsys.exit(4 if 'torch' in sys.modules else 3)\n")
    with Driver(entry, launch="exec", env=plain_environment()) as driver:
        ready = driver.ready()
        assert (ready.mode, ready.reason, ready.torch) == ("exec", "", "")
        maps = Path(f"/proc/{ready.pid}/maps").read_text()
        assert "libtorch" not in maps
        key = driver.start(entry)
        assert not driver.spawned(key).forked
        assert driver.exited(key).code == 3


@pytest.mark.parametrize("launch", ["auto", "exec"])
def test_a_command(tmp_path: Path, launch: str) -> None:
    entry = Entrypoint(EntryKind.COMMAND, "sh", ("-c", "echo $RANK $0; exit 5", "a b"))
    with Driver(entry, launch=launch, env=plain_environment()) as driver:
        ready = driver.ready()
        assert (ready.mode, ready.reason) == ("exec", "")
        assert driver.run(entry, env={"RANK": "1"}, stdout=str(tmp_path / "out")).code == 5
    assert (tmp_path / "out").read_text() == "1 a b\n"


def test_a_command_that_is_not_there(tmp_path: Path) -> None:
    entry = Entrypoint(EntryKind.COMMAND, str(tmp_path / "nothing"))
    with started(entry, launch="exec") as driver:
        reason = driver.failed(driver.start(entry)).reason
        assert reason == f"cannot run {tmp_path}/nothing: No such file or directory"


def test_a_function_is_not_ours_to_run(server: Driver) -> None:
    key = server.start(Entrypoint(EntryKind.FUNCTION, "f"))
    assert "its own caller" in server.failed(key).reason


@pytest.mark.parametrize("launch", ["auto", "exec"])
def test_run_path(tmp_path: Path, launch: str) -> None:
    text = "import sys\nprint(sys.argv[1:], __name__)\nsys.exit(3)\n"
    entry = script(tmp_path / "s.py", text, "a", "b")
    entry = Entrypoint(EntryKind.RUN_PATH, entry.target, entry.args)
    with Driver(entry, launch=launch, env=plain_environment()) as driver:
        assert driver.ready().mode == ("fork" if launch == "auto" else "exec")
        assert driver.run(entry, stdout=str(tmp_path / "out")).code == 3
    assert (tmp_path / "out").read_text() == "['a', 'b'] __main__\n"
