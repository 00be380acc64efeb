"""What an agent has imported before its fork server and its master are started: they import while
it goes on."""

from __future__ import annotations

import subprocess
import sys

TOO_SOON = ("asyncio", "grpc", "google.protobuf", "ssl", "torch", "numpy")


def test_nothing_heavy_comes_before_the_fork_server_and_the_master() -> None:
    code = (
        "import sys; import elasticrun.__main__, elasticrun.cli.resolve\n"
        "import elasticrun.agent.main, elasticrun.agent.link.master_process\n"
        f"print([name for name in {TOO_SOON!r} if name in sys.modules])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
