"""What a scheduler does about a pod's exit code: one contract for all of them."""

from __future__ import annotations

from typing import Any, Final

from elasticrun.config import EXIT_BAD_NODE, EXIT_FINAL, EXIT_SAVED, EXIT_USAGE

CONTAINER: Final = "elasticrun"
"""The container whose exit code counts."""

HOPELESS: Final = (EXIT_USAGE, EXIT_FINAL)
"""Codes that end the whole job: with another pod the command line is still wrong."""

BLAMELESS: Final = (EXIT_BAD_NODE, EXIT_SAVED)
"""Codes by which a node says that it is the node's fault, or nobody's: replaced free of charge."""


def failure_rules() -> list[dict[str, Any]]:
    """The rules of a Job's podFailurePolicy; the first that fits counts, none means one failure."""
    return [
        {
            "action": "FailJob",
            "onExitCodes": {
                "containerName": CONTAINER, "operator": "In", "values": sorted(HOPELESS)
            },
        },
        {
            "action": "Ignore",
            "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}],
        },
        {
            "action": "Ignore",
            "onExitCodes": {
                "containerName": CONTAINER, "operator": "In", "values": sorted(BLAMELESS)
            },
        },
    ]  # fmt: skip
