"""The server as a process: stores, sweeping, its end in every way, rubbish on its socket."""

from __future__ import annotations

import os
import random
import resource
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from elasticrun.forkserver.helpers.stopped import STOPPED_LIMIT, StoppedStores
from elasticrun.host.system.processes import allow_tracer, state
from elasticrun.wire import spawning as sp
from elasticrun.wire.frames import (
    LENGTH_BYTES,
    MAX_FRAME_BYTES,
    FrameBuffer,
    FrameError,
    encode,
    peer_of,
)
from elasticrun.wire.types import EntryKind, Entrypoint
from tests.forkserver.driver import (
    LIMIT,
    Driver,
    alive,
    fifo,
    gone,
    plain_environment,
    read_line,
    script,
    started,
)
from tests.further import cases, examples, further
from tests.harness import await_true, program

pytestmark = pytest.mark.slow


def held_port() -> tuple[socket.socket, int]:
    """A port as the agent holds it: bound, shared, not listening."""
    holder = socket.socket()
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    holder.bind(("", 0))
    return holder, holder.getsockname()[1]


CLIENT = """
import sys
from datetime import timedelta
from torch.distributed import TCPStore
store = TCPStore("127.0.0.1", int(sys.argv[1]), None, False, timedelta(seconds=60))
store.set("key", "value")
assert store.get("key") == b"value"
assert store.add("count", 2) == int(sys.argv[2])
"""


@pytest.mark.parametrize("launch", cases(["auto", "exec"], soaked=["exec"]))
def test_a_store_serves_and_a_new_one_is_fresh(tmp_path: Path, launch: str) -> None:
    path = tmp_path / "client.py"
    entry = script(path, CLIENT)
    with started(entry, launch=launch) as driver:
        holder, port = held_port()
        with holder:
            pids = set()
            for counts in (("2", "4"), ("2",)):
                key = driver.new_key()
                driver.tell(sp.SpawnStore(key, port))
                store = driver.wait(sp.StoreListening)
                assert (store.key, store.port) == (key, port)
                pids.add(store.pid)
                for count in counts:
                    client = Entrypoint(EntryKind.SCRIPT, str(path), (str(port), count))
                    assert driver.run(client).code == 0
                driver.tell(sp.CloseStore(key))
                assert driver.exited(key).code == -signal.SIGKILL
            assert len(pids) == 2


def test_a_store_on_a_port_that_is_taken_is_one_sentence(server: Driver) -> None:
    with socket.socket(socket.AF_INET6) as taken:
        taken.bind(("::", 0))
        taken.listen()
        key = server.new_key()
        server.tell(sp.SpawnStore(key, taken.getsockname()[1]))
        reason = server.failed(key).reason
    assert "Address already in use" in reason
    assert "\n" not in reason


def test_a_stopped_child_is_woken_after_a_while() -> None:
    """One that goes on by itself before is not; and what has ended is left to be reaped."""
    stopped = StoppedStores()
    with subprocess.Popen(["sleep", "1000"]) as child:
        pid = child.pid

        def stop() -> None:
            os.kill(pid, signal.SIGSTOP)
            await_true(lambda: state(pid) == "T", "stop")

        stop()
        assert (stopped.check([pid], 0.0), stopped.next_deadline()) == (0, STOPPED_LIMIT)
        assert stopped.check([pid], STOPPED_LIMIT - 1.0) == 0
        assert stopped.check([pid], STOPPED_LIMIT) == 1
        await_true(lambda: state(pid) != "T", "child that goes on")
        assert (stopped.check([pid], 50.0), stopped.next_deadline()) == (0, None)
        stop()
        stopped.check([pid], 60.0)
        os.kill(pid, signal.SIGCONT)
        await_true(lambda: state(pid) != "T", "child that goes on")
        assert (stopped.check([pid], 100.0), stopped.next_deadline()) == (0, None)
        stop()
        stopped.check([pid], 200.0)
        child.kill()
        await_true(lambda: state(pid) == "Z", "end")
        stopped.check([pid], 201.0)
        assert child.wait() == -signal.SIGKILL
    assert (stopped.check([], 300.0), stopped.next_deadline()) == (0, None)


@further("forkserver/test_server::test_a_stopped_child_is_woken_after_a_while")
def test_a_stopped_store_host_is_woken(server: Driver) -> None:
    """It cannot be replaced while a round runs; SIGCONT costs nothing."""
    holder, port = held_port()
    with holder:
        key = server.new_key()
        server.tell(sp.SpawnStore(key, port))
        pid = server.wait(sp.StoreListening, lambda m: m.key == key).pid
        os.kill(pid, signal.SIGSTOP)
        said = server.wait(sp.Notice, lambda m: "a store host that was stopped" in m.text)
        assert said.text.endswith("is continued: ranks may wait for it")
        await_true(lambda: state(pid) != "T", "store that goes on")
        server.tell(sp.CloseStore(key))
        server.exited(key)


def test_a_store_host_ignores_what_is_sent_to_everybody(server: Driver) -> None:
    holder, port = held_port()
    with holder:
        key = server.new_key()
        server.tell(sp.SpawnStore(key, port))
        pid = server.wait(sp.StoreListening, lambda m: m.key == key).pid
        for signum in sp.SHIELDED:
            os.kill(pid, signum)
        with socket.create_connection(("127.0.0.1", port), LIMIT):
            pass
        assert alive(pid)
        soft, hard = resource.prlimit(pid, resource.RLIMIT_NOFILE)
        assert soft == hard
        server.tell(sp.CloseStore(key))
        server.exited(key)


# ---------------------------------------------------------------- the end


FAMILY = """
import os, signal, subprocess, sys, time
said = open(sys.argv[1], "w")
kind = sys.argv[2]
pids = [os.getpid()]
read, write = os.pipe()

def child(own_session, hard, deeper):
    pid = os.fork()
    if pid:
        pids.append(int(os.read(read, 20)))
        if deeper:
            pids.append(int(os.read(read, 20)))
        return
    if own_session:
        os.setsid()
    if hard:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if deeper:
        if os.fork() == 0:
            os.setsid()
            os.write(write, b"%20d" % os.getpid())
            while True:
                time.sleep(60)
    os.write(write, b"%20d" % os.getpid())
    while True:
        time.sleep(60)

child(False, False, False)
child(True, kind == "hard", False)
child(True, False, True)
said.write(" ".join(map(str, pids)) + "\\n")
said.close()
if kind == "exit":
    sys.exit(3)
while True:
    time.sleep(60)
"""


def start_family(driver: Driver, place: Path, kind: str) -> tuple[int, list[int]]:
    """A rank with children in its group, in sessions of their own, and grandchildren."""
    path = place / "family.py"
    path.write_text(FAMILY)
    with fifo(place / f"said-{kind}") as said:
        entry = Entrypoint(EntryKind.SCRIPT, str(path), (str(said), kind))
        key = driver.start(entry)
        return key, [int(word) for word in read_line(said).split()]


@pytest.mark.parametrize("how", cases(["eof", "quit", "rubbish"], kept=["eof"]))
def test_nothing_below_outlives_the_conversation(tmp_path: Path, how: str) -> None:
    with started() as driver:
        _, pids = start_family(driver, tmp_path, "hard")
        holder, port = held_port()
        driver.tell(sp.SpawnStore(driver.new_key(), port))
        pids.append(driver.wait(sp.StoreListening).pid)
        holder.close()
        if how == "eof":
            driver.socket.close()
        elif how == "quit":
            driver.tell(sp.Quit())
        else:
            driver.socket.sendall(b"\xff" * 64)
        code = driver.process.wait(LIMIT)
        assert code == {"eof": 1, "quit": 0, "rubbish": 2}[how]
        assert [pid for pid in pids if alive(pid)] == []


def test_a_server_whose_agent_dies_before_it_is_configured_ends() -> None:
    with Driver(configure=False, env=plain_environment()) as driver:
        driver.socket.close()
        assert driver.process.wait(LIMIT) == 1


def test_a_server_dies_with_an_agent_that_is_killed_while_torch_is_imported(tmp_path: Path) -> None:
    text = (
        "import sys, time\nfrom elasticrun.wire.spawning import start_server\n"
        "process, sock = start_server(ignored=())\nprint(process.pid, flush=True)\n"
        "time.sleep(600)\n"
    )
    agent = subprocess.Popen([sys.executable, "-c", text], stdout=subprocess.PIPE)
    pid = int(agent.stdout.readline())
    agent.kill()
    agent.wait()
    agent.stdout.close()
    assert gone([pid]) == []


def test_whom_ranks_let_read_their_stacks() -> None:
    """The agent, which has made the socket, by its pid; the kernel takes that where it has Yama."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        child = os.fork()
        if not child:
            os._exit(0 if peer_of(theirs)[0] == os.getppid() else 1)
        assert os.waitpid(child, 0)[1] == 0
        assert allow_tracer(os.getpid()) is Path("/proc/sys/kernel/yama").exists()
        allow_tracer(0)


def test_signals_to_everybody_do_not_end_the_server(tmp_path: Path) -> None:
    """From its first instruction on; ranks would end with it, in a handler that saves."""
    entry = script(tmp_path / "s.py", "raise SystemExit(3)\n")
    with Driver(entry, env=plain_environment(), cold=True) as driver:
        for signum in sp.SHIELDED:
            os.kill(driver.process.pid, signum)
        assert driver.ready().mode == "fork"
        for signum in sp.SHIELDED:
            os.kill(driver.process.pid, signum)
        assert driver.run(entry).code == 3
        assert os.getsid(driver.process.pid) == driver.process.pid


@pytest.mark.parametrize(
    ("pets", "sleeps", "code", "told"),
    [((0.5,), 600, -signal.SIGKILL, ["0.5 s"]), ((0.2, LIMIT), 2, 0, [])],
    ids=["silent", "petted"],
)
def test_an_agent_that_is_silent_loses_its_ranks(
    tmp_path: Path, pets: tuple[float, ...], sleeps: int, code: int, told: list[str]
) -> None:
    entry = script(tmp_path / "s.py", f"import time\ntime.sleep({sleeps})\n")
    with started(entry, launch="exec") as driver:
        key = driver.start(entry)
        driver.spawned(key)
        driver.socket.sendall(b"".join(encode(sp.Keepalive(limit)) for limit in pets))
        assert driver.exited(key).code == code
        said = [driver.wait(sp.Notice).text for _ in told]
        assert all(map(str.__contains__, said, told))
        assert len(driver.all_of(sp.Notice)) == len(told)


# ---------------------------------------------------------------- sweep


def test_sweep_kills_groups_and_asks_sessions_of_their_own(tmp_path: Path) -> None:
    """And kills what does not obey in its grace."""
    with started() as driver:
        for kind, code, grace in (("exit", 3, LIMIT), ("hard", -signal.SIGKILL, 0.5)):
            key, pids = start_family(driver, tmp_path, kind)
            if kind == "hard":
                driver.tell(sp.SendSignal(key, signal.SIGKILL))
            assert driver.exited(key).code == code
            began = time.monotonic()
            driver.tell(sp.SweepOrder((key,), grace))
            assert driver.wait(sp.Swept) == sp.Swept((key,), ())
            assert kind == "exit" or time.monotonic() - began >= grace
            assert [pid for pid in pids if alive(pid)] == []


def test_sweep_lets_a_descendant_finish_in_its_grace(tmp_path: Path) -> None:
    """An uploader in a session of its own writes its last rows."""
    done = tmp_path / "done"
    uploader = (
        "import os, signal, sys, time\n"
        f"def end(*a):\n    open({str(done)!r}, 'w').write('flushed')\n    sys.exit()\n"
        "signal.signal(signal.SIGTERM, end)\nprint('on', flush=True)\n"
        "while True:\n    time.sleep(0.01)\n"
    )
    entry = script(
        tmp_path / "s.py",
        "import subprocess, sys, os\n"
        f"p = subprocess.Popen([sys.executable, '-c', {uploader!r}], start_new_session=True, "
        "stdout=subprocess.PIPE)\np.stdout.readline()\nos.abort()\n",
    )
    with started(entry) as driver:
        key = driver.start(entry, stderr="/dev/null")
        assert driver.exited(key).code == -signal.SIGABRT
        driver.tell(sp.SweepOrder((key,), LIMIT))
        assert driver.wait(sp.Swept).stuck == ()
    assert done.read_text() == "flushed"


def test_sweep_spares_other_ranks_and_stores(tmp_path: Path) -> None:
    with started() as driver:
        holder, port = held_port()
        driver.tell(sp.SpawnStore(driver.new_key(), port))
        store = driver.wait(sp.StoreListening).pid
        (tmp_path / "a").mkdir()
        (tmp_path / "b").mkdir()
        key, swept = start_family(driver, tmp_path / "a", "exit")
        _, spared = start_family(driver, tmp_path / "b", "hard")
        driver.exited(key)
        driver.tell(sp.SweepOrder((key,), 0.0))
        assert driver.wait(sp.Swept).stuck == ()
        assert [pid for pid in swept if alive(pid)] == []
        assert [pid for pid in [*spared, store] if not alive(pid)] == []
        holder.close()


def test_orders_about_unknown_keys_do_nothing(server: Driver, tmp_path: Path) -> None:
    server.tell(sp.SweepOrder((987654,), 1.0))
    assert server.wait(sp.Swept, lambda said: said.keys == (987654,)) == sp.Swept((987654,), ())
    server.tell(sp.SendSignal(987654, signal.SIGKILL))
    server.tell(sp.CloseStore(987654))
    assert server.run(script(tmp_path / "s.py", "")).code == 0


# ---------------------------------------------------------------- nothing leaks


def test_lives_leave_no_descriptor_and_no_process(tmp_path: Path) -> None:
    entry = script(tmp_path / "s.py", "import os\nos.kill(os.getpid(), 9)\n")
    with started(entry) as driver:
        place = Path(f"/proc/{driver.process.pid}/fd")

        def life() -> None:
            holder, port = held_port()
            store = driver.new_key()
            driver.tell(sp.SpawnStore(store, port))
            keys = [driver.start(entry, local_rank=n) for n in range(2)]
            driver.wait(sp.StoreListening, lambda m: m.key == store)
            for key in keys:
                driver.exited(key)
            driver.tell(sp.SweepOrder(tuple(keys), 1.0))
            driver.wait(sp.Swept)
            driver.tell(sp.CloseStore(store))
            driver.exited(store)
            holder.close()

        life()
        before = len(list(place.iterdir()))
        for _ in range(15):
            life()
        assert len(list(place.iterdir())) == before
        children = Path(f"/proc/{driver.process.pid}/task/{driver.process.pid}/children")
        assert children.read_text().split() == []
        status = Path(f"/proc/{driver.process.pid}/status").read_text()
        assert "Threads:\t1\n" in status or "Threads:\t2\n" in status


@further("test_lives_leave_no_descriptor_and_no_process")
def test_many_ranks_at_once(tmp_path: Path) -> None:
    entry = script(tmp_path / "s.py", "import sys\nsys.exit(int(sys.argv[1]))\n")
    with started(entry) as driver:
        keys = {
            driver.start(Entrypoint(EntryKind.SCRIPT, entry.target, (str(n),))): n
            for n in range(16)
        }
        assert {key: driver.exited(key).code for key in keys} == keys


# ---------------------------------------------------------------- rubbish


def test_started_by_hand_it_says_so() -> None:
    done = program("-u", str(sp.SERVER_FILE))
    assert done.returncode == 2
    assert done.stderr == (
        "elasticrun fork server: this program is started by elasticrun and speaks to it alone\n"
    )


def rubbish(seed: int) -> bytes:
    """Bytes that are no conversation: each seed another way of being wrong."""
    chance = random.Random(seed)
    good = encode(sp.SendSignal(987654, 2))  # nobody's key: a rank that obeys says so at length
    ways = [
        lambda: chance.randbytes(chance.randint(5, 400)),
        lambda: (MAX_FRAME_BYTES + 1).to_bytes(4, "big"),
        lambda: b"\xff\xff\xff\xff",
        lambda: (2).to_bytes(4, "big") + b"[]",
        lambda: (4).to_bytes(4, "big") + b"null",
        lambda: _frame(b'{"type":"Quit","x":1}'),
        lambda: _frame(b'{"type":"Nothing"}'),
        lambda: _frame(b'{"type":"SendSignal","key":"1","signal":9}'),
        lambda: _frame(b'{"type":"SendSignal","key":1}'),
        lambda: _frame(b'{"type":"Sweep","keys":[1],"grace":NaN}'),
        lambda: _frame(b"[" * 100_000),
        lambda: good[: chance.randint(1, len(good) - 1)],
        lambda: good + encode(sp.SpawnStore(1, 2))[:9],
    ]
    return ways[seed % len(ways)]()


def _frame(payload: bytes) -> bytes:
    return len(payload).to_bytes(LENGTH_BYTES, "big") + payload


@pytest.mark.parametrize("seed", cases(range(26), kept=range(13)))
@pytest.mark.parametrize("configured", cases([True, False], kept=[True]))
def test_rubbish_ends_it_in_a_sentence(capfd, tmp_path: Path, seed: int, configured: bool) -> None:
    entry = script(tmp_path / "s.py", "import time\nwhile True:\n    time.sleep(60)\n")
    with Driver(entry, launch="exec", env=plain_environment(), configure=configured) as driver:
        pid = 0
        if configured:
            driver.ready()
            pid = driver.spawned(driver.start(entry)).pid
        driver.socket.sendall(rubbish(seed))
        driver.socket.shutdown(socket.SHUT_WR)
        assert driver.process.wait(LIMIT) == 2
        assert not pid or not alive(pid)
    error = capfd.readouterr().err
    assert error.startswith("elasticrun fork server: ")
    assert error.count("\n") == 1


@given(st.binary(max_size=300))
@settings(max_examples=examples(60), deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_the_frame_buffer_knows_only_messages_and_refusal(data: bytes) -> None:
    buffer = FrameBuffer(sp.ToSpawner)
    with pytest.raises(FrameError) as refused:
        list(buffer.feed(_frame(data)))
    assert 0 < len(str(refused.value)) < 300


@given(
    st.builds(
        sp.SweepOrder, st.lists(st.integers(0, 2**40), max_size=5).map(tuple), st.floats(0, 1e6)
    )
    | st.builds(sp.SendSignal, st.integers(0, 2**40), st.integers(0, 64))
    | st.builds(sp.SpawnStore, st.integers(0, 2**40), st.integers(1, 65535)),
    st.integers(1, 7),
)
@settings(max_examples=examples(30), deadline=None)
def test_what_is_encoded_is_decoded_in_any_pieces(message: object, size: int) -> None:
    data = encode(message) * 2
    buffer = FrameBuffer(sp.ToSpawner)
    heard = [m for i in range(0, len(data), size) for m in buffer.feed(data[i : i + size])]
    assert heard == [message, message]
    assert buffer.pending_bytes == 0
