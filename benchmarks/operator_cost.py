"""Measures the operator: CPU and memory with many jobs, and how soon a dead pod is replaced.

    python benchmarks/operator_cost.py [--jobs N] [--nodes N] [--seconds S] [--json FILE]

The API server is the tests' stand-in, whose pods have no processes. One real master answers for all
jobs; its answer is changed to say that they train, because no rank runs. The operator polls the
masters and relists as usual.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
import report

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tests.jobs.operator.test_operator import ACCOUNT, COMMAND, install
from tests.kubernetes.cluster import StandIn

TOKEN = "t" * 64

OPERATOR = f"""
import sys, msgspec
from elasticrun.jobs.verbs import operator
from elasticrun.jobs.operator import controller
from elasticrun.wire.messages import NodeStatus
ask = controller.get_status
placed = tuple(NodeStatus(f"n{{i}}", "", "", "alive", "", "", i, i, 1, ()) for i in range(NODES))
async def training(*where, **how):
    page = await ask(*where, **how)
    return msgspec.structs.replace(page, phase="running", max_nodes=NODES, nodes=placed)
controller.get_status = training
controller.Controller._token = lambda self, job: "{TOKEN}"
sys.exit(operator.main(["--namespace=default"]))
"""


def job(name: str, nodes: int) -> str:
    return f"""\
apiVersion: elasticrun.dev/v1alpha1
kind: ElasticJob
metadata: {{name: {name}}}
spec:
  nodes: {nodes}
  template: {{spec: {{containers: [{{name: train, image: i, command: [elasticrun, train.py]}}]}}}}
---
"""


def measure(jobs: int, nodes: int, seconds: float, scratch: Path) -> dict[str, Any]:
    """Run the operator with this many jobs, each of `nodes` nodes, and measure for some seconds.
    Returns the figures."""
    cluster = StandIn(scratch, hollow=True)
    for number in range(jobs * (nodes + 1) // 100 + 1):
        cluster.node(f"n{number}", cpu=1000)
    kubectl = install(cluster)
    master = subprocess.Popen(
        [COMMAND, "master", "--host=0.0.0.0"], env={**os.environ, "ELASTICRUN_TOKEN": TOKEN}
    )
    program = OPERATOR.replace("NODES", str(nodes))
    environment = cluster.client(ACCOUNT).environment
    operator_process = subprocess.Popen([sys.executable, "-c", program], env=environment)
    try:
        kubectl("apply", "-f", "-", given="".join(job(f"j{i}", nodes) for i in range(jobs)))

        def trains(found: list[dict[str, Any]]) -> bool:
            return all((one.get("status") or {}).get("phase") == "Running" for one in found)

        began = time.monotonic()
        cluster.until("elasticjobs", trains, group="elasticrun.dev", limit=300)
        whole = time.monotonic() - began
        time.sleep(10)
        process = psutil.Process(operator_process.pid)
        before, asked = process.cpu_times(), sum(cluster.server.used.values())
        time.sleep(seconds)
        after = process.cpu_times()
        cpu = (after.user + after.system - before.user - before.system) / seconds
        rate = (sum(cluster.server.used.values()) - asked) / seconds
        rss = process.memory_info().rss / 2**20
        gaps = [replacement_time(cluster, f"j{i}-1") for i in range(0, jobs, max(1, jobs // 20))]
    finally:
        operator_process.terminate()
        master.terminate()
        operator_process.wait()
        master.wait()
        cluster.close()
    return {"jobs": jobs, "pods": jobs * nodes, "cpu": round(cpu, 3), "rss_mib": round(rss),
            "requests_per_s": round(rate, 1), "all_running_s": round(whole, 1),
            "replaced_median_s": round(statistics.median(gaps), 3),
            "replaced_worst_s": round(max(gaps), 3)}  # fmt: skip


def replacement_time(cluster: StandIn, index: str) -> float:
    """Kill the first pod of an index. Returns the seconds until it has a successor."""

    async def successor() -> None:
        while ("default", f"{index}-1") not in cluster.store.objects["", "pods"]:
            await cluster.store.changed()

    began = time.monotonic()
    cluster.finish(f"{index}-0", 137)
    cluster.call(successor())
    return time.monotonic() - began


def main() -> int:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description="What the operator costs.")
    parser.add_argument("--jobs", type=int, default=100)
    parser.add_argument("--nodes", type=int, default=10)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--json", type=Path, help="where the results go")
    options = parser.parse_args()
    about = report.begin()
    with tempfile.TemporaryDirectory() as scratch:
        found = measure(options.jobs, options.nodes, options.seconds, Path(scratch))
    for name, value in found.items():
        print(f"{name:20} {value}")
    report.write("operator-cost", about, found, options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
