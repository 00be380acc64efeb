"""Cores for local ranks, on machines made of files."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from elasticrun.agent.workers import numa
from tests.agent.configs import agent_config


def machine(root: Path, nodes: int, cores: int, threads: int = 1, per_cache: int = 2) -> Path:
    """Sysfs of a machine: two NUMA nodes a socket, a cache for every `per_cache` cores; the
    second hardware thread of core i is cpu i + nodes * cores."""
    total = nodes * cores

    def put(path: str, text: str) -> None:
        file = root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text + "\n")

    put("devices/system/node/online", f"0-{nodes - 1}" if nodes > 1 else "0")
    for node in range(nodes):
        mine = [node * cores + core + total * t for t in range(threads) for core in range(cores)]
        put(f"devices/system/node/node{node}/cpulist", ",".join(map(str, mine)))
        put(f"bus/pci/devices/0000:0{node}:00.0/numa_node", str(node))
        for cpu in mine:
            core = cpu % total
            siblings = ",".join(str(core + total * t) for t in range(threads))
            sharers = [
                c + total * t
                for t in range(threads)
                for c in range(core - core % per_cache, core - core % per_cache + per_cache)
            ]
            base = f"devices/system/cpu/cpu{cpu}"
            put(f"{base}/topology/physical_package_id", str(node // 2))
            put(f"{base}/topology/thread_siblings_list", siblings)
            for index, (kind, level, shared) in enumerate(
                [("Data", 1, str(core)), ("Instruction", 1, str(core)),
                 ("Unified", 3, ",".join(map(str, sharers)))]
            ):  # fmt: skip
                put(f"{base}/cache/index{index}/type", kind)
                put(f"{base}/cache/index{index}/level", str(level))
                put(f"{base}/cache/index{index}/shared_cpu_list", shared)
    return root


def test_ranges() -> None:
    assert numa.parse_ranges("0-3,8\n") == {0, 1, 2, 3, 8}
    assert numa.parse_ranges("") == set()
    assert numa.parse_ranges("5") == {5}


def test_gpus_name_their_node_and_without_any_there_are_blocks(tmp_path: Path) -> None:
    topology = numa.Topology(range(64), machine(tmp_path, nodes=2, cores=4))
    assert numa.place(4, topology, []) == [0, 0, 1, 1]
    assert numa.place(3, topology, []) == [0, 0, 1]
    assert numa.place(1, topology, []) == [0]
    assert numa.place(2, topology, ["00000000:01:00.0", "00000000:00:00.0"]) == [1, 0]
    with pytest.raises(numa.NoBinding, match="3 local ranks but only 1 GPUs"):
        numa.place(3, topology, ["00000000:01:00.0"])


def test_an_unknown_numa_node_is_the_first(tmp_path: Path) -> None:
    topology = numa.Topology(range(8), machine(tmp_path, nodes=1, cores=2))
    (tmp_path / "bus/pci/devices/0000:00:00.0/numa_node").write_text("-1\n")
    assert numa.place(1, topology, ["00000000:00:00.0"]) == [0]


def test_the_four_modes(tmp_path: Path) -> None:
    topology = numa.Topology(range(64), machine(tmp_path, nodes=4, cores=4, threads=2))
    homes = [0, 0, 1]
    node0 = (0, 1, 2, 3, 16, 17, 18, 19)
    node1 = (4, 5, 6, 7, 20, 21, 22, 23)
    assert numa.bind("node", topology, homes) == [node0, node0, node1]
    assert numa.bind("socket", topology, homes) == [tuple(sorted(node0 + node1))] * 3
    assert numa.bind("exclusive", topology, homes) == [(0, 1, 16, 17), (2, 3, 18, 19), node1]
    assert numa.bind("core-complex", topology, homes) == [
        (0, 1, 16, 17),
        (2, 3, 18, 19),
        (4, 5, 20, 21),
    ]


def test_exclusive_gives_the_first_ranks_one_core_more(tmp_path: Path) -> None:
    topology = numa.Topology(range(64), machine(tmp_path, nodes=1, cores=5, per_cache=5))
    assert numa.bind("exclusive", topology, [0, 0, 0]) == [(0, 1), (2, 3), (4,)]
    with pytest.raises(numa.NoBinding, match="5 physical cores for 6 ranks"):
        numa.bind("exclusive", topology, [0] * 6)


def test_only_cores_that_we_may_use(tmp_path: Path) -> None:
    topology = numa.Topology({1, 3}, machine(tmp_path, nodes=2, cores=2))
    assert numa.bind("node", topology, [0, 1]) == [(1,), (3,)]


def test_a_machine_that_shows_nothing_is_a_sentence_and_no_binding(tmp_path: Path) -> None:
    config = agent_config(numa_binding="node")
    bindings, note = numa.plan(config, numa.Topology({0}, tmp_path), [])
    assert bindings == [numa.Binding(), numa.Binding()]
    assert note.startswith("ranks are not bound to cores: ")


def test_the_plan_of_a_job(tmp_path: Path) -> None:
    topology = numa.Topology(range(8), machine(tmp_path, nodes=2, cores=2))
    bindings, note = numa.plan(agent_config(numa_affinity=True), topology, [])
    assert [b.cpus for b in bindings] == [(0, 1), (2, 3)]
    assert note == ""


# ---------------------------------------------------------------- the GPUs that ranks will see

PYNVML = """
import os, signal
def nvmlInit():
    {init}
def nvmlDeviceGetCount():
    return 2
def nvmlDeviceGetHandleByIndex(index):
    return index
def nvmlDeviceGetPciInfo(handle):
    from types import SimpleNamespace
    return SimpleNamespace(busId=f"00000000:0{{handle}}:00.0".encode())
"""


def gpus(
    folder: Path, patch: pytest.MonkeyPatch, init: str = "pass", **environ: str
) -> tuple[list[str], str]:
    """Those that NVML shows here, if its library does `init` first."""
    (folder / "pynvml.py").write_text(PYNVML.format(init=init))
    patch.setattr(numa, "has_nvidia", lambda _: True)
    kept = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
    return numa.visible_gpus(kept | {"PYTHONPATH": str(folder)} | environ)


def test_the_gpus_that_are_visible(tmp_path: Path, monkeypatch) -> None:
    both = ["00000000:00:00.0", "00000000:01:00.0"]
    assert gpus(tmp_path, monkeypatch) == (both, "")
    assert gpus(tmp_path, monkeypatch, CUDA_VISIBLE_DEVICES="1,0") == (both[::-1], "")


@pytest.mark.parametrize(
    ("init", "limit", "why"),
    [
        ("raise RuntimeError('GPU is lost')", numa.NVML_LIMIT, "RuntimeError: GPU is lost"),
        # nor does what it has started hold anybody up, which keeps the pipe to us open
        ("os.fork(); signal.pause()", 1.0, "no answer within 1 s"),
    ],
)
def test_a_driver_in_trouble_is_a_sentence(
    init: str, limit: float, why: str, tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.setattr(numa, "NVML_LIMIT", limit)
    assert gpus(tmp_path, monkeypatch, init) == ([], f"NVML could not be asked: {why}")
