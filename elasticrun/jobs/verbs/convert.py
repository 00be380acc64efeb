"""`elasticrun convert FILE`: prints another operator's job as an ElasticJob or a Slurm script.

The result goes to standard output; each part that is not converted gets a line on standard error.
Nothing is sent to a cluster.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from elasticrun.cli.flags import PROG, Parser
from elasticrun.cli.settings import UsageError
from elasticrun.config import EXIT_OK, EXIT_USAGE

if TYPE_CHECKING:
    from elasticrun.jobs.convert.document import Document
    from elasticrun.jobs.convert.sources import ForeignJob


def parser() -> Parser:
    """The arguments of `elasticrun convert`."""
    made = Parser(
        prog=f"{PROG} convert",
        description="Print dlrover's ElasticJob, Kubeflow's PyTorchJob or TrainJob, or "
        "MindSpore's MSJob as an ElasticJob of elasticrun or a script for Slurm.",
    )
    made.add_argument("file", metavar="FILE", help="the job, as YAML or JSON; - is standard input")
    made.add_argument("--to", choices=("elasticjob", "slurm"), default="elasticjob",
                      help="what is printed [default: elasticjob]")  # fmt: skip
    made.add_argument("--image", metavar="IMAGE", default="",
                      help="image of the ranks, for a TrainJob without one")  # fmt: skip
    made.add_argument("-o", "--output", choices=("yaml", "json"), default="yaml",
                      help="output format of an ElasticJob")  # fmt: skip
    return made


def main(argv: Sequence[str], notify: Callable[[str], None]) -> int:
    """Convert and print; `notify` prints what is not converted. Raises UsageError, exit code 2."""
    ns = parser().parse_args(argv)
    # Late import: `--help` does not need YAML.
    from elasticrun.jobs.convert.document import MAX_BYTES, NotConvertible, documents
    from elasticrun.jobs.convert.sources import READERS, read

    try:
        found = documents(_text(ns.file, MAX_BYTES))
        jobs = [one for one in found if _kind(one).endswith("Job")]
        if not jobs:
            known = ", ".join(kind for _, kind in READERS)
            raise NotConvertible(f"it contains no job: convertible kinds are {known}")
        if len(jobs) != 1:
            raise NotConvertible(f"it contains {len(jobs)} jobs: convert one at a time")
        for other in found:
            if other is not jobs[0]:
                hint = "apply it separately"
                if _kind(other).endswith("TrainingRuntime"):
                    hint = "add what its pods need to the pod template of the result"
                notify(f"{_kind(other) or 'a document'} in the file is left out: {hint}")
        job = read(jobs[0], None if ns.to == "slurm" else ns.image)
        code = (
            _slurm(job, jobs[0], notify)
            if ns.to == "slurm"
            else _print(job, jobs[0], ns.output, notify)
        )
    except NotConvertible as wrong:
        raise UsageError(f"{ns.file}: {wrong}", EXIT_USAGE) from None
    return code


def _text(file: str, most: int) -> str:
    try:
        with sys.stdin.buffer if file == "-" else Path(file).open("rb") as source:
            return source.read(most + 1).decode()
    except (OSError, UnicodeDecodeError) as wrong:
        why = getattr(wrong, "strerror", None) or "it is not text"
        raise UsageError(f"{file} cannot be read: {why}", EXIT_USAGE) from None


def _kind(document: Document) -> str:
    value = document.value
    return str(value.get("kind", "")) if isinstance(value, dict) else ""


def _print(job: ForeignJob, document: Document, form: str, notify: Callable[[str], None]) -> int:
    from elasticrun.jobs.convert.targets import elastic_job

    made = elastic_job(job)
    _print_notes(document, notify)
    if form == "json":
        sys.stdout.write(json.dumps(made, indent=2) + "\n")
        return EXIT_OK
    import yaml

    class Blocks(yaml.SafeDumper):
        """Keeps multi-line text, such as a shell script, as it was written."""

    def text(dumper: yaml.SafeDumper, value: str) -> yaml.ScalarNode:
        style = "|" if "\n" in value else None
        return dumper.represent_scalar("tag:yaml.org,2002:str", value, style)

    Blocks.add_representer(str, text)
    sys.stdout.write(yaml.dump(made, Dumper=Blocks, sort_keys=False))
    return EXIT_OK


def _slurm(job: ForeignJob, document: Document, notify: Callable[[str], None]) -> int:
    from elasticrun.jobs.convert.targets import slurm_words
    from elasticrun.jobs.verbs import render

    words = slurm_words(job, document)
    _print_notes(document, notify)
    return render.main(["slurm", *words], notify)


def _print_notes(document: Document, notify: Callable[[str], None]) -> None:
    for note in document.notes:
        notify(note)
