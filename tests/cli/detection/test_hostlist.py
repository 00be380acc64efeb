"""Slurm's lists of nodes: every form, every refusal, and a round trip of random lists."""

from __future__ import annotations

import random

import pytest

from elasticrun.cli.detection.slurm import MAX_NAMES, BadHostlist, expand


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("node2", ["node2"]),
        ("node[2-3]", ["node2", "node3"]),
        ("n[1-3,7],gpu[01-04]-ib",
         ["n1", "n2", "n3", "n7", "gpu01-ib", "gpu02-ib", "gpu03-ib", "gpu04-ib"]),
        ("a,b,c", ["a", "b", "c"]),
        ("n[09-11]", ["n09", "n10", "n11"]),
        ("n[9-11]", ["n9", "n10", "n11"]),
        ("n[098-100]", ["n098", "n099", "n100"]),
        ("r[1-2]n[1,3]", ["r1n1", "r1n3", "r2n1", "r2n3"]),
        ("rack-1.pod[0-1].example.org", ["rack-1.pod0.example.org", "rack-1.pod1.example.org"]),
        ("[1-2]", ["1", "2"]),
        ("10.0.0.[4-5]", ["10.0.0.4", "10.0.0.5"]),
        ("n[000000000000000001]", ["n000000000000000001"]),
        (" node2 ", ["node2"]),
    ],
)  # fmt: skip
def test_a_list_is_its_names(text: str, names: list[str]) -> None:
    assert expand(text) == names


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "has an empty item"),
        ("a,,b", "has an empty item"),
        ("a,", "has an empty item"),
        ("n[1-3", "do not match"),
        ("n1-3]", "do not match"),
        ("n[1[2]]", "do not match"),
        ("n[]", "not a range"),
        ("n[1-]", "not a range"),
        ("n[a-b]", "not a range"),
        ("n[1-2-3]", "not a range"),
        ("n[1;2]", "not a range"),
        ("n[3-1]", "backwards"),
        ("n 1", "not the name"),
        ("n1;reboot", "not the name"),
        ("n[\u0661-\u0663]", "not a range"),
        ("n[1-999999999]", "more than"),
        ("n[1-1000]m[1-1000]", "more than"),
        ("n[1-60000],m[1-60000]", "more than"),
        ("a," * MAX_NAMES + "a", "more than"),
        ("n[1-" + "9" * 40 + "]", "not a range"),
        ("n" * 2_000_000, "characters at most"),
    ],
)
def test_what_is_no_list_is_a_sentence_and_bounded(text: str, why: str) -> None:
    with pytest.raises(BadHostlist, match=why) as told:
        expand(text)
    assert len(str(told.value)) < 300


def test_the_largest_list() -> None:
    names = expand(f"n[1-{MAX_NAMES}]")
    assert (len(names), names[-1]) == (MAX_NAMES, f"n{MAX_NAMES}")


@pytest.mark.parametrize("seed", range(200))
def test_random_lists_come_back(seed: int) -> None:
    """Lists are made of random groups, each written in a random one of the ways Slurm has."""
    chance = random.Random(seed)
    items: list[str] = []
    wanted: list[str] = []
    for _ in range(chance.randint(1, 6)):
        prefix = "".join(chance.choices("abn.-_x9", k=chance.randint(1, 6))) + "n"
        suffix = chance.choice(["", "-ib", ".cluster", "x"])
        width = chance.randint(1, 4)
        ranges: list[str] = []
        numbers: list[str] = []
        for _ in range(chance.randint(1, 4)):
            low = chance.randint(0, 400)
            high = low + chance.choice([0, 0, 1, 3, 17])
            texts = [str(one).zfill(width) for one in range(low, high + 1)]
            numbers += texts
            ranges.append(texts[0] if low == high else f"{texts[0]}-{texts[-1]}")
        if chance.random() < 0.2:
            items += [f"{prefix}{one}{suffix}" for one in numbers]
        else:
            items.append(f"{prefix}[{','.join(ranges)}]{suffix}")
        wanted += [f"{prefix}{one}{suffix}" for one in numbers]
    assert expand(",".join(items)) == wanted


@pytest.mark.parametrize("seed", range(20))
def test_noise_is_names_or_a_sentence(seed: int) -> None:
    chance = random.Random(seed)
    for _ in range(200):
        text = "".join(chance.choices("n1209[],-[]x \n\x00é;", k=chance.randint(0, 30)))
        try:
            names = expand(text)
        except BadHostlist:
            continue
        assert names
        assert not set("".join(names)) & set("[], \n\x00é;")
