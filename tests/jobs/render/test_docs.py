"""The commands that docs/kubernetes.md and docs/slurm.md show are run as they stand there."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import yaml

from tests.jobs.render.rendered import VERSIONS, check, render

DOCS = Path(__file__).parents[3] / "docs"
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


def test_the_cron_job_of_the_page() -> None:
    """Its command, too: `submit` takes the flags of `render k8s`."""
    (text,) = re.findall(
        r"^```yaml\n(apiVersion: batch/v1\n.*?)^```",
        (DOCS / "kubernetes.md").read_text(encoding="utf-8"), re.M | re.S,
    )  # fmt: skip
    job = yaml.safe_load(text)
    check([job], VERSIONS[-1])
    pod = job["spec"]["jobTemplate"]["spec"]["template"]["spec"]
    words = shlex.split(pod["containers"][0]["command"][-1].replace("$(date +%j)", "001"))
    assert words[:4] == ["elasticrun", "submit", "--on", "k8s"]
    render("k8s", *words[4:])


def test_there_are_some_and_what_was_not_run_says_so() -> None:
    shown = {(page, words[2]) for page, words in COMMANDS}
    assert shown >= {("kubernetes.md", "k8s"), ("slurm.md", "slurm")}
    assert OTHERS
    assert all(line.endswith("# not run here") for line in OTHERS)
