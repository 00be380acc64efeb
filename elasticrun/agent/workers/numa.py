"""Which cores each local rank is bound to (`--numa-binding`, dlrover-run's `--numa-affinity`).

The four modes are torch's: the cores of the device's NUMA node, of that node's socket, an exclusive
share of the node's physical cores, or one core complex (a last-level cache). Where there are no
GPUs, the local ranks are spread over the NUMA nodes in blocks. A failure is one line for the
operator and unbound ranks, never the end of the job.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from elasticrun.config import AgentConfig
from elasticrun.host.accelerators.asking import NoAnswer, json_of

NVML_LIMIT: Final = 10.0
"""Seconds that the child which asks NVML may take; a driver in trouble hangs for minutes."""

NVML_SCRIPT: Final = """
import json, os
import pynvml as n
n.nvmlInit()
words = os.environ.get("CUDA_VISIBLE_DEVICES")
if words is None:
    handles = [n.nvmlDeviceGetHandleByIndex(i) for i in range(n.nvmlDeviceGetCount())]
else:
    handles = []
    for word in filter(None, (w.strip() for w in words.split(","))):
        if word.isdecimal():
            handles.append(n.nvmlDeviceGetHandleByIndex(int(word)))
        else:
            handles.append(n.nvmlDeviceGetHandleByUUID(word))
buses = [n.nvmlDeviceGetPciInfo(handle).busId for handle in handles]
print(json.dumps({"buses": [bus.decode() if isinstance(bus, bytes) else bus for bus in buses]}))
"""
"""Prints the PCI ids of the visible devices in order; for a child."""


class NoBinding(Exception):
    """The machine does not show what a binding needs; the text is one sentence."""


@dataclass(frozen=True, slots=True)
class Binding:
    """Where one local rank runs."""

    cpus: tuple[int, ...] = ()
    exec_prefix: tuple[str, ...] = ()


def parse_ranges(text: str) -> set[int]:
    """`0-3,8` as the kernel writes sets of numbers."""
    numbers: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        numbers.update(range(int(first), int(last or first) + 1))
    return numbers


class Topology:
    """The machine's NUMA nodes, sockets, cores and caches as sysfs shows them."""

    def __init__(self, allowed: Iterable[int], root: Path = Path("/sys")) -> None:
        self._allowed = set(allowed)
        self._root = root

    def _read(self, path: str) -> str:
        try:
            return (self._root / path).read_text()
        except OSError as error:
            raise NoBinding(f"{self._root / path} cannot be read ({error.strerror})") from None

    def nodes(self) -> list[int]:
        """NUMA nodes that have cores which this process may use."""
        online = parse_ranges(self._read("devices/system/node/online"))
        return [node for node in sorted(online) if self.cpus_of(node)]

    def cpus_of(self, node: int) -> set[int]:
        """The cores of a NUMA node that this process may use."""
        listed = parse_ranges(self._read(f"devices/system/node/node{node}/cpulist"))
        return listed & self._allowed

    def _socket_of_cpu(self, cpu: int) -> int:
        path = f"devices/system/cpu/cpu{cpu}/topology/physical_package_id"
        return int(self._read(path))

    def socket_cpus(self, node: int) -> set[int]:
        """The cores of all NUMA nodes on the same socket."""
        socket = self._socket_of_cpu(min(self.cpus_of(node)))
        cpus: set[int] = set()
        for other in self.nodes():
            if self._socket_of_cpu(min(self.cpus_of(other))) == socket:
                cpus |= self.cpus_of(other)
        return cpus

    def core_of(self, cpu: int) -> int:
        """The physical core, named by its lowest hardware thread."""
        path = f"devices/system/cpu/cpu{cpu}/topology/thread_siblings_list"
        return min(parse_ranges(self._read(path)))

    def cache_of(self, cpu: int) -> int:
        """The last-level data cache, named by its lowest core."""
        best, sharers = -1, {cpu}
        folder = self._root / f"devices/system/cpu/cpu{cpu}/cache"
        for index in sorted(folder.glob("index[0-9]*")):
            relative = str(index.relative_to(self._root))
            if self._read(f"{relative}/type").strip() not in ("Unified", "Data"):
                continue
            level = int(self._read(f"{relative}/level"))
            if level > best:
                best, sharers = level, parse_ranges(self._read(f"{relative}/shared_cpu_list"))
        return min(sharers)

    def node_of_pci(self, bus_id: str) -> int:
        """The NUMA node of a PCI device; 0 where the kernel does not know (single node)."""
        # NVML writes the domain with eight digits, sysfs with four.
        match = re.fullmatch(r"([0-9a-f]+):([0-9a-f]{2}:[0-9a-f]{2}\.[0-9a-f])", bus_id.lower())
        if match is None:
            raise NoBinding(f"{bus_id!r} is no PCI address")
        name = f"{int(match[1], 16):04x}:{match[2]}"
        return max(0, int(self._read(f"bus/pci/devices/{name}/numa_node")))


def place(nproc: int, topology: Topology, devices: Sequence[str]) -> list[int]:
    """The NUMA node of each local rank: its device's, else in blocks over the nodes."""
    if devices:
        if nproc > len(devices):
            raise NoBinding(f"{nproc} local ranks but only {len(devices)} GPUs")
        return [topology.node_of_pci(device) for device in devices]
    nodes = topology.nodes()
    if not nodes:
        raise NoBinding("no NUMA node has a core that this process may use")
    return [nodes[rank * len(nodes) // nproc] for rank in range(nproc)]


def bind(mode: str, topology: Topology, homes: Sequence[int]) -> list[tuple[int, ...]]:
    """The cores of every consumer, given each one's NUMA node. Raises NoBinding."""
    rules: dict[str, Callable[[Topology, Sequence[int], int], set[int]]] = {
        "node": lambda t, h, i: t.cpus_of(h[i]),
        "socket": lambda t, h, i: t.socket_cpus(h[i]),
        "exclusive": _exclusive,
        "core-complex": _core_complex,
    }
    if mode not in rules:
        raise NoBinding(f"{mode!r} is none of {', '.join(rules)}")
    bound = [tuple(sorted(rules[mode](topology, homes, i))) for i in range(len(homes))]
    if not all(bound):
        raise NoBinding("a rank would have no core")
    return bound


def _groups(cpus: Iterable[int], key: Callable[[int], int]) -> dict[int, set[int]]:
    groups: dict[int, set[int]] = {}
    for cpu in cpus:
        groups.setdefault(key(cpu), set()).add(cpu)
    return groups


def _place_among_peers(homes: Sequence[int], index: int) -> tuple[int, int]:
    peers = [i for i, home in enumerate(homes) if home == homes[index]]
    return peers.index(index), len(peers)


def _exclusive(topology: Topology, homes: Sequence[int], index: int) -> set[int]:
    mine, peers = _place_among_peers(homes, index)
    cores = sorted(_groups(topology.cpus_of(homes[index]), topology.core_of).items())
    share, extra = divmod(len(cores), peers)
    if share < 1:
        raise NoBinding(
            f"NUMA node {homes[index]} has {len(cores)} physical cores for {peers} ranks"
        )
    begin = mine * share + min(mine, extra)  # the first `extra` ranks have one core more
    end = begin + share + (mine < extra)
    return set().union(*(threads for _, threads in cores[begin:end]))


def _core_complex(topology: Topology, homes: Sequence[int], index: int) -> set[int]:
    mine, _ = _place_among_peers(homes, index)
    complexes = _groups(topology.cpus_of(homes[index]), topology.cache_of)
    largest_first = sorted(complexes.items(), key=lambda item: (-len(item[1]), item[0]))
    return largest_first[mine % len(largest_first)][1]


def memory_prefix(policy: str | None, node: int) -> tuple[str, ...]:
    """The numactl words in front of an exec'd command; dlrover-run's three policies."""
    if policy is None or shutil.which("numactl") is None:
        return ()
    words = {"bind": f"--membind={node}", "preferred": f"--preferred={node}"}
    return ("numactl", f"--cpunodebind={node}", *filter(None, [words.get(policy, "")]))


def wanted(config: AgentConfig) -> bool:
    """Whether ranks of this job are to be bound at all."""
    return config.numa_binding is not None or config.numa_affinity


def plan(
    config: AgentConfig, topology: Topology, devices: Sequence[str]
) -> tuple[list[Binding], str]:
    """The binding of each local rank, and a sentence if there is none. Reads sysfs: blocks."""
    unbound = [Binding()] * config.nproc_per_node
    try:
        homes = place(config.nproc_per_node, topology, devices)
        cpus = bind(config.numa_binding or "node", topology, homes)
    except (NoBinding, ValueError) as error:
        return unbound, f"ranks are not bound to cores: {error}"
    note = ""
    if config.membind_policy is not None and shutil.which("numactl") is None:
        note = "--membind-policy has no effect: numactl is not installed"
    prefixes = [memory_prefix(config.membind_policy, home) for home in homes]
    return [Binding(*pair) for pair in zip(cpus, prefixes, strict=True)][
        : config.nproc_per_node
    ], note


def has_nvidia(environ: Mapping[str, str]) -> bool:
    """Whether asking NVML can be worth a child: the driver's node is there and not hidden."""
    return environ.get("CUDA_VISIBLE_DEVICES") != "" and os.path.exists("/dev/nvidiactl")


def visible_gpus(environ: Mapping[str, str]) -> tuple[list[str], str]:
    """PCI ids of the GPUs that ranks will see, asked of NVML in a child; and why it is not known.

    A child, because NVML may hang with its driver, and because the agent keeps no library that it
    needs once. Blocks for little more than NVML_LIMIT seconds, whatever the driver does."""
    if not has_nvidia(environ):
        return [], ""
    try:
        answer = json_of([sys.executable, "-P", "-c", NVML_SCRIPT], environ, NVML_LIMIT)
    except NoAnswer as why:
        return [], f"NVML could not be asked: {why}"
    buses = answer["buses"]
    assert isinstance(buses, list)
    return buses, ""


def find(config: AgentConfig) -> tuple[list[Binding], str]:
    """The binding of each local rank on this machine, and a sentence if there is none. Blocks."""
    devices, why = visible_gpus(os.environ)
    if why:
        return [Binding()] * config.nproc_per_node, f"ranks are not bound to cores: {why}"
    return plan(config, Topology(os.sched_getaffinity(0)), devices)
