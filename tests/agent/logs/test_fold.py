"""Lines of several ranks told once: who said what, when it is told, in which order. Given times."""

from __future__ import annotations

import random
from collections.abc import Iterable

import pytest

from elasticrun.agent.logs import fold, masks
from elasticrun.agent.logs.fold import BAR_WINDOW, SOON, WINDOW, Fold
from elasticrun.agent.logs.folded import fold_texts, ranges

Say = tuple[float, int, str]
"""When, which rank, what; a text that ends in a carriage return is a state of a bar."""


def told(says: Iterable[Say], ranks: int = 4, until: float = 10.0) -> list[tuple[float, str]]:
    """What is told and when, as people see it; each rank's file is read to its end at last."""
    folded, out = Fold(ranks), []

    def note(now: float, items: list[fold.FoldedLines]) -> None:
        for who, lines, _, same_as in items:
            names = ranges(place for place in range(ranks) if who >> place & 1)
            out.extend((round(now, 3), f"[{names}] {line.decode()}") for line in lines)
            if same_as >= 0:
                out.append((round(now, 3), f"[{names}] as rank {same_as}"))

    def pass_time(end: float) -> None:
        while (due := folded.due()) is not None and due <= end:
            note(due, folded.tick(due))

    for now, place, text in says:
        pass_time(now)
        is_bar = text.endswith("\r")
        note(now, folded.add(place, [(text.rstrip("\r").encode(), is_bar)], now))
    pass_time(until)
    note(until, folded.flush(until))
    return out


def all_say(text: str, ranks: Iterable[int] = range(4), at: float = 0.0) -> list[Say]:
    return [(at, rank, text.format(rank=rank)) for rank in ranks]


TRACE = ["Traceback (most recent call last):", '  File "a.py", line 3, in f', "    f(1)"]
CHAIN = [*TRACE, "KeyError: 1", "", "During handling of the above exception, another", "", *TRACE]


def trace(rank: int, lines: Iterable[str], at: float = 0.0) -> list[Say]:
    return [(at, rank, line) for line in lines]


def unit(rank: int, lines: Iterable[str]) -> str:
    return f"[{rank}] " + "\n".join(lines)


CASES: dict[str, tuple[list[Say], list[tuple[float, str]]]] = {
    "all at once": (all_say("ready"), [(0, "[0-3] ready")]),
    "the first one's values where they differ": (
        all_say("epoch=1 step 100 loss 2.3{rank}"),
        [(0, "[0-3] epoch=1 step 100 loss ~2.30")],
    ),
    "a number inside a word": (
        all_say("/data/shard00{rank}.tar opened"),
        [(0, "[0-3] /data/shard~000.tar opened")],
    ),
    "numbers alone are what they are": (
        all_say("1.5 2", [0, 1]) + all_say("1.5 3", [2, 3]),
        [(0, "[0-1] 1.5 2"), (WINDOW, "[2-3] 1.5 3")],
    ),
    "torch's own prefix": (all_say("[rank{rank}]: hello"), [(0, "[0-3] hello")]),
    "nan is no number": (
        [*all_say("loss 2.5", [0, 1, 3]), (0, 2, "loss nan")],
        [(0, "[0-1,3] loss 2.5"), (SOON, "[2] loss nan")],
    ),
    "some never say it": (all_say("half", [0, 1]), [(WINDOW, "[0-1] half")]),
    "one alone is not waited with for long, and not at all the next time": (
        [(0, 0, "saved 1"), (2, 0, "saved 2"), (3, 0, "saved 3")],
        [(SOON, "[0] saved 1"), (2, "[0] saved 2"), (3, "[0] saved 3")],
    ),
    "what was one's alone and becomes common": (
        [(0, 0, "saved 1"), *all_say("saved 2", at=2), *all_say("saved 3", at=3)],
        [(SOON, "[0] saved 1"), (2, "[0] saved 2"), (3, "[1-3] saved 2"), (3, "[0-3] saved 3")],
    ),
    "an error at once, and the same words of others once": (
        [(0, 0, "step 1"), *all_say("Error: disk full", at=0.1), (0.1, 2, "next")],
        [
            (0.1, "[0] step 1"),
            (0.1, "[0] Error: disk full"),
            (0.3, "[1-3] Error: disk full"),
            (0.3, "[2] next"),
        ],
    ),
    "errors with other numbers are other errors": (
        all_say("WARNING gpu {rank} is hot", [0, 1]),
        [(0, "[0] WARNING gpu 0 is hot"), (0, "[1] WARNING gpu 1 is hot")],
    ),
    "the order within a rank, against what others have said in another": (
        [(0, 0, "a"), (0, 0, "b"), (0, 1, "b"), (0, 1, "a")],
        [(SOON, "[0] a"), (SOON, "[0-1] b"), (SOON, "[1] a")],
    ),
    "nobody can join any more": (
        [(0, 0, "a"), *all_say("b", at=0.1)],
        [(0.1, "[0] a"), (0.1, "[0-3] b")],
    ),
    "the same again is another line": (
        [*all_say("x", [0, 0, 1]), *all_say("x", [1, 2, 2, 3, 3])],
        [(0, "[0-3] x"), (0, "[0-3] x")],
    ),
    "a traceback whole, not mixed, not masked": (
        [
            s
            for pair in zip(
                trace(1, [*TRACE, "ValueError: 3"]),
                trace(2, [*TRACE, "ValueError: 4"]),
                strict=True,
            )
            for s in pair
        ],
        [(0.1, unit(1, [*TRACE, "ValueError: 3"])), (0.1, unit(2, [*TRACE, "ValueError: 4"]))],
    ),
    "what another rank has raised is referred to": (
        [
            *trace(1, [f"[rank1]: {line}" for line in [*TRACE, "ImportError: x"]]),
            *trace(2, [f"[rank2]: {line}" for line in [*TRACE, "ImportError: x"]], at=0.5),
            *trace(1, [*TRACE, "ImportError: x"], at=1.0),
        ],
        [
            (0.1, unit(1, [f"[rank1]: {line}" for line in [*TRACE, "ImportError: x"]])),
            (0.6, "[2] as rank 1"),
            (1.1, unit(1, [*TRACE, "ImportError: x"])),
        ],
    ),
    "a chained traceback, and what follows it": (
        [*trace(1, [*CHAIN, "ValueError: 3"]), (0.05, 1, "bye")],
        [(0.05, unit(1, [*CHAIN, "ValueError: 3"])), (0.25, "[1] bye")],
    ),
    "a message of many lines with torch's prefix": (
        trace(1, [f"[rank1]: {line}" for line in [*TRACE, "NCCL failed:", "Last error:", "x"]]),
        [(0.1, unit(1, [f"[rank1]: {x}" for x in [*TRACE, "NCCL failed:", "Last error:", "x"]]))],
    ),
    "a traceback that does not end": (trace(1, TRACE), [(WINDOW, unit(1, TRACE))]),
    "only the newest state of bars that are alike": (
        [
            (at / 10, rank, f"{10 + at}%|{'#' * at}{' ' * (9 - at)}| {at}/9 [0{rank}it/s]\r")
            for at in range(9)
            for rank in range(4)
        ],
        [
            (BAR_WINDOW, f"[0-3] 13%|{'#' * 3}      | 3/9 [~00it/s]"),
            (2 * BAR_WINDOW, f"[0-3] 17%|{'#' * 7}  | 7/9 [~00it/s]"),
            (1.2, f"[0-3] 18%|{'#' * 8} | 8/9 [~00it/s]"),
        ],
    ),
    "the end of a bar takes its place": (
        [*all_say("10%|# | 1/9\r"), *all_say("100%|##| 9/9", at=0.5)],
        [(BAR_WINDOW, "[0-3] 10%|# | 1/9"), (0.5, "[0-3] 100%|##| 9/9")],
    ),
    "a line while a bar is there": (
        [(0, 0, "10%|# | 1/9\r"), (0.5, 0, "note")],
        [(BAR_WINDOW, "[0] 10%|# | 1/9"), (0.7, "[0] note")],
    ),
    "colours are no numbers": (
        all_say("\x1b[32mstep {rank}\x1b[0m"),
        [(0, "[0-3] \x1b[32mstep ~0\x1b[0m")],
    ),
    "a long line at once": (
        all_say("x" * 5000, [0]),
        [(0, "[0] " + "x" * 5000)],
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_told(case: str) -> None:
    says, expected = CASES[case]
    assert told(says) == expected


def test_a_traceback_of_long_ago_is_told_again() -> None:
    both = [*trace(1, [*TRACE, "E: x"]), *trace(2, [*TRACE, "E: x"], at=fold.TRACE_WINDOW + 1.0)]
    assert [text for _, text in told(both, until=60.0)] == [
        unit(rank, [*TRACE, "E: x"]) for rank in (1, 2)
    ]


def test_a_minority_of_many_is_told_soon() -> None:
    says = all_say("nfs: server not responding", [3, 9])
    assert told(says, ranks=32) == [(SOON, "[3,9] nfs: server not responding")]
    most = [rank for rank in range(64) if rank != 42]
    says = [*all_say("ok", most[:30]), (0, 42, "nfs: down"), *all_say("ok", most[30:], at=0.5)]
    assert told(says, ranks=64) == [(SOON, "[42] nfs: down"), (0.5, "[0-41,43-63] ok")]


def test_a_rank_that_has_ended_is_not_waited_for() -> None:
    folded = Fold(2)
    assert folded.add(0, [(b"a 1", False)], 0.0) == []
    assert folded.ended(1, 0.05) == [fold.FoldedLines(1, [b"a 1"])]


WORDS = ("step {n} loss {n}.5", "saved {n}", "", "{n} {n}", "Error {n}", "\xff junk \x00 {n}", "x")


@pytest.mark.parametrize("seed", range(30))
def test_every_line_once_and_in_order(seed: int, monkeypatch) -> None:
    """Whatever ranks say and whenever: each line is told once or counted in one, no rank's order
    changes, and nothing waits longer than the window."""
    monkeypatch.setattr(fold, "MOST_LINES", 20 if seed % 3 == 0 else 8192)
    monkeypatch.setattr(fold, "MOST_A_SECOND", 200 if seed % 3 == 1 else 20_000)
    rng, ranks, now = random.Random(seed), 5, 0.0
    folded = Fold(ranks)
    said: dict[int, list[tuple[float, bytes]]] = {place: [] for place in range(ranks)}

    def check(items: list[fold.FoldedLines]) -> None:
        for who, lines, *_ in items:
            for place in range(ranks):
                if who >> place & 1:
                    for line in lines:
                        at, original = said[place].pop(0)
                        same = masks.key_of(original) == masks.key_of(line.replace(b"~", b""))
                        assert same, (place, original, line)
                        assert now - at <= WINDOW + 1e-6

    for _ in range(400):
        step = now + rng.choice((0.0, 0.01, 0.3))
        while (due := folded.due()) is not None and due <= step:
            now = max(now, due)
            check(folded.tick(now))
        now = step
        place = rng.randrange(ranks)
        texts = [rng.choice(WORDS).format(n=rng.randrange(9)) for _ in range(rng.randrange(1, 4))]
        lines = [text.encode("latin-1") for text in texts]
        said[place] += [(now, line) for line in lines]
        check(folded.add(place, [(line, False) for line in lines], now))
    check(folded.flush(now))
    assert not any(said.values())
    assert folded.due() is None


def test_a_flood_is_passed_on_as_it_comes() -> None:
    folded, lines = Fold(2), [(b"line %d" % i, False) for i in range(fold.MOST_A_SECOND)]
    folded.add(0, lines, 0.0)
    flood = folded.add(1, lines, 0.1)
    assert [text for who, texts, *_ in flood if who == 2 for text in texts] == [x for x, _ in lines]
    assert folded.add(1, [(b"later", False)], 1.2) == [fold.FoldedLines(2, [b"later"])]
    assert folded.add(1, [(b"calm", False)], 2.3) == []


@pytest.mark.parametrize(
    ("line", "key"),
    [
        (b"lr 3.0e-4 x -0.5 0x1f", b"lr \0 x \0 \0"),
        (b"epoch=1 acc=0.5", b"epoch=\0 acc=\0"),
        (b"a-1 v1.2.3", b"a-\0 v\0"),
        (b"12 13", b"12 13"),
        (b"\x1b[1m12\x1b[0m", b"\x1b[1m12\x1b[0m"),
    ],
)
def test_keys(line: bytes, key: bytes) -> None:
    assert masks.key_of(line) == key


def test_the_ends_of_files_are_folded_too() -> None:
    """Colours go, of a progress bar its newest state is left, and each rank has eight lines; a step
    that is another moment's is not folded away."""
    old = "".join(f"old {n}\n" for n in range(9))
    said = {
        4: f"{old}\x1b[31mstep 7\x1b[0m loss 2.5\n 10%|#  |\r 20%|## |\r\nbye",
        5: "step 7 loss 2.75\nstep 8 loss 2.5\n\nbye",
        7: "something else",
    }
    told = [(ranks, line) for ranks, line in fold_texts(said) if not line.startswith("old")]
    assert told == [
        ([4, 5], "step 7 loss ~2.5"),
        ([4], " 20%|## |"),
        ([5], "step 8 loss 2.5"),
        ([4, 5], "bye"),
        ([7], "something else"),
    ]
