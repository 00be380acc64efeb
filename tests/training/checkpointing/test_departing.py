"""What a rank does when a node leaves, and with signals that come to it."""

from __future__ import annotations

from typing import cast

import pytest

from elasticrun.snapshots.shm.segment import NONE
from elasticrun.training.checkpointing import agent_connection
from elasticrun.training.checkpointing.agent_connection import (
    AgentConnection,
    DeferredSignals,
    Departure,
)
from elasticrun.wire.snapshots import FromRank, StepMissed
from tests.harness import program


class Said:
    """Stands for the line to the agent: what was said on it."""

    def __init__(self) -> None:
        self.messages: list[FromRank] = []

    def send(self, message: FromRank) -> None:
        self.messages.append(message)


def rank(at: int) -> tuple[Departure, list[FromRank]]:
    """One that goes on from step `at`."""
    said = Said()
    made = Departure(cast(AgentConnection, said), (), DeferredSignals())
    made.resume_from(at)
    return made, said.messages


def test_the_step_that_was_named_is_saved_once() -> None:
    one, said = rank(0)
    assert [one.reach_step(3, step) for step in range(1, 7)] == [
        False,
        False,
        True,
        *[False] * 3,
    ]
    assert not said


def test_a_script_that_calls_for_some_steps_saves_the_first_one_after_it() -> None:
    """All ranks call for the same ones, so whoever has seen it late does the same."""
    early, _ = rank(0)
    late, said = rank(0)
    asked = [early.reach_step(13, 10), early.reach_step(13, 20)]
    assert asked == [late.reach_step(NONE, 10), late.reach_step(13, 20)] == [False, True]
    assert not said


def test_a_rank_that_is_past_it_says_so_and_is_given_another() -> None:
    one, said = rank(0)
    assert not one.reach_step(NONE, 5)
    assert not one.reach_step(5, 6)
    assert not one.reach_step(5, 7)
    assert said == [StepMissed(5, 6)]
    assert [
        one.reach_step(9, 8),
        one.reach_step(9, 9),
        one.reach_step(9, 10),
    ] == [False, True, False]


def test_what_could_not_be_saved_counts_as_missed() -> None:
    one, said = rank(0)
    assert one.reach_step(1, 1)
    one.report_save(1, saved=False)
    assert said == [StepMissed(1, 1)]
    assert not one.reach_step(1, 2)


SCRIPT = """
import os, signal, sys
from elasticrun.training.checkpointing import agent_connection
from elasticrun.training.checkpointing.agent_connection import Departure, DeferredSignals

class Line:
    def send(self, message): print(message, flush=True)

agent_connection.STEP_REQUEST_LIMIT = agent_connection.REPEAT_WITHIN = 240.0
rank = Departure(Line(), (15, 10), DeferredSignals())
me = os.getpid()
def step(number, asked=-1):
    return rank.reach_step(asked, number)
rank.resume_from(0)
{body}
print("went on", flush=True)
"""


def ended(body: str) -> tuple[int, list[str]]:
    """How a process ended, and what it has said."""
    done = program("-c", SCRIPT.format(body=body))
    assert not done.stderr, done.stderr
    return done.returncode, done.stdout.splitlines()


PUTS_OFF, NONE_ANY_MORE = "PutsOff(signals=(10, 15))", "PutsOff(signals=())"
ITS_OWN = ("PutsOff(signals=(10,))", "mine", "went on")  # the script's handler of SIGTERM

ENDS = {
    # what it is: (how the process ends, what it says beside PUTS_OFF, what it does)
    "a signal waits for the step that is asked for": (-15, ("saved",), """
os.kill(me, signal.SIGTERM)
assert [step(1), step(2, 3), step(3, 3)] == [False, False, True]
rank.report_save(3, saved=True)
assert rank.is_ending
print("saved", flush=True)
rank.exit_by_signal()
"""),
    "a signal that comes after that ends the next step": (-10, (), """
assert step(1, 1)
rank.report_save(1, saved=True)
assert not rank.is_ending
os.kill(me, signal.SIGUSR1)
step(2, 1)
"""),
    "without a word a snapshot is taken all the same": (-15, (), """
os.kill(me, signal.SIGTERM)
assert not step(1)
agent_connection.STEP_REQUEST_LIMIT = 0.0
assert step(2)
rank.report_save(2, saved=True)
rank.exit_by_signal()
"""),
    "a script with a handler of its own is left alone": (0, ("went on",), """
caught = []
handler = lambda *_: caught.append(1)
signal.signal(signal.SIGHUP, handler)
assert DeferredSignals().install([signal.SIGHUP, signal.SIGINT]) == ()
os.kill(me, signal.SIGHUP)
assert caught == [1]
"""),
    # the agent is told, and gives it its time when it ends this rank
    "a handler that the script installs later is its own": (0, ITS_OWN, """
step(1)
signal.signal(signal.SIGTERM, lambda *_: print("mine", flush=True))
step(2)
step(3)
os.kill(me, signal.SIGTERM)
"""),
    "a signal that came before such a handler is given to it once": (0, ITS_OWN, """
assert step(1, 1)
rank.report_save(1, saved=True)
os.kill(me, signal.SIGTERM)
signal.signal(signal.SIGTERM, lambda *_: print("mine", flush=True))
step(2, 1)
step(3, 1)
assert not rank.is_ending
"""),
    "a signal is obeyed from any thread": (-15, (), """
import threading
os.kill(me, signal.SIGTERM)
other = threading.Thread(target=rank.exit_by_signal)
other.start()
other.join()
threading.Event().wait(60)
"""),
    # another rank could not save the first one, and cannot get to the next without this one
    "a rank that has saved goes on to another step that is named": (-15, ("saved",), """
assert step(3, 3)
rank.report_save(3, saved=True)
os.kill(me, signal.SIGTERM)
assert [step(4, 5), step(5, 5)] == [False, True]
rank.report_save(5, saved=True)
print("saved", flush=True)
step(6, 5)
"""),
    "a rank that could not save waits for another step": (-15, ("StepMissed(asked=3, step=3)",), """
os.kill(me, signal.SIGTERM)
assert step(3, 3)
rank.report_save(3, saved=False)
assert not rank.is_ending
assert [step(4, 3), step(5, 6), step(6, 6)] == [False, False, True]
rank.report_save(6, saved=True)
assert rank.is_ending
rank.exit_by_signal()
"""),
    "who is asked by nobody ends though it cannot save": (-15, ("StepMissed(asked=1, step=1)",), """
assert step(1, 1)
rank.report_save(1, saved=False)
os.kill(me, signal.SIGTERM)
agent_connection.STEP_REQUEST_LIMIT = 0.0
assert step(2, 1)
rank.report_save(2, saved=False)
assert rank.is_ending
rank.exit_by_signal()
"""),
    "what is closed puts nothing off": (-15, (NONE_ANY_MORE,), """
rank.close()
rank.close()
os.kill(me, signal.SIGTERM)
"""),
    "what was put off is obeyed when training is over": (-15, (NONE_ANY_MORE,), """
os.kill(me, signal.SIGTERM)
step(1)
rank.close()
"""),
    "only a main thread has signals": (0, ("went on",), """
import threading
found = []
other = threading.Thread(target=lambda: found.append(DeferredSignals().install([signal.SIGHUP])))
other.start()
other.join()
assert found == [()]
"""),
}  # fmt: skip


@pytest.mark.parametrize("name", ENDS)
def test_how_a_rank_ends(name: str) -> None:
    code, said, body = ENDS[name]
    assert ended(body) == (code, [PUTS_OFF, *said])


def test_a_second_signal_is_obeyed_at_once() -> None:
    for first, second in ((10, 10), (10, 15), (15, 10)):
        body = f"os.kill(me, {first})\nos.kill(me, {second})"
        assert ended(body) == (-second, [PUTS_OFF])
    body = "agent_connection.REPEAT_WITHIN = 0\n" + "os.kill(me, signal.SIGTERM)\n" * 2
    assert ended(body) == (-15, [PUTS_OFF])


IN_ANOTHER_THREAD = """
import threading
nothing, _ = os.pipe()
def end():
    while open(f"/proc/self/task/{me}/syscall").read().split()[1:2] != [hex(nothing)]:
        os.sched_yield()
    rank.exit_by_signal()
threading.Thread(target=end).start()
os.read(nothing, 1)
"""
"""A thread ends a rank whose main thread waits in the kernel."""


@pytest.mark.parametrize("ends_in", ["rank.exit_by_signal()", IN_ANOTHER_THREAD])
def test_a_sigterm_that_is_said_again_is_no_second_one(ends_in: str) -> None:
    """Slurm does so within milliseconds, at a time limit."""
    body = f"""
os.kill(me, signal.SIGTERM)
os.kill(me, signal.SIGTERM)
assert [step(1), step(2, 3), step(3, 3)] == [False, False, True]
os.kill(me, signal.SIGTERM)
rank.report_save(3, saved=True)
print("saved", flush=True)
{ends_in}
"""
    assert ended(body) == (-15, [PUTS_OFF, "saved"])


@pytest.mark.parametrize("fork", ["os.fork()", "0"])
def test_a_child_obeys_at_once(fork: str) -> None:
    """A worker of a data loader is ended by SIGTERM, as ever; its parent goes on."""
    body = f"""
child = {fork}
if child == 0 and "{fork}" != "0":
    os.kill(os.getpid(), signal.SIGTERM)
    os._exit(3)
if child:
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -15
else:
    import subprocess
    slow = subprocess.Popen(["sleep", "100"])
    slow.terminate()
    assert slow.wait() == -15
"""
    assert ended(body) == (0, [PUTS_OFF, "went on"])


def test_a_handler_that_python_does_not_know_of_is_left_alone() -> None:
    body = """
import faulthandler
faulthandler.register(signal.SIGHUP, file=sys.stdout)
assert signal.getsignal(signal.SIGHUP) == signal.SIG_DFL
assert DeferredSignals().install([signal.SIGHUP]) == ()
os.kill(me, signal.SIGHUP)
"""
    code, lines = ended(body)
    assert (code, lines[0], lines[-1]) == (0, PUTS_OFF, "went on")
    assert any("most recent call first" in line for line in lines)


def test_an_older_one_takes_nothing_back() -> None:
    body = """
put_off = DeferredSignals()
older = Departure(Line(), (1,), put_off)
newer = Departure(Line(), (1,), put_off)
older.close()
os.kill(me, signal.SIGHUP)
assert put_off.pending_for is not None
newer.close()
"""
    said = "PutsOff(signals=(1,))"
    assert ended(body) == (-1, [PUTS_OFF, said, said, NONE_ANY_MORE])


WITH_AN_AGENT = """
import os, signal, threading
from dataclasses import replace
from elasticrun.training.checkpointing import backends
from elasticrun.training import Checkpointer
from elasticrun.wire.snapshots import AwaitRoom
from tests.training.checkpointing.played import NOTHING, playing

backends.WHOLE_LIMIT = 240.0
with playing() as agent:
    agent.resume, agent.watermark = replace(NOTHING, put_off=(15,)), False
    os.environ["ELASTICRUN_SNAPSHOTS"] = agent.place(0)
    state, none = {"x": 1}, None
    ckpt = Checkpointer("/nowhere", n=state, every_steps=100, persist_every_seconds=none, slots=3)
    ckpt.save_now(1)
    segment = agent.current[0].segment
    segment.save_at = 3
    os.kill(os.getpid(), signal.SIGTERM)

    def name_another():
        agent.until(AwaitRoom)
        agent.watermark, segment.save_at = True, 5
        agent.look()

    threading.Thread(target=name_another, daemon=True).start()
    for number in range(2, 7):
        ckpt.step(number)
        print(number, flush=True)
"""


@pytest.mark.slow
def test_a_rank_that_waits_for_the_others_hears_that_another_step_is_named() -> None:
    done = program("-c", WITH_AN_AGENT)
    assert (done.returncode, done.stdout.split()) == (-15, ["2", "3", "4"]), done.stderr


def test_limits_are_below_those_of_the_agent() -> None:
    from elasticrun.config import DEPARTURE_GRACE

    assert agent_connection.REQUESTED_LIMIT + agent_connection.WHOLE_LIMIT < DEPARTURE_GRACE
