"""The lines of restarts, as a user reads them."""

from __future__ import annotations

from msgspec.structs import replace

from elasticrun.agent.farewell import NOTHING, Story
from elasticrun.wire.messages import Start
from elasticrun.wire.types import Endpoint, RoundName

FIRST = Start(RoundName(1, 1, "n"), 0, 1, 0, 2, 0, 2, 0, Endpoint("h", 1), host_store=False)
DEAD = "node b is dead: its connection broke and ranks of other nodes lost it"
BAD_LUCK = "rank 3 on node b: ValueError: bad luck"


class Told:
    """A story, its lines, and a clock that is set by hand."""

    def __init__(self, *, several: bool = True, first: Start | None = FIRST) -> None:
        self.lines: list[str] = []
        self.now = 0.0
        self.newest = -1
        self.story = Story(
            most=3,
            several=several,
            say=self.lines.append,
            newest=lambda: self.newest,
            clock=lambda: self.now,
        )
        if first is not None:
            self.story.starts(first)
            self.story.running()

    def restart(self, start: Start, *, step: int | None = None, newest: int = -1) -> list[str]:
        """Ranks break at 10 s and go on 0.41 s later; the lines of that."""
        self.lines.clear()
        self.now, self.newest = 10.0, newest
        self.story.broke()
        self.now = 10.2
        self.story.broke()  # said again
        self.story.starts(start)
        self.now = 10.41
        self.story.running()
        if step is not None:
            self.story.resumed(step, "memory" if step else NOTHING)
            self.story.resumed(step, "memory" if step else NOTHING)  # another rank
        return self.lines


def after(start: Start, **more: object) -> Start:
    """The next round."""
    number = start.round.number + 1
    return replace(start, round=RoundName(1, number, "n"), **more)  # type: ignore[arg-type]


def test_a_job_of_one_node_begins_without_a_word() -> None:
    assert Told(several=False).lines == []
    assert Told().lines == ["the job starts: 1 node, world size 2"]


def test_a_join() -> None:
    both = after(FIRST, group_world_size=2, world_size=4, why="node b joined")
    assert Told().restart(both) == [
        "node b joined: restarting the ranks with 2 nodes, world size 4 (no restart used)",
        "restarted in 0.41 s",
    ]
    newcomer = Told(first=None)
    newcomer.story.starts(both)
    newcomer.story.running()
    newcomer.story.resumed(230, "memory")
    assert newcomer.lines == ["this node joined: 2 nodes, world size 4", "resumed at step 230"]


def test_a_lost_node() -> None:
    told = Told(first=replace(FIRST, group_world_size=2, world_size=4))
    told.story.resumed(0, NOTHING)
    assert told.restart(after(FIRST, why=DEAD), step=1200, newest=1204) == [
        f"{DEAD}; restarting the ranks with 1 node, world size 2 (no restart used)",
        "recovered in 0.41 s; resumed at step 1200, 4 steps repeated",
    ]


def test_a_failure() -> None:
    told = Told()
    told.story.resumed(0, NOTHING)
    again = after(FIRST, restart_count=1, why=BAD_LUCK)
    assert told.restart(again, step=1200, newest=1204) == [
        f"recovered in 0.41 s: restart 1 of 3 ({BAD_LUCK}); resumed at step 1200, 4 steps repeated"
    ]
    more = after(again, restart_count=2, group_world_size=2, world_size=4, why="")
    assert told.restart(more, step=0, newest=1) == [
        "restarted in 0.41 s: restart 2 of 3, with 2 nodes, world size 4; "
        "from the beginning, 1 step repeated"
    ]


def test_a_script_that_tells_no_steps() -> None:
    """Nobody knows whether it goes on: only that it was started again."""
    again = after(FIRST, restart_count=1, why="rank 0: exit code 7")
    assert Told().restart(again) == ["restarted in 0.41 s: restart 1 of 3 (rank 0: exit code 7)"]


def test_ranks_that_die_before_they_go_on_are_not_recovered() -> None:
    told = Told()
    told.story.resumed(0, NOTHING)
    again = after(FIRST, restart_count=1, why="rank 0: exit code 7")
    assert told.restart(again) == []
    more = after(again, restart_count=2, why="rank 0: exit code 7")
    assert told.restart(more, step=5, newest=5) == [
        "recovered in 0.41 s: restart 2 of 3 (rank 0: exit code 7); "
        "resumed at step 5, 0 steps repeated"
    ]
