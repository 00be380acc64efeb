"""`elasticrun replay TRACE`: what a master decided, when and why, from its trace.

Exit code 0 when the brain says today what was recorded, 1 when it says something else, 2 for a file
that is no trace.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from elasticrun.cli.flags import Parser
from elasticrun.cli.settings import UsageError
from elasticrun.config import EXIT_USAGE


def parser() -> Parser:
    """The arguments of `elasticrun replay`."""
    made = Parser(
        prog="elasticrun replay",
        description="Run the real brain over the trace of a job master, and print each decision: "
        "seconds since the trace began, what happened, what followed from it.",
        epilog="A master keeps its trace where `elasticrun master --state-dir DIR` says, and one "
        "that an agent hosts keeps it in the user's folder for as long as the job runs.",
    )
    made.add_argument("trace", metavar="TRACE", help="the file, or the folder of the record")
    made.add_argument("--node", metavar="NAME", default="", help="only what concerns this node")
    made.add_argument(
        "--since", metavar="SECONDS", type=float, default=0.0, help="only what came later"
    )
    made.add_argument(
        "--all", action="store_true", help="also events from which nothing followed (beats aside)"
    )
    made.add_argument(
        "--timeline",
        metavar="FILE",
        default="",
        help="write rounds and incidents to this file, for chrome://tracing or Perfetto",
    )
    return made


def main(argv: Sequence[str]) -> int:
    """`elasticrun replay` with its own arguments; raises UsageError."""
    asked = parser().parse_args(argv)
    # Late: the brain is needed here alone.
    from elasticrun.master.trace.replay import NoTrace, Wanted, replay

    wanted = Wanted(node=asked.node, since=asked.since, everything=asked.all)
    try:
        timeline = Path(asked.timeline) if asked.timeline else None
        return replay(Path(asked.trace), wanted, print, timeline)
    except NoTrace as wrong:
        raise UsageError(str(wrong), EXIT_USAGE) from None
