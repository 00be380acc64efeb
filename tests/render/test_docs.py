"""The commands that docs/kubernetes.md and docs/slurm.md show are run as they stand there."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from tests.render.rendered import VERSIONS, check, render

DOCS = Path(__file__).parents[2] / "docs"
BLOCKS = {
    page: re.findall(r"^```\n(.*?)^```", (DOCS / page).read_text(encoding="utf-8"), re.M | re.S)
    for page in ("kubernetes.md", "slurm.md")
}
COMMANDS = [
    (page, shlex.split(line.split(" > ")[0], comments=True))
    for page, blocks in BLOCKS.items()
    for block in blocks
    for line in block.replace("\\\n", " ").splitlines()
    if line.startswith("elasticrun render ")
]
OTHERS = [
    line
    for block in BLOCKS["kubernetes.md"]
    for line in block.splitlines()
    if line.startswith(("kubectl", "helm", "docker"))
]


@pytest.mark.parametrize("words", [w for _, w in COMMANDS], ids=lambda words: " ".join(words[:4]))
def test_a_command_of_the_page(words: list[str]) -> None:
    printed = render(*words[2:])
    if words[2] != "slurm":
        for version in VERSIONS:
            check(printed.documents, version)


def test_there_are_some_and_what_was_not_run_says_so() -> None:
    shown = {(page, words[2]) for page, words in COMMANDS}
    assert shown >= {("kubernetes.md", "k8s"), ("slurm.md", "slurm")}
    assert OTHERS
    assert all(line.endswith("# not run here") for line in OTHERS)
