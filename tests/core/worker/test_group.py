"""The agent's brain by hand, one event after another. Whole lives are in scripts/.

`python -m tests.core.worker.test_group` writes the table of docs/states.md."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from msgspec.structs import replace

from elasticrun.config import (
    EXIT_FAILED,
    EXIT_FINAL,
    SPAWN_TIMEOUT,
)
from elasticrun.core import events as fx
from elasticrun.core.reasons import Leaves, SpawnLate
from elasticrun.core.worker.ranks import MAX_LOSSES
from elasticrun.core.worker.states import Rules, State, UnexpectedEvent, tabulate
from elasticrun.wire import messages as m
from elasticrun.wire.types import Endpoint, RoundName
from tests.core.by_hand import (
    FINISHED,
    NEXT,
    ROUND,
    START,
    STOPPED,
    STORE,
    WELCOME,
    Agent,
    ended,
    own,
)
from tests.starts import changed

RULES = Agent().group.rules()

PAGE = Path(__file__).parents[3] / "docs/states.md"


def test_every_pair_is_listed_or_raises() -> None:
    table = tabulate(RULES)
    kinds = {kind for _, kind in table}
    missing = [(s, k) for s, k in itertools.product(State, kinds) if (s, k) not in table]
    impossible = {fx.RankSpawned, fx.RankExited, fx.RanksSwept}
    assert {kind for _, kind in missing} == impossible, "all else can happen at any time"
    agent = Agent().joined()
    with pytest.raises(UnexpectedEvent, match="joined cannot be told RanksSwept"):
        agent.feed(fx.RanksSwept(()))
    with pytest.raises(ValueError, match="two rules for over and"):
        tabulate((RULES[-1], RULES[-1]))


def draw(rules: Rules) -> str:
    """Markdown; a dot is "nothing to do", an empty cell "cannot happen"."""
    table = tabulate(rules)
    kinds = list(dict.fromkeys(kind for _, kinds, _ in rules for kind in kinds))
    lines = [
        "| | " + " | ".join(state.value for state in State) + " |",
        "|---" * (len(State) + 1) + "|",
    ]
    for kind in kinds:
        cells = []
        for state in State:
            method = table.get((state, kind))
            name = "" if method is None else method.__name__.lstrip("_").replace("_", " ")
            cells.append("·" if name == "ignore" else name)
        lines.append(f"| {kind.__name__} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def test_the_page_shows_the_table_as_it_is() -> None:
    said = "run `python -m tests.core.worker.test_group`, which writes docs/states.md"
    assert PAGE.read_text().endswith("\n\n" + draw(RULES)), said


def test_a_failure_stops_the_others_at_once_and_joins_with_the_prepared_store() -> None:
    agent = Agent().running()
    agent.feed(fx.StoreReady(NEXT))
    boom = own(0)
    assert agent.exit(0, 1, failure=boom) == [
        fx.Say(m.RanksFailed(ROUND, (boom,))),
        fx.RanksStopping(),
        fx.SignalRanks((1,), 15),
        fx.Say(m.Stopping(ROUND, 10.0)),
    ]
    assert agent.exit(1, -15, failure=own(1, -15)) == [fx.SweepRanks(10.0)]
    assert agent.feed(fx.RanksSwept(())) == [*STOPPED, fx.Say(m.Join(NEXT))]
    second = changed(START, RoundName(1, 2, "bb"), store=NEXT, restart_count=1)
    assert agent.order(second) == [
        fx.ReleaseStore(STORE),
        fx.SpawnRanks(second, 1),
        fx.PrepareStore(),
    ]


def test_a_fork_server_that_never_answers_ends_the_agent() -> None:
    agent = Agent().started()
    agent.feed(fx.RankSpawned(0, 50))
    assert agent.group.next_deadline() == SPAWN_TIMEOUT
    said, outcome = agent.wait()
    sentence = "the fork server was asked for the ranks 300 s ago and has not started all of them"
    assert said == fx.Say(m.Leaving(sentence, 0))
    assert outcome == fx.Exit(EXIT_FAILED, sentence, (), 0, why=SpawnLate(SPAWN_TIMEOUT))
    agent = Agent().running()
    assert agent.group.next_deadline() is None, "those that run have time"


def test_a_later_and_better_cause_is_told_too() -> None:
    agent = Agent().running()
    echo, cause = own(0, kind="peer-lost"), own(1)
    agent.exit(0, 1, failure=echo)
    effects = agent.exit(1, 1, failure=cause)
    assert effects[0] == fx.Say(m.RanksFailed(ROUND, (echo, cause)))


@pytest.mark.parametrize(
    ("code", "kind", "killed", "told"),
    [
        (-15, "signal", False, False),
        (143, "script", False, False),
        (-9, "signal", False, True),  # we had sent SIGTERM only: whoever sent it, it did not obey
        (-9, "signal", True, False),
        (-9, "oom", True, True),  # whoever sent the signal
    ],
)
def test_deaths_by_our_own_signals_are_no_failures(
    code: int, kind: str, killed: bool, told: bool
) -> None:
    agent = Agent().running()
    agent.order(m.Stop(ROUND, "why"))
    if killed:
        assert agent.wait() == [fx.SignalRanks((0, 1), 9)]
    failure = own(0, code, kind)
    said = [fx.Say(m.RanksFailed(ROUND, (failure,)))] if told else []
    assert agent.exit(0, code, failure=failure) == said


def test_stop_before_all_ranks_were_spawned() -> None:
    agent = Agent().started()
    agent.feed(fx.RankSpawned(0, 50))
    stopping = [fx.RanksStopping(), fx.SignalRanks((0,), 15)]
    assert agent.order(m.Stop(ROUND, "why"))[:2] == stopping
    assert agent.feed(fx.RankSpawned(1, 51)) == [fx.SignalRanks((1,), 15)]
    agent.wait()
    agent.exit(0, -9, failure=own(0, -9))
    assert agent.exit(1, -9, failure=own(1, -9))[0] == fx.SweepRanks(5.0)


def test_orders_for_another_round_are_ignored() -> None:
    agent = Agent().running()
    assert agent.order(m.Stop(RoundName(1, 1, "other"), "why")) == []
    assert agent.order(START) == []
    assert agent.state is State.RUNNING


def test_a_newer_start_while_ranks_live_stops_them_first() -> None:
    agent = Agent().running()
    newer = changed(START, RoundName(1, 2, "bb"))
    assert agent.order(newer)[:2] == [fx.RanksStopping(), fx.SignalRanks((0, 1), 15)]
    assert agent.state is State.STOPPING


def test_a_start_with_a_store_that_is_gone_is_handed_back() -> None:
    agent = Agent().joined()
    assert agent.feed(fx.StoreLost(STORE)) == [fx.PrepareStore()]
    assert agent.order(START) == [fx.Say(m.Stopped(ROUND))]
    assert agent.state is State.PREPARING
    assert agent.feed(fx.StoreReady(NEXT)) == [fx.Say(m.Join(NEXT))]


def test_stores_that_end_again_and_again_end_the_agent() -> None:
    agent = Agent().joined()
    store = STORE
    for attempt in range(MAX_LOSSES - 1):
        assert agent.feed(fx.StoreLost(store)) == [fx.PrepareStore()]
        store = Endpoint("here", 5000 + attempt)
        agent.feed(fx.StoreReady(store))
    (outcome,) = agent.feed(fx.StoreLost(store))
    assert ended([outcome]).code == EXIT_FAILED


def test_death_signal_is_forwarded_as_it_is_and_the_second_keeps_the_deadline() -> None:
    agent = Agent().running()
    assert agent.feed(fx.Signalled(2, "SIGINT", True)) == [
        fx.Say(m.Leaving("received SIGINT", 2)),
        fx.RanksStopping(),
        fx.SignalRanks((0, 1), 2),
        fx.Say(m.Stopping(ROUND, 20.0)),
    ]
    agent.now = 3.0
    assert agent.feed(fx.Signalled(15, "SIGTERM", True)) == [fx.SignalRanks((0, 1), 15)]
    assert agent.group.next_deadline() == 20.0
    agent.exit(0, -2, failure=own(0, -2))
    assert agent.exit(1, 0) == [fx.SweepRanks(17.0)]
    over = fx.Exit(EXIT_FAILED, "received SIGINT", (), 2, why=Leaves("received SIGINT", 2))
    assert agent.feed(fx.RanksSwept(())) == [*STOPPED, over]
    assert agent.feed(fx.Signalled(15, "SIGTERM", True)) == []


def test_finished_then_stopped_then_joins_again() -> None:
    agent = Agent(exit_barrier_timeout=50.0).running()
    agent.feed(fx.StoreReady(NEXT))
    assert agent.exit(1, 0) == []
    assert agent.exit(0, 0) == FINISHED
    assert agent.group.next_deadline() == 50.0
    assert agent.order(m.Stop(ROUND, "a peer failed")) == [fx.SweepRanks(10.0)]
    assert agent.feed(fx.RanksSwept(()))[-1] == fx.Say(m.Join(NEXT))
    assert agent.group.next_deadline() is None


def test_the_final_word_of_a_script_that_no_master_heard() -> None:
    agent = Agent().running()
    agent.feed(fx.LinkLost("refused"))
    agent.exit(0, 93, failure=own(0, 93, "final"))
    agent.exit(1, -15, failure=own(1, -15))
    agent.feed(fx.RanksSwept(()))
    assert ended(agent.wait()).code == EXIT_FINAL


def test_what_was_said_in_vain_is_said_again() -> None:
    agent = Agent().running()
    agent.feed(fx.StoreReady(NEXT))
    agent.feed(fx.LinkLost("refused"))
    agent.exit(0, 1, failure=own(0))
    agent.exit(1, -15, failure=own(1, -15))
    agent.feed(fx.RanksSwept(()))
    assert agent.feed(fx.LinkBack()) == [
        fx.Say(m.RanksFailed(ROUND, (own(0),))),
        fx.Say(m.Stopped(ROUND)),
        fx.Say(m.Join(NEXT)),
    ]
    assert agent.group.start == START
    agent.order(WELCOME)
    assert agent.group.next_deadline() is None


def test_a_master_of_a_lower_term_is_not_obeyed() -> None:
    agent = Agent().running()
    agent.order(replace(WELCOME, term=5))
    agent.order(replace(WELCOME, term=4))
    assert agent.order(m.Stop(ROUND, "I am the old one")) == []
    assert agent.state is State.RUNNING
    assert agent.group.next_deadline() == 600.0
    agent.order(replace(WELCOME, term=6))
    assert agent.order(m.Stop(ROUND, "I am the new one")) != []


def test_the_spawner_takes_its_ranks_with_it() -> None:
    agent = Agent().running()
    said, *stopped, prepare = agent.feed(fx.SpawnerLost("killed by signal 9", time_us=77))
    assert isinstance(said, fx.Say)
    assert isinstance(said.report, m.RanksFailed)
    assert [f.kind for f in said.report.failures] == ["spawner", "spawner"]
    assert said.report.failures[0].time_us == 77
    assert (stopped, prepare) == (STOPPED, fx.PrepareStore())
    assert agent.feed(fx.StoreReady(NEXT)) == [fx.Say(m.Join(NEXT))]


if __name__ == "__main__":
    text = PAGE.read_text()
    PAGE.write_text(text[: text.index("\n| | ") + 1] + draw(RULES))
