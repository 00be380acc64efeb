"""Nothing that the agent has under way ends unheard: tasks, threads, effects, callbacks."""

from __future__ import annotations

import ast
import asyncio
import logging
import re
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from elasticrun.agent import node, runtime
from elasticrun.agent.link import identity, master_process
from elasticrun.agent.runtime import AgentLoop, Tasks, in_thread, own_defect
from elasticrun.config import EXIT_FAILED
from elasticrun.core import events as fx
from elasticrun.host import user_folder
from elasticrun.host.log import StderrWriter
from elasticrun.host.system.sandbox import NoThread
from tests.agent.configs import node_context
from tests.harness import LIMIT

AGENT = Path(runtime.__file__).parent

# ---------------------------------------------------------------- threads


def no_threads(monkeypatch, failures: float) -> list[str]:
    """The first so many starts fail, as where pids.max is reached; the names of those."""
    really, failed = threading.Thread.start, []

    def start(thread: threading.Thread) -> None:
        if thread.name.startswith("elasticrun-") and len(failed) < failures:
            failed.append(thread.name)
            raise RuntimeError("can't start new thread")
        really(thread)

    monkeypatch.setattr(threading.Thread, "start", start)
    return failed


def test_a_thread_that_cannot_be_started_is_tried_again(monkeypatch) -> None:
    monkeypatch.setattr(runtime, "FIRST_TRY", 0.001)
    failed = no_threads(monkeypatch, 3)
    assert asyncio.run(in_thread(lambda: "done", name="some")) == "done"
    assert failed == ["elasticrun-some"] * 3


def test_without_threads_there_is_an_end_with_a_sentence(monkeypatch) -> None:
    monkeypatch.setattr(runtime, "THREAD_LIMIT", 0.01)
    no_threads(monkeypatch, float("inf"))
    with pytest.raises(NoThread, match="too many processes or threads"):
        asyncio.run(in_thread(lambda: "done"))
    with pytest.raises(TimeoutError):  # whoever waits with a limit knows what to do
        asyncio.run(in_thread(lambda: "done", limit=0.005))


async def test_what_comes_too_late_is_given_back() -> None:
    """While the loop runs; the next test has one that is over by then."""
    go = threading.Event()
    back: list[str] = []
    given = asyncio.Event()
    loop = asyncio.get_running_loop()

    def late(result: str) -> None:
        back.append(result)
        loop.call_soon_threadsafe(given.set)

    with pytest.raises(TimeoutError):
        await in_thread(lambda: str(go.wait(LIMIT)), limit=0.01, late=late)
    go.set()
    await asyncio.wait_for(given.wait(), LIMIT)
    assert back == ["True"]


def test_a_place_of_a_node_that_does_not_answer(monkeypatch, caplog) -> None:
    """A dead file server holds the lock of the node's id: it starts without, and says so."""
    go, released = threading.Event(), threading.Event()

    class Slot:
        def release(self) -> None:
            released.set()

    def identify(*_: object) -> identity.NodeId:
        go.wait(LIMIT)
        return identity.NodeId("late", Slot())

    monkeypatch.setattr(node, "identify", identify)
    monkeypatch.setattr(node, "SLOT_LIMIT", 0.01)

    async def body() -> str:
        one = object.__new__(node.NodeAgent)
        one._shared = node_context(writer=StderrWriter())
        one._events = SimpleNamespace()
        await one._identify()
        return one._shared.identity.node_id

    assert re.search("-[0-9a-f]{8}$", asyncio.run(body()))
    assert "no user folder (the disk has not answered" in caplog.text
    go.set()
    assert released.wait(LIMIT)


def test_a_record_on_a_disk_that_does_not_answer(monkeypatch, caplog) -> None:
    """A hosted master runs without one, and says so."""
    go = threading.Event()

    def make(_: object) -> None:
        go.wait(LIMIT)
        raise OSError("gone")

    monkeypatch.setattr(user_folder, "make_launch_folder", make)
    monkeypatch.setattr(master_process, "RECORD_WAIT", 0.01)
    assert master_process.new_record() is None
    go.set()
    assert "keeps no record: the disk has not answered for 0.01 s" in caplog.text


# ---------------------------------------------------------------- tasks


async def test_a_task_that_fails_ends_the_node_or_is_told(caplog) -> None:
    async def failing(error: Exception) -> None:
        raise error

    ends: list[str] = []
    told: list[str] = []
    tasks = Tasks(ends.append)
    tasks.start(failing(KeyError("it")), "reporting")
    tasks.start(failing(NoThread(RuntimeError("no thread"))), "starting")
    tasks.start(failing(ValueError("x")), "copying", on_failure=told.append)
    waiting = tasks.start(asyncio.Event().wait(), "waiting")
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    tasks.close()
    await asyncio.wait({waiting})
    assert waiting.cancelled()
    refused = str(NoThread(RuntimeError("no thread")))
    assert ends == ["reporting failed: KeyError('it')", f"starting failed: {refused}"]
    assert told == ["copying failed: ValueError('x')"]
    assert "a bug in elasticrun: reporting failed" in caplog.text
    assert "starting" not in caplog.text  # the limit of processes is no defect of ours


OWNED_ELSEWHERE = {
    ("fetching.py", "_check"): "whoever asks awaits it",
    ("fetching.py", "_pass_over"): "whoever asks awaits it",
    ("runtime.py", "awaited"): "who calls it is looked at, too",
}


def test_every_task_has_an_owner() -> None:
    """In the agent a task is awaited where it is made, or its failure is told."""
    makers = {"create_task", "ensure_future", "awaited"}
    for file in sorted(AGENT.rglob("*.py")):
        for function in ast.walk(ast.parse(file.read_text())):
            if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            nodes = list(ast.walk(function))
            calls = {
                node.func.attr if isinstance(node.func, ast.Attribute) else node.func.id
                for node in nodes
                if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute | ast.Name)
            }
            awaits = any(isinstance(node, ast.Await) for node in nodes)
            if not calls & makers or awaits or calls & {"report_failure", "retrieve_failure"}:
                continue
            assert (file.name, function.name) in OWNED_ELSEWHERE, f"{file.name}: {function.name}"


# ---------------------------------------------------------------- effects and callbacks


class Brain:
    """Says what it is told to, or raises it."""

    def __init__(self, *answers: list[fx.AgentEffect] | Exception) -> None:
        self._answers = list(answers)

    def step(self, event: fx.AgentEvent, now: float) -> list[fx.AgentEffect]:
        answer = self._answers.pop(0) if self._answers else [fx.Exit(0, "over", (), 0)]
        if isinstance(answer, Exception):
            raise answer
        return answer

    def next_deadline(self) -> float | None:
        return time.monotonic()


def end_of(brain: Brain, perform: Callable[[fx.AgentEffect], None]) -> fx.Exit:
    async def whole() -> fx.Exit:  # the loop is made where one runs
        return await AgentLoop(brain, SimpleNamespace(perform=perform)).run()

    return asyncio.run(whole())


def test_a_brain_that_fails_ends_the_node() -> None:
    outcome = end_of(Brain(KeyError("a fact")), lambda effect: None)
    assert outcome.code == EXIT_FAILED
    assert outcome.reason.startswith("a bug in elasticrun, please report it: Tick could not")
    assert isinstance(fx.Tick(), fx.Tick)


def failing_at(kind: type) -> tuple[list[str], Callable[[fx.AgentEffect], None]]:
    done: list[str] = []

    def perform(effect: fx.AgentEffect) -> None:
        if isinstance(effect, kind):
            raise ValueError("a defect")
        done.append(type(effect).__name__)

    return done, perform


def test_an_effect_that_fails_is_told_and_the_next_is_carried_out(caplog) -> None:
    note = fx.Note("info", "x")
    done, perform = failing_at(fx.ReleaseStore)
    effects: list[fx.AgentEffect] = [fx.ReleaseStore(None), note]
    assert end_of(Brain(effects), perform).reason == "over"
    assert done == ["Note"]
    assert "cannot execute ReleaseStore" in caplog.text
    outcome = end_of(Brain(effects, effects, effects), perform)
    assert "cannot execute ReleaseStore" in outcome.reason


def test_an_effect_that_the_brain_waits_for_ends_the_node_if_it_fails() -> None:
    _, perform = failing_at(fx.SweepRanks)
    outcome = end_of(Brain([fx.SweepRanks(1.0)]), perform)
    assert outcome.code == EXIT_FAILED
    assert "cannot execute SweepRanks" in outcome.reason


async def test_a_callback_of_ours_is_told_from_one_of_others() -> None:
    seen: list[Exception | None] = []
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: seen.append(own_defect(context)))
    loop.call_soon(runtime.own_defect, None)  # fails in a file of ours
    loop.call_soon(int, "x")
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    loop.set_exception_handler(None)  # it goes on in the next test
    ours, others = seen
    assert isinstance(ours, AttributeError)
    assert others is None


# ---------------------------------------------------------------- the log folder


def test_a_log_folder_that_does_not_answer_ends_the_start(monkeypatch, caplog) -> None:
    go = threading.Event()
    monkeypatch.setattr(node, "DISK_LIMIT", 0.1)
    monkeypatch.setattr(runtime, "SLOW_DISK", 0.01)
    fatal: list[str] = []

    class Output:
        def prepare(self) -> None:
            go.wait(LIMIT)

    class Checkup:
        def start(self) -> None: ...

    one = object.__new__(node.NodeAgent)
    one._shared = node_context()
    one._checkup, one._output = Checkup(), Output()
    one.fatal = fatal.append
    with caplog.at_level(logging.WARNING, logger="elasticrun"):
        asyncio.run(one._start_up(None))
    go.set()
    assert fatal == ["--log-dir /dev/null: the disk has not answered for 0.1 s"]
    assert "the disk does not answer" in caplog.text
