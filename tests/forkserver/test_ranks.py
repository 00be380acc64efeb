"""What a rank gets from the server: randomness, environment, files, signals, cores, error file,
what `ps` shows of it; and what libraries say at its end of objects that it shares."""

from __future__ import annotations

import importlib.util
import json
import os
import pty
import queue
import signal
import subprocess
import sys
import textwrap
import zipfile
from pathlib import Path
from typing import Any, cast

import psutil
import pytest
import typing_extensions

from elasticrun.forkserver import child
from elasticrun.forkserver.helpers import numa
from elasticrun.testing import processes
from elasticrun.wire.progress import (
    ANSWER_BYTES,
    RankQuestion,
    address,
    bound_socket,
    encode_question,
    mint_name,
    read_answer,
)
from elasticrun.wire.spawning import (
    Configure,
    Execed,
    Notice,
    SendSignal,
    SpawnRank,
    SweepOrder,
    Swept,
)
from elasticrun.wire.types import EntryKind, Entrypoint
from tests import needs
from tests.forkserver.driver import (
    LIMIT,
    Driver,
    fifo,
    forking,
    gone,
    plain_environment,
    read_line,
    script,
    started,
    tells,
)
from tests.further import further
from tests.harness import program

pytestmark = pytest.mark.slow

DRAW = """
import json, random, sys
import numpy, torch
from torch.utils.data import DataLoader

torch.set_num_threads(1)
linear = torch.nn.Linear(2, 2)
drawn = {
    "random": random.random(),
    "numpy": numpy.random.rand(),
    "numpy new": numpy.random.default_rng().random(),
    "torch": torch.rand(1).item(),
    "torch seed": torch.initial_seed(),
    "linear": linear.weight.flatten().tolist(),
    "loader": [b.item() for b in DataLoader(list(range(64)), shuffle=True, batch_size=1)],
    "uuid": str(__import__("uuid").uuid4()),
    "authkey": __import__("multiprocessing").current_process().authkey.hex(),
}
json.dump(drawn, open(sys.argv[1], "w"))
"""


def test_two_ranks_and_two_lives_draw_different_numbers(server: Driver, tmp_path: Path) -> None:
    entry = script(tmp_path / "draw.py", DRAW)
    drawn = []
    for life in ("rank 0", "rank 1", "rank 0 again"):
        out = str(tmp_path / life)
        code = server.run(Entrypoint(EntryKind.SCRIPT, entry.target, (out,))).code
        assert code == 0
        drawn.append(json.loads(Path(out).read_text()))
    for name in drawn[0]:
        values = [json.dumps(each[name]) for each in drawn]
        assert len(set(values)) == 3, name


# ---------------------------------------------------------------- environment


def test_environment_is_the_first_one_with_changes(tmp_path: Path) -> None:
    text = "import json, os, sys\njson.dump([dict(os.environ), os.popen('env').read()], "
    entry = script(tmp_path / "env.py", text + "open(sys.argv[1], 'w'))\n", str(tmp_path / "out"))
    with forking(entry, env=plain_environment(GONE="1", KEPT="2")) as driver:
        driver.run(entry, env={"RANK": "3", "KEPT": "4"}, unset=("GONE",))
    seen, of_child = json.loads((tmp_path / "out").read_text())
    assert seen["RANK"] == "3"
    assert seen["KEPT"] == "4"
    assert "GONE" not in seen
    assert seen["PATH"] == os.environ["PATH"]
    assert "GONE=" not in of_child
    assert "RANK=3" in of_child


SEES = """
import json, os, sys, threading
HOW = sys.argv[2]
if HOW == "writes":
    print("a first line", flush=True)
elif HOW == "has a file":
    os.mkdir(sys.argv[1] + ".dir")
os.chdir("/")
os.umask(0o77)
sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import beside
import torch
mask = os.umask(0)
name = "OMP_PROC_BIND"
with open(sys.argv[1], "a") as out:
    print(json.dumps([os.getpid(), os.environ.get(name), beside.SEEN, mask, os.getcwd()]), file=out)
"""

BESIDE = """
import os
SEEN = [os.environ.get("OMP_" + "PROC_BIND"), os.getcwd()]
os.environ["OMP_" + "PROC_BIND"] = "true"
"""
"""Here, and put together, so that the text of the script does not tell it beforehand."""


def test_a_variable_set_too_late_makes_a_rank_execute_itself(tmp_path: Path) -> None:
    """In the same process, with its first environment; where nothing was done that is seen outside.
    Else it goes on, says so, and later lives are exec'd."""
    (tmp_path / "beside.py").write_text(BESIDE)
    out, stdout = tmp_path / "out", tmp_path / "stdout"
    scripts = {
        how: script(tmp_path / f"{how.replace(' ', '_')}.py", SEES, str(out), how)
        for how in ("nothing", "writes", "has a file")
    }
    with forking(scripts["nothing"]) as driver:
        for how, entry in scripts.items():
            out.unlink(missing_ok=True)
            key = driver.start(entry, stdout=str(stdout))
            born = driver.spawned(key)
            assert born.forked
            assert driver.exited(key).code == 0
            execed = [said for said in driver.all_of(Execed) if said.key == key]
            pid, value, seen, mask, folder = json.loads(out.read_text())
            assert (pid, value, seen[0], mask, folder) == (born.pid, "true", None, 0o77, "/")
            assert bool(execed) is (how == "nothing")
            notice = driver.all_of(Notice)[-1].text
            assert (
                f"{entry.target}: OMP_PROC_BIND was set before the first import of torch" in notice
            )
            assert ("so ranks are started by exec" in notice) is bool(execed)
            words = {"writes": "written something", "has a file": "called os.mkdir"}
            assert words.get(how, "") in notice
        assert stdout.read_text() == ""
        key = driver.start(scripts["writes"], stdout=str(stdout))
        assert not driver.spawned(key).forked
        assert driver.exited(key).code == 0
        assert stdout.read_text() == "a first line\n"


@pytest.mark.parametrize(
    "text",
    [
        "import torch, os, sys\nn = torch.get_num_threads()\nos.environ['OMP_NUM_THREADS'] = '7'\n"
        "import torch.nn, numpy\nsys.exit(0 if torch.get_num_threads() == n else 1)\n",
        "import sys, numpy, json\nassert 'torch' not in sys.modules\nassert numpy.ones(2).sum()\n"
        "import torch.nn.functional as F\nassert 'torch' in sys.modules\n",
        "import sys, multiprocessing\n"
        "assert sys.modules['__mp_main__'] is sys.modules['__main__']\n",
        "import sys, torch\nassert sys.modules['__mp_main__'] is sys.modules['__main__']\n",
    ],
    ids=[
        "an environment set after import torch changes nothing",
        "numpy alone brings no torch",
        "the other name of the main module comes with multiprocessing",
        "the other name of the main module comes with torch",
    ],
)
def test_what_holds_within_a_rank(server: Driver, tmp_path: Path, text: str) -> None:
    assert server.run(script(tmp_path / "s.py", text)).code == 0


DIFFERS = {
    "a stub": (
        "import sys, types\nmine = types.ModuleType('queue')\n"
        "exec(open(sys.argv[2] + '/queue.py').read(), vars(mine))\nsys.modules['queue'] = mine\n"
    ),
    "a replaced module": "import json, sys\ndel sys.modules['json']\nimport json\n",
    "a replaced function": "import socket\nsocket.create_connection = print\n",
    "another file": "import sys\nsys.path.insert(0, sys.argv[2])\n",
    "a finder": (
        "import sys\nclass F:\n    def find_spec(self, *a):\n        pass\n"
        "sys.meta_path.insert(0, F())\n"
    ),
    "a class of loggers": (
        "import logging\nclass L(logging.Logger):\n    pass\nlogging.setLoggerClass(L)\n"
    ),
    "a logger": "import logging\nlogging.getLogger('torch.distributed').setLevel(1)\n",
}
"""What a script may do before it imports torch, and what its import would meet then."""

ALIKE = {
    "nothing": "",
    "the path": "import sys\nsys.path.insert(0, '/nowhere')\nsys.path.append(sys.argv[3])\n",
    "variables": "import os\nos.environ.update(WANDB_MODE='off', CUDA_VISIBLE_DEVICES='0')\n",
    "logging": "import logging\nlogging.basicConfig(level=10)\n",
    "a factory of log records, with ray": (
        "import logging\nlogging.setLogRecordFactory(type('R', (logging.LogRecord,), {}))\n"
    ),
    "a finder behind": "import sys\nsys.meta_path.append(type('F', (), {'find_spec': print}))\n",
    "filters": "import warnings\nwarnings.filterwarnings('ignore')\n",
    "numpy": "import numpy\nimport sys\nassert 'torch' not in sys.modules\n",
    "tqdm": "from tqdm import tqdm\nimport typing_extensions\n",
    "multiprocess, with datasets": (
        "import sys\nsys.modules['__mp_main__'] = sys.modules['__main__']\n"
    ),
}

EXECED = """
import sys
import textwrap
if not [finder for finder in sys.meta_path if type(finder).__name__ == "_Finder"]:
    sys.exit(open(sys.argv[1], "w").write("3") - 1)
"""
"""What need not import torch, which takes a second."""

AND_TORCH = "import torch\nopen(sys.argv[1], 'w').write(str(len(torch.ones(3))))\n"


def test_what_torch_would_meet_decides_where_it_comes_from(tmp_path: Path) -> None:
    (tmp_path / "first").mkdir()
    (tmp_path / "first" / "queue.py").write_text(Path(queue.__file__).read_text())
    words = [str(tmp_path / each) for each in ("out", "first", "last")]
    wrong = []
    with forking(script(tmp_path / "s.py", "")) as driver:
        for what, text in (DIFFERS | ALIKE).items():
            name = f"with_{what.replace(' ', '_')}.py"
            entry = script(tmp_path / name, f"{EXECED}{text}{AND_TORCH}", *words)
            key = driver.start(entry)
            if driver.exited(key).code != 0 or (tmp_path / "out").read_text() != "3":
                wrong.append(f"{what}: it failed")
            (tmp_path / "out").unlink(missing_ok=True)
            execed = any(said.key == key for said in driver.all_of(Execed))
            if execed is not (what in DIFFERS):
                wrong.append(f"{what}: {execed}")
        assert not wrong, f"{wrong}: {driver.all_of(Notice)}"


def test_an_answer_of_the_monitor_is_no_effect_of_the_script(tmp_path: Path) -> None:
    """The agent asks every few seconds, also a script that takes long to import torch."""
    text = f"{EXECED}open(sys.argv[2]).read()\n{DIFFERS['a replaced module']}{AND_TORCH}"
    with (
        forking(script(tmp_path / "s.py", "")) as driver,
        fifo(tmp_path / "answered") as answered,
        bound_socket(mint_name()) as asking,
    ):
        asking.settimeout(LIMIT)
        name, out = mint_name(), tmp_path / "out"
        key = driver.start(script(tmp_path / "s.py", text, str(out), str(answered)), monitor=name)
        driver.spawned(key)
        with answered.open("w"):  # the script is at its first lines
            asking.sendto(encode_question(RankQuestion(1, full=False, stacks=False)), address(name))
            assert read_answer(asking.recv(ANSWER_BYTES)) is not None
        assert driver.exited(key).code == 0
        assert [said.key for said in driver.all_of(Execed)] == [key], driver.all_of(Notice)


AT_ONCE = """
import sys, threading
names, wrong = ("numpy", "torch", "json", "decimal"), []
together = threading.Barrier(len(names))
def run(name):
    together.wait()
    try:
        __import__(name)
    except BaseException as error:
        wrong.append(f"{name}: {error!r}")
sys.setswitchinterval(1e-7)
threads = [threading.Thread(target=run, args=(name,)) for name in names]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
import numpy, torch, decimal
assert not wrong, wrong
assert torch.ones(2).numpy().sum() == decimal.Decimal(2)
"""


def test_threads_of_a_rank_may_import_at_the_same_moment(server: Driver, tmp_path: Path) -> None:
    entry = script(tmp_path / "s.py", AT_ONCE)
    keys = [server.start(entry) for _ in range(8)]
    assert [server.exited(key).code for key in keys] == [0] * 8


def test_an_archive_on_the_path_gives_its_other_modules_too(tmp_path: Path) -> None:
    """It has one loader for all of them, and torch imports one."""
    with zipfile.ZipFile(tmp_path / "more.zip", "w") as archive:
        archive.write(typing_extensions.__file__, "typing_extensions.py")
        archive.writestr("other.py", "value = 1\n")
    text = "import typing_extensions\nimport other, torch\n"
    text += "assert 'more.zip' in typing_extensions.__file__ and other.value == 1\n"
    entry = script(tmp_path / "s.py", text)
    with forking(entry, env=plain_environment(PYTHONPATH=str(tmp_path / "more.zip"))) as driver:
        assert driver.run(entry).code == 0
        assert driver.all_of(Execed) == []


def test_a_kernel_that_counts_no_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks start; the lines of one that has set a variable too late do not run twice."""
    monkeypatch.setattr(child, "_COUNTS", str(tmp_path / "none"))
    monkeypatch.setattr(sys, "addaudithook", lambda hook: None)  # it would stay for ever
    page, entry = child.Page(), Entrypoint(EntryKind.SCRIPT, "s.py")
    page.adopt()
    order = SpawnRank(0, 0, entry, {}, (), "", "", "")
    again = child.FreshStart(cast("Any", None), order, page, cast("Any", None), {})
    again.watch()
    again.take("a variable was set")
    told = list(page.read())
    assert [kind for kind, _ in told] == [child.EXEC_NEXT, child.NOTICE]
    assert "perhaps written something" in told[1][1]


STATE = """
import atexit, json, os, random, sys
atexit.register(lambda: order.append("first") or open(sys.argv[1], "w").write(json.dumps(order)))
order = []
import torch
torch.manual_seed(0); random.seed(0)
torch.set_num_threads(3)
before = [torch.initial_seed(), torch.get_num_threads()]
import multiprocessing.util
multiprocessing.util.Finalize(None, lambda: order.append("torch's"), exitpriority=0)
import torch.distributed.checkpoint, torch.distributed.tensor, torch._dynamo
torch.compile(lambda x: x + 1, backend="eager")(torch.ones(2))
assert before == [torch.initial_seed(), torch.get_num_threads()]
order.append([torch.randperm(8).tolist(), random.random(), sorted(sys.modules)])
order.append([getattr(f, "__name__", type(f).__name__) for f in sys.meta_path])
import numpy
order.append(str(numpy.random.get_bit_generator().seed_seq is not None))
"""


@further("fidelity/test_imports::test_imports")
def test_what_is_imported_late_changes_no_state(tmp_path: Path) -> None:
    """Seeds, threads and filters stay; and functions of atexit are called in their order."""
    path = tmp_path / "s.py"
    entry = script(path, STATE, str(tmp_path / "fork"))
    environ = plain_environment()
    done = program(str(path), str(tmp_path / "exec"), env=environ)
    assert done.returncode == 0, done.stderr
    with forking(entry, env=environ) as driver:
        assert driver.run(entry).code == 0
        assert driver.all_of(Notice) == []
    by_exec, by_fork = (json.loads((tmp_path / each).read_text()) for each in ("exec", "fork"))
    assert by_fork == by_exec


FINALIZERS = """
import atexit, sys, tempfile, weakref
class Kept: pass
kept = sys.kept = [Kept() for _ in range(3)]
told = lambda word: open(sys.argv[1], "a").write(word + "\\n")
weakref.finalize(kept[0], told, "the first")
atexit.register(told, "atexit")
sys.folder = tempfile.TemporaryDirectory()
if sys.argv[2] == "torch":
    import torch
    weakref.finalize(kept[1], told, "behind torch")
    told(str(sum(type(i.func).__name__ == "function" for i in weakref.finalize._registry.values())))
weakref.finalize(kept[2], told, "the last")
told(str(len(weakref.finalize._registry)))
atexit.register(lambda: told(str(len(weakref.finalize._registry))))
"""


@pytest.mark.parametrize("imports", ["torch", "nothing"])
def test_finalizers_are_called_at_the_end(tmp_path: Path, imports: str) -> None:
    """Those of the script, and torch's only where it has imported torch."""
    path, environ = tmp_path / "s.py", plain_environment()
    entry = script(path, FINALIZERS, str(tmp_path / "fork"), imports)
    assert program(str(path), str(tmp_path / "exec"), imports, env=environ).returncode == 0
    with forking(entry, env=environ) as driver:
        assert driver.run(entry).code == 0
        assert driver.all_of(Execed) == []
    by_exec, by_fork = ((tmp_path / each).read_text() for each in ("exec", "fork"))
    assert "the first\n" in by_exec
    assert by_fork == by_exec


# ---------------------------------------------------------------- the error file


def test_an_uncaught_exception_is_described_for_the_summary(server: Driver, tmp_path: Path) -> None:
    entry = script(tmp_path / "boom.py", "def f():\n    raise ValueError('boom')\n\n\nf()\n")
    error, stderr = tmp_path / "error.json", tmp_path / "stderr"
    assert server.run(entry, error_file=str(error), stderr=str(stderr)).code == 1
    message = json.loads(error.read_text())["message"]
    assert message["message"] == "ValueError: boom"
    assert message["extraInfo"]["py_callstack"] == stderr.read_text()
    assert message["extraInfo"]["timestamp"].isdigit()


RECORD = """
import os
from torch.distributed.elastic.multiprocessing.errors import record

@record
def main():
    raise RuntimeError("recorded")

main()
"""


def test_the_error_file_of_record_stays(server: Driver, tmp_path: Path) -> None:
    entry = script(tmp_path / "record.py", RECORD)
    error = tmp_path / "error.json"
    environ = {"TORCHELASTIC_ERROR_FILE": str(error)}
    code = server.run(entry, error_file=str(error), env=environ, stderr="/dev/null").code
    assert code == 1
    record = json.loads(error.read_text())["message"]
    assert record["message"] == "RuntimeError: recorded"
    assert "record.py" in record["extraInfo"]["py_callstack"]


@pytest.mark.parametrize("how", ["raise SystemExit(3)", "raise KeyboardInterrupt", "pass"])
def test_what_is_no_error_writes_no_error_file(server: Driver, tmp_path: Path, how: str) -> None:
    entry = script(tmp_path / "end.py", how)
    error = tmp_path / "error.json"
    server.run(entry, error_file=str(error), stderr="/dev/null")
    assert not error.exists()


def test_an_error_file_that_cannot_be_written_hides_nothing(server: Driver, tmp_path: Path) -> None:
    entry = script(tmp_path / "boom.py", "1 / 0\n")
    stderr = tmp_path / "stderr"
    error = str(tmp_path / "no" / "such" / "folder" / "error.json")
    assert server.run(entry, error_file=error, stderr=str(stderr)).code == 1
    assert stderr.read_text().endswith("ZeroDivisionError: division by zero\n")


# ---------------------------------------------------------------- files


def test_output_goes_to_files_and_is_unbuffered(server: Driver, tmp_path: Path) -> None:
    text = "import signal\nprint('half a line', end='')\nsay('printed')\nsignal.pause()\n"
    out = tmp_path / "out"
    key, said = tells(server, tmp_path, text, stdout=str(out), stderr="/dev/null")
    assert (said, out.read_text()) == ("printed", "half a line")
    server.tell(SendSignal(key, signal.SIGKILL))
    assert server.exited(key).code == -signal.SIGKILL


@pytest.mark.parametrize("launch", ["auto", "exec"])
def test_a_log_file_that_cannot_be_opened_is_one_sentence(tmp_path: Path, launch: str) -> None:
    entry = script(tmp_path / "s.py", "raise SystemExit(9)\n")
    with started(entry, launch=launch) as driver:
        key = driver.start(entry, stdout=str(tmp_path / "none" / "out"))
        reason = driver.failed(key).reason
        assert "cannot write the log file" in reason
        assert "No such file or directory" in reason


def test_stdin_and_breakpoint_on_a_terminal(tmp_path: Path) -> None:
    """The user's terminal is a rank's stdin: breakpoint() can be talked to."""
    entry = script(
        tmp_path / "stop.py",
        "import sys\nx = 41\nbreakpoint()\nsys.exit(0 if sys.stdin.isatty() else 1)\n",
    )
    ours, theirs = pty.openpty()
    kept = os.dup(0)
    os.dup2(theirs, 0)
    try:
        driver = Driver(entry, env=plain_environment())
    finally:
        os.dup2(kept, 0)
        os.close(kept)
    with driver:
        assert driver.ready().mode == "fork"
        out = tmp_path / "out"
        key = driver.start(entry, stdout=str(out), stderr="/dev/null")
        os.write(ours, b"p x + 1\nc\n")
        assert driver.exited(key).code == 0
        assert "42" in out.read_text()
    os.close(ours)
    os.close(theirs)


# ---------------------------------------------------------------- signals and ties


HANDLES = """
import signal, sys, time
signal.signal(signal.SIGTERM, lambda *a: sys.exit(5))
try:
    say("ready")
    while True:
        time.sleep(0.01)
except KeyboardInterrupt:
    raise SystemExit(6)
"""


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGTERM, 5), (signal.SIGINT, 6)])
def test_signals_reach_the_script(server: Driver, tmp_path: Path, signum: int, code: int) -> None:
    key, _ = tells(server, tmp_path, HANDLES)
    server.tell(SendSignal(key, signum))
    assert server.exited(key).code == code


def test_a_signal_to_a_rank_alone(server: Driver, tmp_path: Path) -> None:
    """Its children are not hit: they are ended as ever, when it has gone."""
    text = (
        "import os, signal\nsignal.signal(signal.SIGTERM, lambda *a: None)\n"
        "if os.fork() == 0:\n    signal.signal(signal.SIGTERM, signal.SIG_DFL)\n"
        "    say(os.getpid())\n"
        "while True:\n    signal.pause()\n"
    )
    key, said = tells(server, tmp_path, text)
    server.tell(SendSignal(key, signal.SIGKILL, alone=True))
    assert server.exited(key).code == -signal.SIGKILL
    assert psutil.Process(int(said)).is_running()
    server.tell(SweepOrder((key,), 5.0))
    assert not gone([int(said)])
    assert server.wait(Swept, lambda said: said.keys == (key,)).stuck == ()


def test_a_signal_right_after_the_start_is_not_lost(server: Driver, tmp_path: Path) -> None:
    entry = script(tmp_path / "s.py", "import signal\nwhile True:\n    signal.pause()\n")
    for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        key = server.start(entry, stderr="/dev/null")
        server.tell(SendSignal(key, signum))
        assert server.exited(key).code == -signum


def test_what_the_agent_ignored_at_its_start_stays_ignored(tmp_path: Path) -> None:
    entry = script(
        tmp_path / "s.py",
        "import signal, sys\n"
        "ignored = [s.name for s in signal.valid_signals() "
        "if signal.getsignal(s) is signal.SIG_IGN]\n"
        f"open({str(tmp_path / 'out')!r}, 'w').write(' '.join(sorted(ignored)))\n",
    )
    with forking(entry, ignored=[signal.SIGINT, signal.SIGHUP]) as driver:
        driver.run(entry)
    assert (tmp_path / "out").read_text() == "SIGHUP SIGINT SIGPIPE SIGXFSZ"


@pytest.mark.parametrize("launch", ["auto", "exec"])
def test_ranks_die_with_a_server_that_is_killed(tmp_path: Path, launch: str) -> None:
    with started(launch=launch) as driver:
        _, pid = tells(driver, tmp_path, "import os, signal\nsay(os.getpid())\nsignal.pause()\n")
        driver.process.kill()
        assert gone([int(pid)]) == []


# ---------------------------------------------------------------- cores and limits


BINDING = """
import os, signal, sys
from torch.numa import binding
from elasticrun.forkserver.helpers import numa

before, asked = os.sched_getaffinity(0), sys.argv[1]
core = max(before)
binding.shutil.which = lambda _: "/numactl"

def cores(*, numa_options, **which):  # gpu_index, device_index since torch 2.14
    (index,) = which.values()
    with open(asked, "w") as file:
        file.write(f"{os.getpid()} {index} {numa_options}")
    return {core}

binding._get_logical_cpus_to_bind_to = cores
assert numa.cores("exclusive", 3, may_fail=False) == {core}
assert os.sched_getaffinity(0) == before
pid, gpu, options = open(asked).read().split(" ", 2)
assert (int(pid) != os.getpid(), gpu) == (True, "3")
assert "EXCLUSIVE" in options

def refused(may_fail):
    try:
        return numa.cores("node", 0, may_fail=may_fail)
    except numa.NotBound as error:
        return str(error)

def broken(**_):
    raise RuntimeError("no such GPU")

binding._get_logical_cpus_to_bind_to = broken
assert refused(False) == "--numa-binding=node: RuntimeError: no such GPU"
assert refused(True) == before

def hangs(**_):
    while True:
        signal.pause()

binding._get_logical_cpus_to_bind_to, numa.ANSWER_LIMIT = hangs, 1
assert refused(True) == "--numa-binding=node: torch has no answer after 1 s"
"""


def test_torch_names_the_cores_in_a_process_of_its_own(tmp_path: Path) -> None:
    """The asking process has CUDA and the cores; the one that waits has neither. It is a process
    with one thread, as a rank is: pytest's threads hold locks that a fork would keep."""
    pytest.importorskip("torch.numa.binding")
    done = program("-c", BINDING, str(tmp_path / "asked"))
    assert done.returncode == 0, done.stderr


def test_an_older_torch_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch, "__version__", "2.8.0")
    monkeypatch.setitem(sys.modules, "torch.numa", None)
    wanted = "^--numa-binding needs torch 2.9 or newer, not torch 2.8.0$"
    with pytest.raises(numa.NotBound, match=wanted):
        numa.cores("node", 0, may_fail=True)


@further("test_torch_names_the_cores_in_a_process_of_its_own")
def test_ranks_whose_cores_are_not_found_cannot_be_started(tmp_path: Path) -> None:
    """This machine's torch has no GPU, or torch finds no numactl."""
    entry = script(tmp_path / "s.py", "")
    environ = plain_environment(CUDA_VISIBLE_DEVICES="", PATH=str(tmp_path))
    with forking(entry, env=environ, numa=True) as driver:
        reason = driver.failed(driver.start(entry, numa="node")).reason
        assert reason.startswith("--numa-binding=node: ")
        key = driver.start(entry, numa="node", numa_may_fail=True)
        assert driver.spawned(key).forked
        assert driver.exited(key).code == 0


@further(
    "forkserver/test_trust::test_what_follows_exec_alone",
    "forkserver/test_trust::test_a_script_that_sets_what_an_import_reads",
)
def test_placement_and_bound_cores_mean_exec(tmp_path: Path) -> None:
    entry = script(tmp_path / "s.py", "")
    with Driver(entry, env=plain_environment(OMP_PROC_BIND="true"), numa=True) as driver:
        ready = driver.ready()
        assert (ready.mode, "OMP_PROC_BIND" in ready.reason) == ("exec", True)
    environ = plain_environment()
    del environ["OMP_NUM_THREADS"]  # torch counts the cores at its import
    with Driver(entry, env=environ, numa=True) as driver:
        ready = driver.ready()
        assert (ready.mode, "OMP_NUM_THREADS" in ready.reason) == ("exec", True)


def test_configure_again_is_refused(tmp_path: Path) -> None:
    entry = script(tmp_path / "s.py", "")
    with started(entry, launch="exec") as driver:
        driver.tell(Configure("exec", (), entry, "spawn", False))
        assert driver.process.wait(LIMIT) == 2


# ---------------------------------------------------------------- what ps shows

WAIT = "import sys, time\nopen(sys.argv[1], 'w').write('on\\n')\nwhile True:\n    time.sleep(60)\n"


@pytest.mark.parametrize("length", [10, 5000], ids=["in place", "longer than the old one"])
def test_tools_see_the_script(server: Driver, tmp_path: Path, length: int) -> None:
    needs.program("pkill", package="procps")
    entry = script(tmp_path / "train_me.py", WAIT)
    word = "x" * length
    with fifo(tmp_path / "said") as said:
        entry = Entrypoint(EntryKind.SCRIPT, entry.target, (str(said), "--name", word))
        key = server.start(entry, env={"A_WORD": "seen"})
        read_line(said)
        pid = server.spawned(key).pid
        process = psutil.Process(pid)
        assert process.cmdline() == [sys.executable, "-u", entry.target, str(said), "--name", word]
        assert process.name().startswith("python")
        assert process.environ()["A_WORD"] == "seen"
        assert processes.command(server.process.pid) == "elasticrun: fork server"
        pattern = f"{tmp_path}.*train_me.py.*--name {word[:10]}"  # of this run of the tests alone
        found = subprocess.run(["pkill", "-KILL", "-f", pattern], timeout=LIMIT, check=False)
        assert found.returncode == 0
        assert server.exited(key).code == -9


FALLBACK = """
import sys
import textwrap
from elasticrun.host.system import title
title._PR_SET_MM_MAP = 99  # an old kernel
words = [w.encode() for w in sys.argv[2:]]
assert not title.set_command_line(words, [b"A=1"])
print(open("/proc/self/cmdline").read())
"""


def shown(code: str, *words: str) -> str:
    """The command line that this program has given itself."""
    done = program("-c", code, *words)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip("\0\n")


@pytest.mark.parametrize("words", [["python", "-u", "a.py"], ["python", "x" * 4000]])
def test_an_old_kernel_shows_a_title(words: list[str]) -> None:
    title = shown(FALLBACK, " " * 200, *words)
    assert " ".join(words).startswith(title)
    assert title.startswith("python")
    assert len(title) >= min(len(" ".join(words)), 200)


TITLE = """
import sys
import textwrap
from elasticrun.host.system import title
before = open("/proc/self/environ", "rb").read()
title._PR_SET_MM_MAP = int(sys.argv[1]) or title._PR_SET_MM_MAP
title.set_title(b"elasticrun: store")
assert open("/proc/self/environ", "rb").read() == before
print(open("/proc/self/cmdline").read())
"""


@pytest.mark.parametrize("number", ["0", "99"], ids=["as it is", "an old kernel"])
def test_what_was_forked_for_us_has_a_title(number: str) -> None:
    assert shown(TITLE, number, "--fd=4") == "elasticrun: store"


# ---------------------------------------------------------------- what libraries count at the end

COUNTED = """
import atexit, ctypes, os
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
prepare_end([module], atexit.register)
for kept in (module, Builder):
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(kept))  # as the fork server keeps what it shares
"""


def test_what_nanobind_counts_is_freed() -> None:
    done = program("-c", COUNTED)
    assert (done.stdout, done.stderr) == ("freed freed ", "")


@pytest.mark.skipif(
    importlib.util.find_spec("triton") is None,
    reason="this torch has no triton, whose bindings are made with nanobind",
)
def test_a_rank_with_triton_ends_without_a_word(tmp_path: Path) -> None:
    entry = script(tmp_path / "s.py", "import torch\n")
    with forking(entry, preload=["triton"]) as driver:
        assert driver.run(entry, stderr=str(tmp_path / "err")).code == 0
    assert (tmp_path / "err").read_text() == ""


def test_the_audit_hook_goes_when_torch_is_there(server: Driver, tmp_path: Path) -> None:
    """Else each `id()` calls it, for the life of the rank."""
    text = """
    import gc, sys
    def hooks():
        found = []
        def hook(event, args):
            if event == "look" and not found:
                for one in gc.get_objects():
                    if type(one) is type(iter([])):
                        listed = one.__reduce__()[1][0]
                        if type(listed) is list and hook in listed:
                            found.append(len(listed))
        sys.addaudithook(hook)
        sys.audit("look")
        return found[0]
    before = hooks()
    import torch
    sys.audit("anything")
    assert (before, hooks()) == (2, 2), (before, hooks())
    """
    assert server.run(script(tmp_path / "s.py", textwrap.dedent(text))).code == 0
