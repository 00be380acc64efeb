"""The child that watches GPUs and network ports: a stand-in for NVML, and a folder for sysfs."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from elasticrun.host.accelerators import watch_child
from tests.harness import LIMIT, await_exit
from tests.host.accelerators.standins import bare, gpu, nvml


class Watched:
    """A running child, and the node that it sees."""

    def __init__(self, folder: Path, environ: dict[str, str], *words: str) -> None:
        self._folder = folder
        words = (watch_child.__file__, "0.05", str(folder / "sys"), *words)
        self.process = subprocess.Popen(
            [sys.executable, "-P", *words],
            env=environ,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def change(self, *gpus: dict[str, Any]) -> None:
        """NVML answers for these GPUs from now on."""
        described = self._folder / "nvml.json"
        new = described.with_suffix(".new")
        new.write_text(json.dumps({**json.loads(described.read_text()), "gpus": gpus}))
        new.replace(described)

    def until(self, good: Callable[[dict[str, Any]], object]) -> dict[str, Any]:
        """The first line of the child that is so."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if good(found := json.loads(line)):
                return dict(found)
        raise AssertionError("it has ended")

    def write(self, text: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(text)
        self.process.stdin.flush()


@contextmanager
def watched(folder: Path, *gpus: dict[str, Any], **node: Any) -> Iterator[Watched]:
    """A child that watches these GPUs; it ends when its standard input does."""
    (folder / "sys").mkdir(exist_ok=True)
    words = ["--gpus"] if gpus else []
    one = Watched(folder, nvml(folder, *gpus, **node) if gpus else bare(), *words)
    end = threading.Timer(LIMIT, one.process.kill)  # what waits for its lines fails then
    end.start()
    with one.process:
        yield one
        end.cancel()
        assert one.process.stdin is not None
        one.process.stdin.close()
        assert one.process.wait(LIMIT) == 0


def test_every_name_of_nvml_is_real() -> None:
    import pynvml

    tree = ast.parse(Path(watch_child.__file__).read_text())
    names = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    names = {name for name in names if name.lower().startswith("nvml")} - {"nvmlReturn"}
    assert len(names) > 12
    assert [name for name in sorted(names) if not hasattr(pynvml, name)] == []
    fields = {name for name, _ in pynvml.c_nvmlEventData_t._fields_}
    assert {"device", "eventType", "eventData"} <= fields
    assert hasattr(pynvml.c_nvmlFieldValue_t(), "nvmlReturn")
    assert hasattr(pynvml.c_nvmlFieldValue_t().value, "uiVal")


WELL = {"index": 0, "uuid": "GPU-00", "xids": [], "ecc": False, "recovery": 0, "slowed": []}


def test_a_node_that_is_well(tmp_path: Path) -> None:
    with watched(tmp_path, gpu(0, held=[[4711, 2**30]])) as node:
        state = node.until(lambda found: found)
    well = {**WELL, "links": 18, "down": 0}
    assert state == {"gpus": [well], "nics": [], "processes": [[0, 4711, 2**30]]}


def test_xids_are_told_at_once(tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    with watched(tmp_path, gpu(0), gpu(1), fifo=str(fifo)) as node:
        node.until(lambda found: found)
        with fifo.open("w") as events:
            events.write("1 31\n1 79\n1 31\n")
        state = node.until(lambda found: len(found["gpus"][1]["xids"]) == 2)
    assert [one["xids"] for one in state["gpus"]] == [[], [31, 79]]


def test_what_changes_is_compared_with_the_start(tmp_path: Path) -> None:
    """What was so before this job, such as an empty slot for a bridge, is the doctor's."""
    with watched(tmp_path, gpu(0, ecc=3, links=[1, 0, 1])) as node:
        state = node.until(lambda found: found)["gpus"][0]
        assert (state["ecc"], state["links"], state["down"]) == (False, 2, 0)
        node.change(gpu(0, ecc=4, links=[1, 0, 0], reasons=0x40, recovery=1))
        state = node.until(lambda found: found["gpus"][0]["ecc"])["gpus"][0]
    assert state["down"] == 1
    assert state["slowed"] == ["hardware thermal slowdown"]
    assert state["recovery"] == 1


def test_a_lost_gpu_keeps_its_name(tmp_path: Path) -> None:
    with watched(tmp_path, gpu(0), gpu(1)) as node:
        node.until(lambda found: found)
        node.change(gpu(0), gpu(1, lost=True))
        state = node.until(lambda found: found["gpus"][1].get("lost"))
    assert state["gpus"][1] == {"index": 1, "uuid": "GPU-11", "xids": [], "lost": "GPU is lost"}
    assert "lost" not in state["gpus"][0]


def test_a_gpu_that_knows_little(tmp_path: Path) -> None:
    """Without events, ECC, links and recovery actions, as on small cards."""
    with watched(tmp_path, {"uuid": "GPU-00", "reasons": 1}) as node:
        state = node.until(lambda found: found)
    assert state["gpus"] == [{**WELL, "links": 0, "down": 0}]


def test_processes_are_listed_when_asked(tmp_path: Path) -> None:
    with watched(tmp_path, gpu(0, held=[[4711, 2**30]]), gpu(1, held=[[4712, None]])) as node:
        node.write("processes\n")
        found = node.until(lambda found: "gpus" not in found)
    assert found == {"processes": [[0, 4711, 2**30], [1, 4712, None]]}


def test_network_ports(tmp_path: Path) -> None:
    """Those that were up at the start; virtual devices have no `device`."""
    ib = tmp_path / "sys/class/infiniband/mlx5_0/ports/1"
    nets = tmp_path / "sys/class/net"
    files = {
        ib / "state": "4: ACTIVE",
        ib / "counters/link_downed": "2",
        nets / "eth0/operstate": "up",
        nets / "eth0/statistics/rx_errors": "7",
        nets / "eth0/device/uevent": "",
        nets / "eth1/operstate": "down",
        nets / "eth1/device/uevent": "",
        nets / "docker0/operstate": "up",
    }
    for path, text in files.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")
    with watched(tmp_path) as node:
        state = node.until(lambda found: found)
        assert state == {
            "gpus": [],
            "nics": [
                {"name": "mlx5_0 port 1", "up": True, "errors": {}},
                {"name": "eth0", "up": True, "errors": {}},
            ],
            "processes": [],
        }
        (ib / "counters/link_downed").write_text("5\n")
        (nets / "eth0/operstate").write_text("down\n")
        state = node.until(lambda found: found["nics"][0]["errors"] and not found["nics"][1]["up"])
    assert state["nics"][0]["errors"] == {"link_downed": 3}


def test_a_driver_that_does_not_load(tmp_path: Path) -> None:
    node = Watched(tmp_path, nvml(tmp_path, broken=12), "--gpus")
    with node.process:
        assert node.process.stdout is not None
        assert node.process.stdout.read() == "NVML Shared Library Not Found\n"
        assert node.process.wait(LIMIT) == 1


STARTER = """
import subprocess, sys
child = subprocess.Popen(sys.argv[1:], stdin=subprocess.PIPE)
print(child.pid, flush=True)
sys.stdin.read()
"""


def test_a_child_that_hangs_in_a_driver_ends_with_its_owner(tmp_path: Path) -> None:
    """The owner is killed while nvmlInit blocks, or before."""
    words = [sys.executable, "-P", watch_child.__file__, "0.05", str(tmp_path), "--gpus"]
    owner = subprocess.Popen(
        [sys.executable, "-c", STARTER, *words],
        env=nvml(tmp_path, hangs=True),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with owner:
        assert owner.stdout is not None
        pid = int(owner.stdout.readline())
        owner.kill()
    assert not await_exit([pid])
