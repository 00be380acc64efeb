"""`elasticrun replay TRACE`: a master's decisions, their times and reasons, from its trace.

Exit code 0 if replaying gives the recorded decisions, 1 if it gives others, 2 if the file is not a
trace.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from elasticrun.cli.flags import Parser
from elasticrun.cli.settings import UsageError
from elasticrun.config import EXIT_USAGE


def parser() -> Parser:
    """The parser of `elasticrun replay`."""
    made = Parser(
        prog="elasticrun replay",
        description="Replay a job master's trace through its decision logic, and print each "
        "decision: seconds since the start of the trace, the event, its consequences.",
        epilog="A master keeps its trace in the folder of `elasticrun master --state-dir DIR`, and "
        "one that an agent hosts keeps it in the user's folder for as long as the job runs.",
    )
    made.add_argument("trace", metavar="TRACE", help="the file, or the folder of the record")
    made.add_argument("--node", metavar="NAME", default="", help="only events of this node")
    made.add_argument(
        "--since", metavar="SECONDS", type=float, default=0.0, help="only later events"
    )
    made.add_argument(
        "--all", action="store_true", help="also events without consequences (except beats)"
    )
    made.add_argument(
        "--timeline",
        metavar="FILE",
        default="",
        help="write rounds and incidents to this file, for chrome://tracing or Perfetto",
    )
    return made


def main(argv: Sequence[str]) -> int:
    """Run `elasticrun replay`. Returns 0 or 1. Raises UsageError, exit code 2."""
    args = parser().parse_args(argv)
    # Late import: only this verb needs the state machine.
    from elasticrun.master.trace.replay import NoTrace, Selection, replay

    selection = Selection(node=args.node, since=args.since, everything=args.all)
    try:
        timeline = Path(args.timeline) if args.timeline else None
        return replay(Path(args.trace), selection, print, timeline)
    except NoTrace as wrong:
        raise UsageError(str(wrong), EXIT_USAGE) from None
