"""What a process has imported before the slow things it starts are started: they import while it
goes on."""

from __future__ import annotations

import pytest

from tests.harness import program

AGENT = "elasticrun.__main__, elasticrun.cli.resolve, elasticrun.agent.main, \
elasticrun.agent.link.master_process"


@pytest.mark.parametrize(
    ("imported", "too_soon"),
    [
        (AGENT, ("asyncio", "grpc", "google.protobuf", "ssl", "torch", "numpy")),
        ("elasticrun.snapshots.saver.saver", ("torch", "numpy", "asyncio", "grpc")),
    ],
    ids=["an-agent", "a-saver"],
)
def test_nothing_heavy_comes_first(imported: str, too_soon: tuple[str, ...]) -> None:
    code = (
        f"import sys, {imported}\nprint([name for name in {too_soon!r} if name in sys.modules])\n"
    )
    done = program("-c", code)
    assert (done.stdout, done.stderr) == ("[]\n", "")
