"""Children: reaped, watched, swept; and signals that came before there was a loop."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import textwrap
from pathlib import Path
from types import SimpleNamespace

import pytest

from elasticrun.agent.boot import SignalInbox, SpawnerProcess
from elasticrun.agent.workers.spawner import Spawner
from elasticrun.host.system.processes import below
from elasticrun.wire import frames
from elasticrun.wire.spawning import Notice
from tests.harness import program


def in_child(tmp_path: Path, body: str) -> dict[str, object]:
    """What an agent-like process says: it reaps all its children, which a test must not."""
    script = tmp_path / "body.py"
    script.write_text(
        textwrap.dedent("""
            import asyncio, json, os, signal, subprocess, sys
            from elasticrun.agent.boot import Reaper
            from elasticrun.host.system.processes import become_subreaper, below
            SLEEP = [sys.executable, "-c", "import signal; signal.pause()"]
            def started(code):
                process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
                return process, json.loads(process.stdout.readline())
            """)
        + textwrap.dedent(body)
    )
    done = program(str(script))
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


NEST = """
import json, os, signal, subprocess, sys
deep = subprocess.Popen(
    [sys.executable, "-c", "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN);"
     "print(1, flush=True); signal.pause()"], start_new_session=True, stdout=subprocess.PIPE)
deep.stdout.readline()
print(json.dumps(deep.pid), flush=True)
signal.pause()
"""


def test_a_sweep_leaves_only_what_is_to_be_kept(tmp_path: Path) -> None:
    found = in_child(
        tmp_path,
        f"""
        become_subreaper()
        old = subprocess.Popen(SLEEP)  # the caller's own, from before
        reaper = Reaper()
        async def main():
            loop = asyncio.get_running_loop()
            loop.add_signal_handler(signal.SIGCHLD, reaper.reap)
            kept, kept_below = started({NEST!r})
            gone, gone_below = started({NEST!r})
            codes = []
            reaper.watch(gone, codes.append)
            stuck = await reaper.sweep(keep={{kept.pid}}, limit=30)
            left = below(os.getpid())
            for pid in (kept.pid, kept_below, old.pid):
                os.kill(pid, signal.SIGKILL)
            print(json.dumps({{
                "stuck": stuck, "codes": codes,
                "left": left == {{kept.pid, kept_below, old.pid}},
            }}))
        asyncio.run(main())
        """,
    )
    assert found == {"stuck": [], "codes": [-9], "left": True}


def test_orphans_are_reaped_and_a_callers_child_is_not(tmp_path: Path) -> None:
    found = in_child(
        tmp_path,
        """
        become_subreaper()
        mine = subprocess.Popen([sys.executable, "-c", "raise SystemExit(7)"])
        os.waitid(os.P_PID, mine.pid, os.WEXITED | os.WNOWAIT)
        reaper = Reaper()
        orphan = '''
        import json, os, sys
        if os.fork() == 0:
            os.setsid(); sys.stdin.read()
        else:
            print(json.dumps(0), flush=True); os._exit(3)
        '''
        import textwrap
        code = textwrap.dedent(orphan)
        process = subprocess.Popen(
            [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        async def main():
            ends = asyncio.Queue()
            reaped = asyncio.Event()
            def reap():
                reaper.reap()
                reaped.set()
            asyncio.get_running_loop().add_signal_handler(signal.SIGCHLD, reap)
            reaper.watch(process, ends.put_nowait)
            reap()
            code = await ends.get()
            orphans = below(os.getpid(), without={mine.pid})
            process.stdin.close()  # the orphan ends, and is ours to reap by now
            while below(os.getpid(), without={mine.pid}):
                reaped.clear()
                await asyncio.wait_for(reaped.wait(), 240)
            print(json.dumps({"code": code, "orphans": len(orphans), "mine": mine.wait()}))
        asyncio.run(main())
        """,
    )
    assert found == {"code": 3, "orphans": 1, "mine": 7}


def test_below_names_grandchildren() -> None:
    code = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'print(1, flush=True);" \
        "import sys; sys.stdin.read()'])"  # fmt: skip
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as child:
        child.stdout.readline()
        found = below(os.getpid())
        assert child.pid in found
        assert len(below(child.pid)) == 1
        assert below(child.pid) <= found
        assert below(os.getpid(), without={child.pid}).isdisjoint(below(child.pid) | {child.pid})
        child.stdin.close()


# ---------------------------------------------------------------- signals


@pytest.mark.parametrize(
    ("deaths", "early", "late"),
    [
        (("SIGTERM", "SIGHUP"), ("SIGHUP", "SIGUSR1", "SIGTERM"), "SIGUSR2"),
        (("SIGUSR1",), (), "SIGUSR1"),
    ],
)
def test_signals_from_before_the_loop_are_handed_over_in_order(
    deaths: tuple[str, ...], early: tuple[str, ...], late: str
) -> None:
    """A listed one is a death signal, and no other."""
    inbox = SignalInbox(deaths)
    before = signal.getsignal(signal.SIGTERM)
    inbox.install()
    try:
        for name in early:
            os.kill(os.getpid(), signal.Signals[name])
        seen: list[tuple[str, bool]] = []
        inbox.attach(
            lambda number, death: seen.append((signal.Signals(number).name, death)), lambda: None
        )
        os.kill(os.getpid(), signal.Signals[late])
    finally:
        inbox.restore()
    assert seen == [(name, name in deaths) for name in (*early, late)]
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.parametrize("name", ["SIGKILL", "SIGNOTHING", "SIG_BLOCK"])
def test_what_cannot_be_handled_is_named(name: str) -> None:
    inbox = SignalInbox((name, "SIGTERM"))
    inbox.install()
    inbox.restore()
    assert inbox.unknown == [name]


def test_a_hung_thread_does_not_hold_up_the_loop() -> None:
    from elasticrun.agent.runtime import in_thread

    read, write = os.pipe()

    async def main() -> str:
        with pytest.raises(TimeoutError):
            await in_thread(lambda: os.read(read, 1), limit=0.05)
        return await in_thread(lambda: "other work")

    try:
        assert asyncio.run(main()) == "other work"
    finally:
        os.close(write)  # lets the thread go


def test_a_spawner_that_was_reaped_is_heard_out_at_once() -> None:
    """What it said lies in the socket, whoever may still hold the other end."""
    heard: list[object] = []

    async def play() -> None:
        ours, theirs = socket.socketpair()
        hear = lambda _, message: heard.append(message)  # noqa: E731
        spawner = Spawner(
            SpawnerProcess(ours, None), SimpleNamespace(on_message=hear, on_close=hear)
        )
        said = [Notice(str(number) * 1000) for number in range(100)]
        theirs.sendall(b"".join(map(frames.encode, said)))
        spawner.drain("exit code 3")
        assert heard == [*said, "exit code 3"]
        assert spawner.ended.is_set()
        theirs.close()

    asyncio.run(play())
