"""docs/tutorials/gpu-image.md: what needs no builder is run, and of the rest elasticrun's own words
are given to its parser. hadolint checks the Dockerfile in tests/test_release.py."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

from elasticrun.cli.flags import get_args_parser
from elasticrun.cli.main import VERBS
from tests.harness import World
from tests.tutorials.terminals import follow, home

PAGE = Path(__file__).parents[2] / "docs/tutorials/gpu-image.md"
IMAGE = "registry.example/train:1.0"


def test_what_needs_no_builder_works_as_it_stands(world: World, tmp_path: Path) -> None:
    follow(PAGE, tmp_path, home(tmp_path, world.environment()))


def test_the_words_after_the_image_are_those_of_elasticrun() -> None:
    text = PAGE.read_text(encoding="utf-8").replace("\\\n> ", " ")
    runs = [shlex.split(line) for line in re.findall(r"^\$ (docker run .*)", text, re.M)]
    assert len(runs) == 3
    for words in runs:
        ours = words[words.index(IMAGE) + 1 :]
        if ours[0] not in VERBS:
            assert get_args_parser().parse_args(ours).training_script == "train.py"
