"""torch's own tests of its launcher, run against ours: nothing fails but what mocks torch's inside.

They are read from a folder of torch's repository of about the version that is installed, which
nobody here copies: ELASTICRUN_UPSTREAM_TESTS names it.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Final

import pytest

from tests.harness import clean_environment

pytestmark = [pytest.mark.soak, pytest.mark.timeout(3600)]

VARIABLE: Final = "ELASTICRUN_UPSTREAM_TESTS"
FILES: Final = ("test_run.py", "launch_test.py", "api_test.py", "test_api.py")

AGENT: Final = "puts a mock in the place of torch's LocalElasticAgent, which is not used here"
HANDLER: Final = "asks a mock of torch's rendezvous handler, which is not used here"
PLUGIN: Final = "puts a mock in the place of importlib.metadata inside torch's module"
DEVICES: Final = "tells torch by mocks of devices that are not there; here the driver is asked"
EVENT: Final = "counts by a mock what torch records in this process; here the agent's process does"
LAST_CALL: Final = (
    "starts a second node that imports torch first, and counts on a last call of 30 s; here the "
    "first one's job is over by then (docs/torchrun.md)"
)
NOT_APPLICABLE: Final = {
    "test_launch_elastic_agent_raise_exception": AGENT,
    "test_launch_shutdown": AGENT,
    "test_launch_agent_sets_signals_env_var": AGENT,
    "test_launch_agent_default_signals": AGENT,
    "test_rdzv_handler_shutdown_on_agent_signal": HANDLER,
    "test_rdzv_handler_shutdown_on_agent_error": HANDLER,
    "test_launch_agent_failing_rdzv_shutdown_does_not_mask_child_failed_error": HANDLER,
    "test_is_torchelastic_launched_with_logs_spec_defined": PLUGIN,
    "test_nproc_gpu_launch_configurations": DEVICES,
    "test_nproc_xpu_launch_configurations": DEVICES,
    "test_launch_elastic_worker_raise_exception": EVENT,
    "test_launch_elastic_multiple_agents": LAST_CALL,
}
"""Tests of theirs that say nothing about a launcher of another build, and why."""


@pytest.fixture
def folder() -> Path:
    """test/distributed/launcher of torch's repository."""
    named = os.environ.get(VARIABLE)
    if not named:
        pytest.skip(f"{VARIABLE} names no folder of torch's repository; see docs/matrix.md")
    if importlib.util.find_spec("expecttest") is None:
        pytest.skip("torch's tests need the package expecttest: pip install expecttest")
    found = Path(named, "test/distributed/launcher")
    assert found.is_dir(), f"{VARIABLE}={named} has no test/distributed/launcher"
    return found


@pytest.mark.parametrize("name", FILES)
def test_torchs_own_tests(name: str, folder: Path, tmp_path: Path) -> None:
    file, report = folder / name, tmp_path / "report.xml"
    if not file.exists():
        pytest.skip(f"this version of torch has no {name}")
    away = [f"--deselect={name}::{cls}::{test}" for test in NOT_APPLICABLE for cls in classes(file)]
    words = ["-p", "tests.upstream.substitute", "-p", "no:randomly", "-p", "no:cacheprovider",
             "-c", os.devnull, f"--rootdir={folder}", f"--junitxml={report}"]  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-rs", *words, *away, str(file)],
        env={**clean_environment(), "PYTHONPATH": str(Path(__file__).parents[2])},
        cwd=tmp_path, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode in (0, 5), done.stdout[-8000:] + done.stderr[-4000:]  # 5: none is left
    print(done.stdout)
    cases = list(ET.parse(report).iter("testcase"))
    assert not {case.get("name") for case in cases} & set(NOT_APPLICABLE)
    assert done.returncode == 5 or any(case.find("skipped") is None for case in cases)


def classes(file: Path) -> list[str]:
    lines = file.read_text().splitlines()
    return [line[6:].partition("(")[0] for line in lines if line.startswith("class ")]
