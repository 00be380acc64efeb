"""Flags of node health to `CheckSpec`, the precheck's level and the accelerator's name. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Final

from elasticrun import accelerators, config
from elasticrun.cli import values
from elasticrun.cli.settings import Asked
from elasticrun.cli.values import UsageError
from elasticrun.wire.messages import MAX_NODES, CheckSpec

TIMES: Final = {
    "probe_timeout": config.PROBE_LIMIT,
    "straggler_time": config.SLOW_FOR,
}
"""Keys of --rdzv-conf that are times of node health, with their defaults."""

AUTO_CHECK_NODES: Final = 4
"""From so many nodes on, --auto-config checks the network, as dlrover-run does."""


def checks(asked: Asked, conf: Mapping[str, str], min_nodes: int) -> CheckSpec:
    """How the job looks after the health of its nodes; raises `UsageError`."""
    level = precheck(asked)
    auto = asked.switch("auto_config") and min_nodes >= AUTO_CHECK_NODES
    times = {
        key: values.seconds(conf.get(key, str(default)), f"--rdzv-conf: {key}")
        for key, default in TIMES.items()
    }
    return CheckSpec(
        network=asked.switch("network_check") or level >= 1 or auto,
        perf=asked.switch("comm_perf_test") or level >= 2,
        perf_floor=_number(asked, "comm_perf_threshold", "0 GB/s or more", lambda x: x >= 0),
        exclude_stragglers=asked.switch("exclude_straggler"),
        slow_ratio=_number(asked, "straggler_ratio", "a ratio above 1", lambda x: x > 1),
        slow_for=times["straggler_time"],
        probe_limit=times["probe_timeout"],
        exclude_for=values.seconds(str(asked.value("exclude_for")), "--exclude-for"),
        quarantine=_quarantine(asked),
    )


def _quarantine(asked: Asked) -> int:
    most = asked.number("quarantine")
    if not 0 <= most <= MAX_NODES:
        raise UsageError(f"--quarantine={most} is not a number of nodes", config.EXIT_USAGE)
    return most


def precheck(asked: Asked) -> int:
    """The level of --precheck; raises `UsageError` where there is no such level."""
    level = asked.number("precheck")
    if level not in (0, 1, 2):
        raise UsageError(f"--precheck={level}: use 0, 1 or 2", config.EXIT_USAGE)
    return level


def accelerator(asked: Asked) -> str:
    """The name of --accelerator as `accelerators.of` knows it; "" where it is found by itself."""
    word = asked.text("accelerator")
    if not word or word in accelerators.UNSUPPORTED:
        return ""
    name = accelerators.ALIASES.get(word, word)
    if name not in accelerators.NAMES:
        known = ", ".join(accelerators.NAMES)
        raise UsageError(f"--accelerator={word} is not known: use {known}", config.EXIT_USAGE)
    return name


def notes(asked: Asked, found: CheckSpec) -> list[str]:
    """What was asked for and has no effect, and what --auto-config has switched on."""
    told = []
    word = asked.text("accelerator")
    if word in accelerators.UNSUPPORTED:
        told.append(
            f"--accelerator={word} is not supported: probes use what is found by itself "
            f"({', '.join(accelerators.NAMES)})"
        )
    if found.perf_floor and not found.perf:
        told.append("--comm-perf-threshold has no effect without --comm-perf-test")
    if found.quarantine and not (found.network or found.exclude_stragglers):
        told.append(
            "--quarantine has no effect without --network-check or --exclude-straggler: nothing "
            "excludes a node"
        )
    if found.network and not asked.switch("network_check") and not asked.number("precheck"):
        told.append(
            f"--auto-config: the network is checked before training, as there are at least "
            f"{AUTO_CHECK_NODES} nodes"
        )
    return told


def _number(asked: Asked, dest: str, wants: str, fits: Callable[[float], bool]) -> float:
    value = float(asked.value(dest))
    if not (math.isfinite(value) and fits(value)):
        raise UsageError(f"--{dest.replace('_', '-')}={value:g} is not {wants}", config.EXIT_USAGE)
    return value
