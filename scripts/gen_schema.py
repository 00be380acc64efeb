"""Make docs/schema.json: the JSON Schema of what verbs print with `-o json`.

python scripts/gen_schema.py            write the file
python scripts/gen_schema.py --check    exit 1 if it is stale
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from elasticrun.core.sight.picture import EventRow, IncidentRow, Picture, StackRow
from elasticrun.host.runs.layout import JobRecord, KeptEvent, RunResult
from elasticrun.jobs.manage.nodes import HostRow
from elasticrun.jobs.rows import DoneRow, JobPage, JobRow, NodeRow
from elasticrun.jobs.running.checkpoints import CheckpointRow

TARGET = Path(__file__).resolve().parent.parent / "docs" / "schema.json"


class StacksOutput(Struct):
    """What `elasticrun stacks` prints."""

    stacks: list[StackRow]
    stacks_missing: str


OUTPUTS: dict[str, tuple[Any, str]] = {
    "top": (Picture, "elasticrun top; GET /picture has `version` besides"),
    "stacks": (StacksOutput, "elasticrun stacks"),
    "events": (list[EventRow], "elasticrun events"),
    "event": (EventRow, "a line of elasticrun events -f"),
    "incidents": (list[IncidentRow], "elasticrun incidents"),
    "incident": (IncidentRow, "elasticrun incidents N; the .json file of an incident"),
    "status": (
        JobPage | list[JobPage],
        "elasticrun status; an object where a job was named",
    ),
    "done": (
        DoneRow,
        "elasticrun submit, suspend, resume, stop, delete, scale, restart, exclude, include",
    ),
    "result": (RunResult, "result.json"),
    "job": (JobRecord, "job.json"),
    "kept_event": (KeptEvent, "a line of events.jsonl"),
    "list": (list[JobRow], "elasticrun list"),
    "checkpoints": (list[CheckpointRow], "elasticrun ckpt ls, verify"),
    "hosts": (list[HostRow], "elasticrun top nodes"),
    "cluster_nodes": (list[NodeRow], "elasticrun top nodes --on k8s"),
}
"""Each name in the schema: its type, and the verbs that print it."""


def generate() -> str:
    """The text of docs/schema.json."""
    types = [kind for kind, _ in OUTPUTS.values()]
    roots, parts = msgspec.json.schema_components(types, ref_template="#/$defs/{name}")
    for part in parts.values():  # the descriptions are docstrings
        part["description"] = " ".join(part["description"].split())
    named = {
        name: {"description": text, **root}
        for (name, (_, text)), root in zip(OUTPUTS.items(), roots, strict=True)
    }
    whole = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "What elasticrun prints with -o json",
        "description": "Use #/$defs/top and so on. Later versions may add fields.",
        "$defs": {**named, **dict(sorted(parts.items()))},
    }
    return json.dumps(whole, indent=1) + "\n"


def main() -> int:
    """Write the file, or with --check compare it with the existing one. Returns 1 if that is
    stale."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--check", action="store_true", help="only say whether it is stale")
    made = generate()
    if not parser.parse_args().check:
        TARGET.write_text(made)
    elif not TARGET.exists() or TARGET.read_text() != made:
        print("stale: docs/schema.json; run scripts/gen_schema.py")
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
