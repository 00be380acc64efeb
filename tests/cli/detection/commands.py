"""A command under an environment, resolved as `elasticrun` resolves it, without its processes."""

from __future__ import annotations

from collections.abc import Mapping

from elasticrun.cli.detection.found import HostFacts, Machine
from elasticrun.cli.flags import get_args_parser
from elasticrun.cli.place import detect_place
from elasticrun.cli.resolve import Resolved, resolve
from elasticrun.cli.settings import DetectedPlace, FlagValues
from elasticrun.cli.verbs.dry_run import describe

NOT_A_POD = HostFacts(hostname="node3", fqdn="node3")


def pod(hostname: str, domain: str = "", *, terminal: bool = False) -> HostFacts:
    """What a pod knows of itself; `domain`: its subdomain and what follows."""
    return HostFacts(terminal, hostname, f"{hostname}.{domain}" if domain else hostname)


def machine(facts: HostFacts | None, gpus: int = 0) -> Machine:
    """A machine on which nothing is looked up."""
    return Machine(
        lambda: 6,
        {"gpu": gpus, "xpu": 0, "auto": gpus}.get,
        lambda group: [],
        None if facts is None else lambda: facts,
    )


def resolved(
    words: str, environ: Mapping[str, str], facts: HostFacts | None = NOT_A_POD, gpus: int = 0
) -> Resolved:
    ns = get_args_parser(environ).parse_args([*words.split(), "s.py"])
    return resolve(ns, environ, machine(facts, gpus))


def seen(
    words: str, environ: Mapping[str, str], facts: HostFacts = NOT_A_POD, gpus: int = 0
) -> DetectedPlace:
    ns = get_args_parser(environ).parse_args([*words.split(), "s.py"])
    return detect_place(FlagValues(ns, environ), machine(facts, gpus))


def dry_run(words: str, environ: Mapping[str, str], facts: HostFacts = NOT_A_POD) -> dict[str, str]:
    """The rows of --dry-run by their first word or words."""
    ns = get_args_parser(environ).parse_args(["--verbose", *words.split(), "s.py"])
    found = resolve(ns, environ, machine(facts))
    text = describe(found, ns, environ, detect_place(FlagValues(ns, environ), machine(facts)))
    rows = [line.split("  ", 1) for line in text.splitlines() if "  " in line]
    return {name: " ".join(rest.split()) for name, rest in rows}
