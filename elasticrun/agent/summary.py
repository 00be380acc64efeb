"""The last words of a failed job, in torchrun's layout, because people and tools search for it.

What is different is the content (docs/torchrun.md): the root cause is the whole
job's, found by the master, not the local failure with the smallest whole second; and ranks that
were killed because another one had failed are not listed as failures.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Final

from elasticrun.agent.errorfiles import signal_name
from elasticrun.core.failures import is_alike
from elasticrun.wire.messages import Failure, FailureKind

HEADLINE: Final = "torch.distributed.elastic.multiprocessing.errors.ChildFailedError: "
"""How Python shows torchrun's exception; the blank is followed by the line break below."""

NO_OTHERS: Final = "  <NO_OTHER_FAILURES>"
MAX_WIDTH: Final = 60
"""Borders are as wide as the longest line, and no wider than this."""


def child_failed(name: str, failures: Sequence[Failure], root: Failure) -> str:
    """The whole text: headline and `format_failures`. `name` is the script as the user gave it."""
    return HEADLINE + format_failures(name, failures, root)


def format_failures(name: str, failures: Sequence[Failure], root: Failure) -> str:
    """What `str()` of torch's ChildFailedError gives for the same failures (it begins with a line
    break). `root` is shown apart and may be, but need not be, among `failures`."""
    alike = [f for f in failures if f != root and is_alike(f, root)]
    shown = [f for f in failures if f == root or f.kind is not FailureKind.STOPPED]
    shown = [f for f in shown if f not in alike]
    if root not in shown:
        shown.insert(0, root)
    title = f"{name} FAILED"
    blocks = [_block(index, failure) for index, failure in enumerate(shown)]
    width = max(len(line) for text in (title, *blocks) for line in text.split("\n"))
    border, rule = "=" * min(width, MAX_WIDTH), "-" * min(width, MAX_WIDTH)
    place = shown.index(root)
    others = blocks[:place] + blocks[place + 1 :]
    if alike:
        others.append(f"  the same on {ranks(sorted(f.rank for f in alike))}")
    return "\n".join(
        (
            "",
            border,
            title,
            rule,
            "Failures:",
            *(others or [NO_OTHERS]),
            rule,
            "Root Cause (first observed failure):",
            blocks[place],
            border,
        )
    )


def ranks(numbers: Sequence[int]) -> str:
    """`rank 1`, `ranks 1 and 2`, `ranks 1, 2 and 5`."""
    *most, last = map(str, numbers)
    return f"ranks {', '.join(most)} and {last}" if most else f"rank {last}"


def _block(index: int, failure: Failure) -> str:
    signal_text = f" ({signal_name(failure.exitcode)})" if failure.exitcode < 0 else ""
    if signal_text == " (<N/A>)":
        signal_text = ""
    moment = datetime.fromtimestamp(failure.time_us // 1_000_000)  # noqa: DTZ006 (for people here)
    text = failure.traceback.replace("\n", "\n  ") or failure.message
    return "\n".join(
        (
            f"[{index}]:",
            f"  time      : {moment.isoformat(sep='_')}",
            f"  host      : {failure.host}",
            f"  rank      : {failure.rank} (local_rank: {failure.local_rank})",
            f"  exitcode  : {failure.exitcode} (pid: {failure.pid}) {signal_text}",
            f"  error_file: {failure.error_file or '<N/A>'}",
            f"  traceback : {text}",
        )
    )
