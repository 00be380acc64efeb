"""Checks in a child of their own, where what they look at can be made wrong for real."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from typing import Any

from elasticrun.wire.types import Finding, Level
from tests import needs
from tests.harness import clean_environment

LIMIT = 240.0
"""Seconds for a child, which takes one or two."""

TELL = """
import json
from dataclasses import asdict
{code}
print(json.dumps([asdict(finding) for finding in found]))
"""


def found(
    code: str,
    *,
    setup: str = "",
    apart: tuple[str, ...] = (),
    before: Callable[[], None] | None = None,
    environ: dict[str, str] | None = None,
) -> list[Finding]:
    """The findings that `code` leaves in the variable `found`. `apart`: namespaces of the child's
    own (options of unshare), in which the shell runs `setup` first. `before`: called in the child
    before it becomes Python."""
    command = [sys.executable, "-c", TELL.format(code=code)]
    if apart:
        needs.namespaces(*apart)
        # set -e: what cannot be set up must not pass for a machine that is well
        shell = f'set -e\n{setup}\nexec "$@"'
        command = ["unshare", *apart, "sh", "-c", shell, "sh", *command]
    done = subprocess.run(
        command,
        env=clean_environment() | (environ or {}),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=LIMIT,
        preexec_fn=before,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return [finding(fields) for fields in json.loads(done.stdout)]


def finding(fields: dict[str, Any]) -> Finding:
    return Finding(**{**fields, "state": Level(fields["state"])})


def one(findings: list[Finding], check: str) -> Finding:
    (only,) = [finding for finding in findings if finding.check == check]
    return only
