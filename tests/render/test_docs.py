"""The commands that docs/kubernetes.md shows are run as they stand there."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from tests.render.rendered import VERSIONS, check, render

PAGE = Path(__file__).parents[2] / "docs" / "kubernetes.md"
BLOCKS = re.findall(r"^```\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.M | re.S)
COMMANDS = [
    shlex.split(line.split(" > ")[0])
    for block in BLOCKS
    for line in block.replace("\\\n", " ").splitlines()
    if line.startswith("elasticrun render ")
]
OTHERS = [
    line
    for block in BLOCKS
    for line in block.splitlines()
    if line.startswith(("kubectl", "helm", "docker"))
]


@pytest.mark.parametrize("words", COMMANDS, ids=lambda words: " ".join(words[:4]))
def test_a_command_of_the_page(words: list[str]) -> None:
    printed = render(*words[2:])
    if words[2] != "slurm":
        for version in VERSIONS:
            check(printed.documents, version)


def test_there_are_some_and_what_was_not_run_says_so() -> None:
    assert {words[2] for words in COMMANDS} >= {"k8s", "slurm"}
    assert OTHERS
    assert all(line.endswith("# not run here") for line in OTHERS)
