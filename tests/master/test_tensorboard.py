"""--tensorboard: a real one beside the master of a real job."""

from __future__ import annotations

import os
import re
import signal
import urllib.request
from pathlib import Path

import psutil
import pytest

from tests import needs
from tests.compat.live import PUPPET, finish
from tests.harness import ELASTICRUN, World, await_exit, status_of, until_file

needs.packages("tensorboard")
pytestmark = pytest.mark.slow


def test_it_is_there_with_the_master_and_goes_with_it(world: World, tmp_path: Path) -> None:
    """Its URL is in the terminal, in `status` and in the run folder. A master that is killed takes
    it along, the next one has its own, and nothing is left of it when the job has ended."""
    run = tmp_path / "run"
    flags = ("--standalone", "--tensorboard", f"--logdir={tmp_path}", f"--run-dir={run}")
    job = world.launch(ELASTICRUN, *flags, PUPPET)
    (peer,) = world.hub.ranks(1)
    told = job.until_text(f"TensorBoard of {tmp_path}: http://")
    (url,) = re.findall(r"TensorBoard of .*: (\S+)", told)
    with urllib.request.urlopen(url, timeout=60) as page:
        assert page.status == 200
    until_file(run / "job.json", lambda text: url in text)
    assert f"tensorboard: {url}\n" in status_of(env=world.environment())

    def shows() -> psutil.Process:
        (found,) = [one for one in job.below() if "outward.tensorboard" in " ".join(one.cmdline())]
        return found

    shown = shows()
    master = shown.parent()
    assert master is not None
    os.kill(master.pid, signal.SIGKILL)
    assert not await_exit([shown.pid])
    until_file(run / "job.json", lambda text: '"tensorboard": "http' in text and url not in text)
    os.kill(shows().pid, signal.SIGKILL)
    until_file(run / "job.json", lambda text: '"tensorboard": ""' in text)  # by itself: no link
    finish([peer], job)
