"""Runs the same real jobs with different versions of torch, as rows of a table (docs/matrix.md).

    make matrix TORCH=2.14.1 PYTHON=python3.12

Creates the environment `.venv-matrix-2.14.1` with that Python and that version of torch from the
package index (for Linux the CUDA build, 5 GB), unless `--python` names the interpreter of an
environment that has it. Runs a few tests in it, each with real processes and no mocks. Prints the
table's row; exits with 1 if a cell failed. Installs with uv if that is on the PATH, because it
takes a quarter of the time.
"""

from __future__ import annotations

import argparse
import datetime
import os
import shutil
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ET
from pathlib import Path

ROOT = Path(__file__).parent.parent
SNAPSHOTS = "tests/e2e/test_examples_snapshots.py::"
KILLED = SNAPSHOTS + "test_a_killed_rank_costs_no_bit_of_the_result"
HOOKED = "tests/sight/test_hangs.py::test_a_hang_of_a_backend_that_does_not_record_itself_is_named"
CELLS = {
    "launcher": ["tests/e2e/test_surroundings.py::test_two_jobs_on_one_host"],
    "flags": ["tests/compat/test_flags.py"],
    "hang (gloo)": [
        "tests/sight/test_hangs.py::test_a_hang_is_named[other]",
        "tests/training/monitor/test_recorder.py::test_a_real_group_of_gloo_alone",
    ],
    "hang (hooked)": [
        *(HOOKED + f"[{fault}]" for fault in ("other", "order", "sleep")),
        "tests/training/monitor/test_recorder.py::test_a_real_backend_that_does_not_record_itself",
    ],
    "warm": [
        "tests/forkserver/test_warm.py::test_ranks_have_torch_and_the_launchers_place",
        "tests/forkserver/test_warm.py::test_a_job_leaves_one_behind",
    ],
    "restart": ["tests/compat/test_defects.py::test_restarts_again_and_again"],
    "snapshots, DDP": [KILLED + "[ddp-0]"],
    "from storage": [SNAPSHOTS + "test_a_second_job_goes_on_from_storage_and_torch_reads_it"],
    "snapshots, FSDP2": [KILLED + "[fsdp2-1]"],
    "functions": [
        "tests/api/test_functions.py::test_ranks_meet_and_return",
        "tests/api/test_functions.py::test_an_exception_in_a_rank",
        "tests/api/test_functions.py::test_a_restart",
    ],
    "HF Trainer": ["tests/compat/test_frameworks.py::test_scripts_of_frameworks[hf_trainer.py]"],
    "Lightning": ["tests/compat/test_frameworks.py::test_scripts_of_frameworks[lightning_fit.py]"],
}
"""Each column, and the tests that must pass for a `yes` in it."""

FACTS = """
import platform, torch, transformers, lightning
built = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU"
print(f"{torch.__version__.partition('+')[0]} ({built})", platform.python_version(),
      transformers.__version__, lightning.__version__, sep="|")
"""


def main() -> int:
    """Print one row. Returns 1 if a cell failed, or if the environment has another torch."""
    parser = argparse.ArgumentParser(description="Run real jobs with one version of torch.")
    parser.add_argument("torch", metavar="VERSION", help="such as 2.14.1")
    parser.add_argument("--python", help="of an environment that has this torch; none is made")
    parser.add_argument("--cell", action="append", choices=CELLS, help="this one; may be repeated")
    arguments = parser.parse_args()
    cells = arguments.cell or list(CELLS)
    version = arguments.torch.removeprefix("torch==")
    python = arguments.python or environment(version)
    facts = subprocess.run([python, "-c", FACTS], check=True, capture_output=True, text=True)
    row = dict(zip(("torch", "Python", "transformers", "Lightning is"),
                   facts.stdout.strip().split("|"), strict=True))  # fmt: skip
    if not row["torch"].startswith(f"{version} "):
        print(f"matrix: {python} has torch {row['torch']}, not {version}", file=sys.stderr)
        return 1
    notes: list[str] = []
    for name in cells:
        row[name] = cell(python, CELLS[name], notes)
        print(f"matrix: {version}: {name}: {row[name]}", file=sys.stderr, flush=True)
    row["date"] = datetime.datetime.now(datetime.UTC).date().isoformat()
    print("| " + " | ".join(row) + " |")
    print("|---" * len(row) + "|")
    print("| " + " | ".join(row.values()) + " |")
    print(*notes, sep="\n")
    return int(any(row[name].startswith("no") for name in cells))


def environment(version: str) -> str:
    """Create an environment with this torch and all packages that the tests need. Returns its
    interpreter."""
    folder = ROOT / f".venv-matrix-{version}"
    python = str(folder / "bin/python")
    # pin the exact version, so that another package's range cannot select another build
    wanted = [f"torch=={version}", "-e", f"{ROOT}[dev,frameworks]"]
    # use the package index's build, even if a local folder has one for this machine
    env = {name: text for name, text in os.environ.items() if name != "PIP_FIND_LINKS"}
    if uv := shutil.which("uv"):
        making = [uv, "venv", "-q", "--allow-existing", "--python", sys.executable, str(folder)]
        filling = [uv, "pip", "install", "-q", "--python", python, *wanted]
    else:
        making = [sys.executable, "-m", "venv", str(folder)]
        filling = [python, "-m", "pip", "--disable-pip-version-check", "-q", "install", *wanted]
    subprocess.run(making, check=True, env=env)
    subprocess.run(filling, check=True, env=env)
    return python


def cell(python: str, tests: list[str], notes: list[str]) -> str:
    """Run a cell's tests. Returns `yes`, `no (2 of 3 failed)`, or `-` if all were skipped; adds the
    reasons to `notes`."""
    with tempfile.NamedTemporaryFile(suffix=".xml") as report:
        words = ["-m", "pytest", "-q", "-p", "no:randomly"]
        done = subprocess.run(
            [python, *words, f"--junitxml={report.name}", *tests],
            cwd=ROOT, capture_output=True, text=True, check=False,
        )  # fmt: skip
        cases = (
            list(ET.parse(report.name).iter("testcase")) if Path(report.name).stat().st_size else []
        )
    failed = [case for case in cases if case.find("failure") is not None
              or case.find("error") is not None]  # fmt: skip
    skipped = [case for case in cases if case.find("skipped") is not None]
    if failed or not cases or done.returncode:
        notes.append(done.stdout[-6000:] + done.stderr[-2000:])
        return f"no ({len(failed)} of {len(cases)} failed)"
    for case in skipped:
        why = case.find("skipped")
        notes.append(
            f"skipped: {case.get('name')}: {why.get('message') if why is not None else ''}"
        )
    return "-" if len(skipped) == len(cases) else "yes"


if __name__ == "__main__":
    sys.exit(main())
