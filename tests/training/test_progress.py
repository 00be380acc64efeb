"""`progress` in real ranks, and what it must never do to a script."""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from elasticrun.training import reporting
from elasticrun.training.reporting import ProgressReporter
from elasticrun.wire.progress import Own, RankQuiet, RankRows, place
from tests import needs
from tests.further import further
from tests.harness import LIMIT, Launched, World, clean_environment, program
from tests.training.ranks import Listener, listening, start_ranks


def check_own_parts(ranks: list[Launched], listener: Listener) -> None:
    """Rank 1 has twenty times more to do in each step than rank 0."""
    fast, slow = listener.owns(4)
    assert [rank.wait() for rank in ranks] == [0, 0]
    # of several, those in which no rank stood still for reasons of its own
    assert min(one.own for one in slow) > 1.5 * min(one.own for one in fast)
    assert min(one.waited for one in slow) < max(one.waited for one in fast)
    for said in (fast, slow):  # the whole step, which the slow rank makes long
        assert max(one.own + one.waited for one in said) >= 0.1


@further("health/test_slow_nodes::test_a_straggler_is_swapped_for_a_spare")
def test_the_slow_rank_has_the_longer_own_part(world: World, listener: Listener) -> None:
    check_own_parts(start_ranks(world, listener, "60", "0.01", "1=0.2"), listener)


def test_the_own_part_with_a_backend_that_does_not_record_itself(
    world: World, listener: Listener
) -> None:
    """As NCCL is since torch 2.15: a hook records its collectives."""
    needs.hooked_backends()
    check_own_parts(start_ranks(world, listener, "60", "0.01", "1=0.2", "stored"), listener)


@further("training/test_recorder::test_the_ring_is_small_only_where_no_accelerator_is")
def test_the_ring_is_small_though_torch_was_there_before(world: World, listener: Listener) -> None:
    """As below a fork server, where torch was imported long before the script. The ring is that of
    a host without accelerators."""
    ranks = start_ranks(world, listener, "300", "0", "early")
    assert [rank.wait() for rank in ranks] == [0, 0]
    (kept,) = (int(rank.stdout.split()[1]) for rank in ranks if rank.stdout)
    accelerated = any(Path(path).exists() for path in reporting.recorder.ACCELERATORS)
    assert kept == int(reporting.recorder.SMALL_RING) or (accelerated and kept > 300)


@further("training/test_recorder::test_what_the_user_has_set_stands")
def test_a_recorder_that_is_off_leaves_the_step_time(world: World, listener: Listener) -> None:
    ranks = start_ranks(world, listener, "60", "0.01", env={"TORCH_FR_BUFFER_SIZE": "0"})
    said = [listener.next() for _ in range(4)]
    assert [rank.wait() for rank in ranks] == [0, 0]
    assert {one.knows for one in said} == {Own.UNAVAILABLE}
    assert all(one.seconds >= 0.01 for one in said)


@further(
    "test_planted_slowness_does_not_grow_by_standing_still",
    "health/test_slow_nodes::test_a_straggler_is_swapped_for_a_spare",
)
def test_a_planted_slowness_makes_the_own_part_longer(world: World, listener: Listener) -> None:
    ranks = start_ranks(
        world, listener, "60", "0.02", "1=0.02", env={"ELASTICRUN_NODE_FAULT": "slow=3x"}
    )
    one, other = (said[-1] for said in listener.owns(12))
    assert [rank.wait() for rank in ranks] == [0, 0]
    assert one.own >= 0.055
    assert other.own >= 0.055


@pytest.mark.parametrize(
    ("step", "told"),
    [
        ("1", []),
        (
            "1, loss=0.5",
            [],
        ),
        (
            "'x'",  # once; there is nobody else who could tell the script
            [
                "tells.py:4: UserWarning: elasticrun: progress() is given 'x' (a str): it needs "
                "the number of the step, and reports nothing until it gets one",
                "  progress('x'); progress('x')",
            ],
        ),
    ],
)
def test_without_an_agent_nothing_is_done_and_nothing_imported(
    step: str, told: list[str], tmp_path: Path
) -> None:
    code = (
        "import os, sys; before = dict(os.environ)\n"
        "from elasticrun.training import progress\n"
        f"progress({step}); progress({step})\n"
        "assert dict(os.environ) == before\n"
        "assert not {'torch', 'grpc', 'asyncio', 'threading'} & (set(sys.modules) - early)\n"
    )
    tells = tmp_path / "tells.py"
    tells.write_text("import sys; early = set(sys.modules)\n" + code)
    done = program(str(tells), env=clean_environment())
    said = done.stderr.replace(f"{tmp_path}/", "").splitlines()
    assert (done.returncode, said) == (0, told)


def test_metrics_of_the_first_rank_are_rows(
    listener: Listener, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "0")
    teller = ProgressReporter(place(listener.name, 0))
    teller.report_metrics(3, {"loss": 0.25, "acc": True, "step": 7, "bad\n": 1, "big": 10**40})
    said = listener.next()
    assert isinstance(said, RankRows)
    assert said.names == ("loss", "acc", "big", "step_")
    ((step, _, values),) = said.rows
    assert (step, values) == (3, ("0.25", "1.0", "1e+40", "7"))
    with pytest.raises(ValueError, match="could not convert"):
        teller.report_metrics(3, {"loss": "low"})
    for step in range(1000):  # more than goes: the newest are kept, and what was not is counted
        teller.report_metrics(step, {"loss": float("nan")})
    sent = [said for said in listener.waiting() if isinstance(said, RankRows)]
    assert len(sent) <= reporting.BURST + 5
    assert [row[0] for said in sent for row in said.rows][:10] == list(range(10))
    assert teller._rows is not None
    assert teller._rows._rows[-1][:1] == (999,)
    assert teller._rows._dropped > 500
    monkeypatch.setenv("RANK", "1")
    ProgressReporter(place(listener.name, 1)).report_metrics(3, {"loss": 0.25})
    assert listener.waiting() == []
    teller.close()


QUIET = """
import threading
from elasticrun.training import progress, quiet
progress(1)
with quiet("judge", minutes=20):
    with quiet(" a\\nlong  word " + "x" * 99, minutes=1):
        progress(2)
    thread = threading.Thread(target=quiet("other", minutes=1e9)(lambda: None))
    thread.start()
    thread.join()
try:
    with quiet("fails", minutes=3):
        raise KeyError("of the script")
except KeyError:
    with quiet("wrong", minutes=-1), quiet("wrong", minutes="x"):
        print("ok")
"""


def test_what_takes_long_on_purpose_is_told_by_name(listener: Listener) -> None:
    """Of several the innermost, and the longest limit; then that it is over."""
    env = {**clean_environment(), "ELASTICRUN_PROGRESS": place(listener.name, 3)}
    done = program("-c", QUIET, env=env)
    assert (done.returncode, done.stdout) == (0, "ok\n"), done.stderr
    assert done.stderr.count("UserWarning: elasticrun: quiet() got an invalid minutes=") == 2
    told = [one for one in listener.waiting() if isinstance(one, RankQuiet)]
    assert [(one.what, round(one.seconds / 60)) for one in told] == [
        ("judge", 20),
        ("a long word " + "x" * 52, 20),
        ("judge", 20),
        ("other", 24 * 60),
        ("judge", 20),
        ("", 0),
        ("fails", 3),
        ("", 0),
    ]
    assert {one.local_rank for one in told} == {3}
    alone = program("-c", QUIET, env=clean_environment())
    assert (alone.returncode, alone.stdout) == (0, "ok\n"), alone.stderr


def test_what_is_no_agents_place_is_no_trouble() -> None:
    code = "from elasticrun.training import progress\nfor n in range(3): progress(n)\nprint('ok')"
    for wrong in ("", "nonsense", "no-such-socket/0", "x/y", "a" * 300 + "/0"):
        done = program("-c", code, env={**clean_environment(), "ELASTICRUN_PROGRESS": wrong})
        assert (done.returncode, done.stdout, done.stderr) == (0, "ok\n", "")


@pytest.fixture
def listener() -> Iterator[Listener]:
    with listening() as made:
        yield made


@pytest.fixture
def eager(monkeypatch) -> None:
    """A datagram for every step."""
    monkeypatch.setattr(reporting, "SEND_EVERY", 0.0)


@pytest.mark.usefixtures("eager")
def test_a_full_queue_does_not_block_and_no_step_is_lost(listener: Listener) -> None:
    teller = ProgressReporter(place(listener.name, 3))
    began = time.monotonic()
    for number in range(20_001):
        teller.report_step(number)
    assert time.monotonic() - began < LIMIT
    first = listener.waiting()
    assert 1 <= len(first) < 20_000
    teller.report_step(20_001)
    (last,) = listener.waiting()
    teller.close()
    assert sum(one.steps for one in (*first, last)) == 20_001
    assert (last.step, last.local_rank) == (20_001, 3)


def test_planted_slowness_does_not_grow_by_standing_still(monkeypatch, listener: Listener) -> None:
    """Steps of 20 ms, three times as long; before the last but one all stood still for 15 s."""
    slept: list[float] = []
    now = 100.0

    def sleep(seconds: float) -> None:
        nonlocal now
        slept.append(seconds)
        now += seconds

    clock = SimpleNamespace(
        monotonic=lambda: now,
        time_ns=lambda: int(now * 1e9),
        thread_time=time.thread_time,
        sleep=sleep,
    )
    monkeypatch.setattr(reporting, "time", clock)
    teller = ProgressReporter(place(listener.name, 0), slowness=3.0)
    for still in (0.0, 0.0, 0.0, 15.0, 0.0):
        teller.report_step(0)
        now += 0.02 + still
    teller.report_step(0)
    teller.close()
    assert slept == pytest.approx([0.04] * 5)


@pytest.mark.usefixtures("eager")
def test_an_agent_that_has_gone_is_no_trouble() -> None:
    listener = Listener()
    teller = ProgressReporter(place(listener.name, 0))
    teller.report_step(0)
    listener.close()
    for number in range(1, 100):
        teller.report_step(number)
    teller.close()


@pytest.mark.usefixtures("eager")
def test_a_step_that_is_no_number_is_dropped(monkeypatch, listener: Listener) -> None:
    monkeypatch.setattr(reporting, "_reporter", ProgressReporter(place(listener.name, 0)))
    monkeypatch.setattr(reporting, "_warned", False)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for odd in (0, "one", 2**80, None, 4):
            reporting.progress(odd)
    assert [(str(one.message)[:46], one.filename) for one in told] == [
        ("elasticrun: progress() is given 'one' (a str):", __file__)
    ]
    said = listener.waiting()
    assert [one.step for one in said] == [4]
    assert said[0].steps == 4


@pytest.mark.usefixtures("eager")
def test_a_process_without_a_group_says_that_it_is_alone(listener: Listener) -> None:
    teller = ProgressReporter(place(listener.name, 0))
    teller.report_step(0)
    teller.report_step(1)
    (said,) = listener.waiting()
    teller.close()
    assert said.knows is Own.ALONE
    assert (said.steps, said.step) == (1, 1)
    assert 0.0 <= said.seconds < 60.0


def test_many_quick_steps_are_one_datagram(listener: Listener) -> None:
    teller = ProgressReporter(place(listener.name, 0))
    for number in range(1000):
        teller.report_step(number)
    said = listener.waiting()
    teller.close()
    assert 1 <= len(said) < 100
