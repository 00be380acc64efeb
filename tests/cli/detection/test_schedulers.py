"""One row a case: an environment as a scheduler makes it, the flags, and the job that they mean."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

import pytest

from elasticrun.cli.detection.detect import detect
from elasticrun.cli.detection.found import HostFacts, port_of_name
from elasticrun.cli.settings import NothingToDo
from elasticrun.config import Place
from tests.cli.detection.commands import NOT_A_POD, pod, resolved
from tests.cli.detection.environments import (
    ARRAY,
    BATCH,
    CROWD,
    DLROVER,
    INDEXED,
    INTERACTIVE,
    LWS,
    POD,
    PTY,
    PYTORCH_JOB,
    REQUEUED,
    SALLOC,
    SKYPILOT,
    SRUN,
    STEP_OF_BATCH,
    TRAINER_1,
    TRAINER_1_ELASTIC,
    TRAINER_2,
    VOLCANO,
    VOLCANO_PYTORCH,
)

Range = tuple[int, int]


class Case(NamedTuple):
    """Environment, flags and facts; what must come of them. job_id "*": one that is fresh."""

    name: str
    environ: Mapping[str, str]
    flags: str
    facts: HostFacts
    nodes: Range
    rank: int
    place: Place
    job_id: str
    note: str  # a part of what is said, "" for nothing about a scheduler
    nproc: int = 1
    gpus: int = 0


ALONE = Place("standalone", "127.0.0.1", 0)
TERMINAL = HostFacts(terminal=True, hostname="node2", fqdn="node2")
WORKER = pod("tr-2", "tr.research.svc.cluster.local")


def at(host: str, port: int) -> Place:
    return Place("elastic", host, port)


def alone(
    name: str, environ: Mapping[str, str], note: str, facts: HostFacts = NOT_A_POD, flags: str = ""
) -> Case:
    """A bare command (or nearly) that is a job of one node."""
    return Case(name, environ, flags, facts, (1, 1), -1, ALONE, "*", note)


GPUS = {"SLURM_GPUS_ON_NODE": "8"}
SLURM = [
    Case("a step", SRUN, "", NOT_A_POD, (2, 2), 1, at("node2", 20001), "1",
         "task 1 of 2 in Slurm step 1.0, so this equals --nnodes=2 --rdzv-backend=c10d"),
    Case("a step in a batch script", STEP_OF_BATCH, "", NOT_A_POD, (2, 2), 0,
         at("node2", 20003), "3", "task 0 of 2 in Slurm step 3.0"),
    Case("its GPUs", SRUN | GPUS, "", NOT_A_POD, (2, 2), 1, at("node2", 20001), "1",
         "--nproc-per-node=8", nproc=8),
    Case("fewer that it may see", SRUN | GPUS | {"CUDA_VISIBLE_DEVICES": "2,3"}, "", NOT_A_POD,
         (2, 2), 1, at("node2", 20001), "1", "--nproc-per-node=2", nproc=2),
    Case("GPUs that Slurm does not count", SRUN, "", NOT_A_POD, (2, 2), 1, at("node2", 20001), "1",
         "--nproc-per-node=4", nproc=4, gpus=4),
    Case("ranks that are said", SRUN | GPUS, "--nproc-per-node=3", NOT_A_POD, (2, 2), 1,
         at("node2", 20001), "1", "Slurm", nproc=3),
    Case("nodes that are said: ranks are what they were", SRUN | GPUS, "--nnodes=2", NOT_A_POD,
         (2, 2), 1, at("node2", 20001), "1", "--rdzv-endpoint=node2:20001"),
    Case("a range that is said", SRUN, "--nnodes=1:2", NOT_A_POD, (1, 2), 1, at("node2", 20001),
         "1", "Slurm"),
    Case("fewer nodes than there are: a spare", SRUN | {"SLURM_NODEID": "3",
         "SLURM_STEP_NUM_NODES": "4", "SLURM_STEP_NUM_TASKS": "4",
         "SLURM_STEP_NODELIST": "node[2-5]"}, "--nnodes=2:3", NOT_A_POD, (2, 3), 3,
         at("node2", 20001), "1", "Slurm"),
    Case("by PET_NNODES", SRUN | {"PET_NNODES": "1:2"}, "", NOT_A_POD, (1, 2), 1,
         at("node2", 20001), "1", "Slurm"),
    Case("a name that is said has a port of its own", SRUN, "--rdzv-id=mine", NOT_A_POD, (2, 2), 1,
         at("node2", port_of_name("mine")), "mine", "Slurm"),
    Case("a task of an array", ARRAY, "", NOT_A_POD, (2, 2), 0, at("node2", 20005), "4_3", "Slurm"),
    Case("a later step of the job", SRUN | {"SLURM_STEP_ID": "2", "SLURM_STEPID": "2"}, "",
         NOT_A_POD, (2, 2), 1, at("node2", 20001 + 2 * 1009), "1.2", "Slurm step 1.2"),
    Case("the second attempt", REQUEUED, "", NOT_A_POD, (2, 2), 0, at("node2", 20003), "3",
         "in Slurm step 3.0, attempt 2 ($SLURM_RESTART_COUNT), so this equals"),
    Case("a cloud's node has an address", SRUN | {"SLURM_NODE_ALIASES":
         "node2:10.1.2.3:ip-10-1-2-3,node3:10.1.2.4:x"}, "", NOT_A_POD, (2, 2), 1,
         at("10.1.2.3", 20001), "1", "Slurm"),
    Case("one agent a node", CROWD | {"SLURM_LOCALID": "0", "SLURM_PROCID": "2"}, "--nnodes=2",
         NOT_A_POD, (2, 2), 1, at("node2", 20001), "1", "task 2 of 4"),
    # one node, as under torchrun, and one line
    alone("several tasks a node, nobody says of how many nodes", CROWD,
          "it has 4 tasks on 2 nodes, so this is a job of one node; use --nnodes=2 for one job "
          "on all nodes, with one agent on each"),
    alone("a batch script", BATCH, "the batch script or salloc of Slurm job 3: nothing has been "
          "started on the other node, so this is a job of one node; use --srun"),
    alone("salloc", SALLOC, "of Slurm job 7: nothing has been started", TERMINAL),
    alone("an interactive step", INTERACTIVE, "an interactive step of Slurm job 7", TERMINAL),
    alone("srun --pty", PTY, "standard input is a terminal, so this is a job of one node; "
          "use --nnodes=2", TERMINAL),
    alone("srun --pty, input from a file", PTY, "srun --pty started it"),
    alone("a terminal", SRUN, "standard input is a terminal", TERMINAL),
    alone("an ssh loop of a batch script, which takes no variables along", {}, ""),
    alone("an ssh loop that takes Slurm's along", BATCH | {"SLURM_NODEID": "0"}, "nothing has"),
    alone("one node of a step, as under torchrun", SRUN | {"SLURM_STEP_NUM_NODES": "1",
          "SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_NODELIST": "node2", **GPUS}, ""),
    alone("what a rank starts", SRUN | {"TORCHELASTIC_RUN_ID": "outer", "RANK": "3"},
          "a rank of another job started this process, so this is a job of one node"),
    alone("one node is said", SRUN, "", flags="--nnodes=1"),
    alone("--standalone", SRUN, "", flags="--standalone"),
    alone("--standalone by PET_", SRUN | {"PET_STANDALONE": "1"}, ""),
    alone("heterogeneous jobs", SRUN | {"SLURM_HET_SIZE": "2"}, "heterogeneous"),
    alone("a list that cannot be read", SRUN | {"SLURM_STEP_NODELIST": "node[2-"},
          "SLURM_STEP_NODELIST cannot be read: the brackets"),
    alone("a list of other nodes", SRUN | {"SLURM_STEP_NODELIST": "node[2-9]"},
          "8 name(s) for 2 nodes"),
    alone("no list", {k: v for k, v in SRUN.items() if k != "SLURM_STEP_NODELIST"}, "not set"),
    alone("no node id", {k: v for k, v in SRUN.items() if k != "SLURM_NODEID"}, "not set"),
    alone("noise for a number of nodes", SRUN | {"SLURM_STEP_NUM_NODES": "two"},
          "in Slurm step 1.0: SLURM_STEP_NUM_NODES=two is not a number, so this is a job of one "
          "node; use --nnodes and --rdzv-endpoint for one job on several nodes"),
    alone("no number of nodes", {k: v for k, v in SRUN.items() if k != "SLURM_STEP_NUM_NODES"},
          "SLURM_STEP_NUM_NODES is not set, so this is a job of one node"),
    alone("noise for a number of nodes, in a batch script", BATCH |
          {"SLURM_JOB_NUM_NODES": "2(x2)", "SLURM_NNODES": ""},
          "SLURM_JOB_NUM_NODES=2(x2) is not a number, so this is a job of one node"),
    alone("noise for a node id", SRUN | {"SLURM_NODEID": "-1"}, "SLURM_NODEID=-1 is not a number"),
    Case("noise for a number of nodes, which somebody says", SRUN |
         {"SLURM_STEP_NUM_NODES": "9" * 200}, "--nnodes=2", NOT_A_POD, (2, 2), 0,
         Place("static", "127.0.0.1", 29500), "none", "9... is not a number, so it is "
         "ignored; give the rendezvous by --rdzv-endpoint"),
    # flags decide
    Case("more nodes are said than there are", SRUN, "--nnodes=3", NOT_A_POD, (3, 3), 0,
         Place("static", "127.0.0.1", 29500), "none", "there are 2 nodes and --nnodes=3 "
         "asks for more, so it is ignored; give the rendezvous by --rdzv-endpoint"),
    Case("fewer", SRUN, "--nnodes=2:2 --node-rank=0", NOT_A_POD, (2, 2), 0,
         Place("static", "127.0.0.1", 29500), "none", ""),
    Case("nodes are said in a batch script", BATCH, "--nnodes=2", NOT_A_POD, (2, 2), 0,
         Place("static", "127.0.0.1", 29500), "none",
         "--srun starts this command on all nodes"),
    Case("an endpoint", SRUN, "--nnodes=2:4 --rdzv-endpoint=h:7", NOT_A_POD, (2, 4), -1,
         at("h", 7), "none", ""),
    Case("an endpoint and c10d: the node's number is a wish", SRUN,
         "--nnodes=2 --rdzv-backend=c10d --rdzv-endpoint=h:7 --rdzv-id=1", NOT_A_POD, (2, 2), 1,
         at("h", 7), "1", ""),
    Case("... which several tasks a node do not have", CROWD,
         "--nnodes=4 --rdzv-backend=c10d --rdzv-endpoint=h:7", NOT_A_POD, (4, 4), -1, at("h", 7),
         "none", ""),
    Case("... nor one who says it", SRUN,
         "--nnodes=2 --rdzv-backend=c10d --rdzv-endpoint=h:7 --node-rank=0", NOT_A_POD, (2, 2), 0,
         at("h", 7), "none", ""),
    Case("a static job", SRUN, "--nnodes=2 --node-rank=1 --master-addr=h --master-port=7",
         NOT_A_POD, (2, 2), 1, Place("static", "h", 7), "none", ""),
    Case("c10d without an endpoint is this host's, as under torchrun", SRUN,
         "--nnodes=2 --rdzv-backend=c10d", NOT_A_POD, (2, 2), -1, at("localhost", 29400), "none",
         ""),
]  # fmt: skip

TR = port_of_name("tr")
KUBERNETES = [
    Case("LeaderWorkerSet", LWS, "", pod("train-1-3", "train.research"), (4, 4), 3,
         at("train-1.train.research", port_of_name("train-1.train.research")),
         "train-1.train.research", "a pod of the LeaderWorkerSet group of train-1"),
    Case("LeaderWorkerSet, its GPUs", LWS, "", pod("train-1-3", "train.research"), (4, 4), 3,
         at("train-1.train.research", port_of_name("train-1.train.research")),
         "train-1.train.research", "--nproc-per-node=8", nproc=8, gpus=8),
    alone("LeaderWorkerSet before 0.6", {k: v for k, v in LWS.items() if "INDEX" not in k},
          "this pod's index is unknown"),
    alone("LeaderWorkerSet, kubectl exec -it", LWS, "terminal", replace(WORKER, terminal=True)),
    alone("LeaderWorkerSet, noise for its size", LWS | {"LWS_GROUP_SIZE": "four"},
          "LWS_GROUP_SIZE=four is not a number, so this is a job of one node; use --nnodes=N"),
    alone("LeaderWorkerSet, no size", {k: v for k, v in LWS.items() if k != "LWS_GROUP_SIZE"},
          "LWS_GROUP_SIZE is not set, so this is a job of one node"),
    Case("LeaderWorkerSet, noise for its size, which somebody says", LWS |
         {"LWS_GROUP_SIZE": "four"}, "--nnodes=4", pod("train-1-3", "train.research"), (4, 4), 3,
         at("train-1.train.research", port_of_name("train-1.train.research")),
         "train-1.train.research", "a pod of the LeaderWorkerSet group of train-1"),
    alone("a group of one", LWS | {"LWS_GROUP_SIZE": "1", "LWS_WORKER_INDEX": "0"}, ""),
    Case("Volcano", VOLCANO, "", pod("job-worker-1", "job"), (3, 3), 1,
         at("job-worker-0.job", port_of_name("job-worker")), "job-worker", "of a Volcano job"),
    Case("Volcano's PyTorch plugin", VOLCANO_PYTORCH, "", pod("job-worker-1", "job"), (4, 4), 2,
         at("job-master-0.job", 23456), "job-master-0", "of a Volcano job"),
    alone("Volcano, two kinds of tasks",
          VOLCANO | {"VC_PS_HOSTS": "job-ps-0.job,job-ps-1.job", "VC_PS_NUM": "2"},
          "the job has 2 kinds of tasks, and their relation is unknown, so this is a job "
          "of one node"),
    alone("Volcano without svc", POD | {"VC_TASK_INDEX": "1"}, "the plugin svc is off"),
    alone("Indexed Job without a Service, nobody says how many", INDEXED, "has no subdomain",
          pod("tr-2")),
    Case("an Indexed Job whose name begins with its subdomain's", INDEXED, "--nnodes=3",
         pod("tr-a-2", "tr.ns"), (3, 3), 2, at("tr-a-0.tr.ns", port_of_name("tr-a")), "tr-a",
         "the Indexed Job tr-a"),
    Case("Indexed Job", INDEXED, "--nnodes=3", WORKER, (3, 3), 2,
         at("tr-0.tr.research.svc.cluster.local", TR), "tr", "pod 2 of the Indexed Job tr"),
    Case("Indexed Job, a range", INDEXED, "--nnodes=2:4", WORKER, (2, 4), 2,
         at("tr-0.tr.research.svc.cluster.local", TR), "tr", "Indexed Job"),
    Case("Indexed Job, an endpoint (what `render` says): its index is a wish", INDEXED,
         "--nnodes=2:4 --rdzv-backend=c10d --rdzv-endpoint=tr-0.tr:29400 --rdzv-id=x", WORKER,
         (2, 4), 2, at("tr-0.tr", 29400), "x", ""),
    alone("Indexed Job, nobody says how many", INDEXED, "pod 2 of the Indexed Job tr: their "
          "number is unknown, so this is a job of one node; use --nnodes=N", WORKER),
    Case("Indexed Job, fewer than there are: a spare", INDEXED, "--nnodes=2", WORKER, (2, 2), 2,
         at("tr-0.tr.research.svc.cluster.local", TR), "tr", "Indexed Job"),
    Case("Indexed Job without a Service", INDEXED, "--nnodes=3", pod("tr-2"), (3, 3), 0,
         Place("static", "127.0.0.1", 29500), "none", "the pod has no subdomain"),
    Case("Indexed Job in the host's network", INDEXED, "--nnodes=3", pod("worker-17", "example"),
         (3, 3), 0, Place("static", "127.0.0.1", 29500), "none", "is not the pod's"),
    Case("JobSet", INDEXED, "--nnodes=3", pod("set-train-0-2", "set.ns.svc.cluster.local"),
         (3, 3), 2, at("set-train-0-0.set.ns.svc.cluster.local", port_of_name("set-train")),
         "set-train", "pod 2 of the JobSet set-train"),
    Case("JobSet, its second job", INDEXED, "--nnodes=6", pod("set-train-1-2", "set.ns"),
         (6, 6), -1, at("set-train-0-0.set.ns", port_of_name("set-train")), "set-train", "JobSet"),
    Case("an Indexed Job whose name ends with a number", INDEXED, "--nnodes=3",
         pod("run-7-2", "run-7.ns"), (3, 3), 2, at("run-7-0.run-7.ns", port_of_name("run-7")),
         "run-7", "Indexed Job run-7"),
    Case("StatefulSet", POD, "--nnodes=3", WORKER, (3, 3), 2,
         at("tr-0.tr.research.svc.cluster.local", TR), "tr", "what looks like the StatefulSet tr"),
    alone("StatefulSet: a name proves little", POD, "", WORKER),
    alone("any other pod", POD, "", pod("web-6d4cf56db6-7xk2p")),
    alone("a host whose name ends with a number", {}, "", pod("gpu-7", "cluster.example")),
]  # fmt: skip

OPERATORS = [
    Case("PyTorchJob (Arena)", PYTORCH_JOB, "", pod("mnist-worker-1"), (3, 3), 2,
         at("mnist-master-0", 23456), "mnist-master-0", "of a PyTorchJob or the like, so"),
    Case("PyTorchJob, its master", PYTORCH_JOB | {"RANK": "0"}, "", pod("mnist-master-0"), (3, 3),
         0, at("mnist-master-0", 23456), "mnist-master-0", "PyTorchJob"),
    Case("PyTorchJob, a master that is told localhost",
         PYTORCH_JOB | {"RANK": "0", "MASTER_ADDR": "localhost"}, "", pod("mnist-master-0"),
         (3, 3), 0, at("mnist-master-0", 23456), "mnist-master-0", "PyTorchJob"),
    alone("PyTorchJob of one", PYTORCH_JOB | {"WORLD_SIZE": "1", "RANK": "0"}, ""),
    alone("PyTorchJob, kubectl exec -it", PYTORCH_JOB, "terminal",
          pod("mnist-worker-1", terminal=True)),
    alone("the same words outside Kubernetes", {k: v for k, v in PYTORCH_JOB.items()
          if not k.startswith("KUBERNETES")}, ""),
    alone("a rank in a pod", PYTORCH_JOB | {"TORCHELASTIC_RUN_ID": "x", "LOCAL_RANK": "1"},
          "a rank of another job", pod("mnist-worker-1")),
    Case("training-operator v1", TRAINER_1, "", pod("mnist-worker-1"), (3, 3), 2,
         Place("static", "mnist-master-0", 23456), "none", "", nproc=2),
    Case("training-operator v1, elastic", TRAINER_1_ELASTIC, "", pod("echo-worker-2"), (1, 3), -1,
         at("echo-worker-0", 29400), "echo", ""),
    Case("Kubeflow Trainer v2", TRAINER_2, "", pod("llm-node-0-3", "llm"), (4, 4), 3,
         Place("static", "llm-node-0-0.llm", 29500), "none", "", nproc=2),
    Case("DLRover", DLROVER, "", pod("gpt-edljob-worker-2"), (4, 4), 2,
         Place("external", "elasticjob-gpt-dlrover-master", 50001), "gpt",
         "a pod of a DLRover ElasticJob"),
    Case("DLRover, nodes are said", DLROVER, "--nnodes=2:8", pod("gpt-edljob-worker-2"), (2, 8), 2,
         Place("external", "elasticjob-gpt-dlrover-master", 50001), "gpt", ""),
    Case("DLRover, an endpoint", DLROVER, "--nnodes=2:4 --rdzv-backend=c10d --rdzv-endpoint=h:7",
         pod("gpt-edljob-worker-2"), (2, 4), -1, at("h", 7), "none", ""),
    Case("SkyPilot", SKYPILOT, "", NOT_A_POD, (2, 2), 1,
         at("10.0.0.4", port_of_name(SKYPILOT["SKYPILOT_TASK_ID"])), SKYPILOT["SKYPILOT_TASK_ID"],
         "node 1 of 2 of SkyPilot task", nproc=4),
    alone("SkyPilot, one node", SKYPILOT | {"SKYPILOT_NUM_NODES": "1", "SKYPILOT_NODE_RANK": "0",
          "SKYPILOT_NODE_IPS": "10.0.0.4"}, ""),
    alone("SkyPilot, a shell", SKYPILOT, "terminal", TERMINAL),
    alone("SkyPilot, addresses are missing", SKYPILOT | {"SKYPILOT_NODE_IPS": "10.0.0.4"},
          "1 address(es) for 2 nodes"),
]  # fmt: skip

ORDER = [
    Case("PET_ before Slurm", SRUN | TRAINER_1, "", NOT_A_POD, (3, 3), 2,
         Place("static", "mnist-master-0", 23456), "none", "", nproc=2),
    Case("DLRover before Slurm", SRUN | DLROVER, "", NOT_A_POD, (4, 4), 2,
         Place("external", "elasticjob-gpt-dlrover-master", 50001), "gpt", "DLRover"),
    Case("Slurm before Kubernetes", LWS | SRUN, "", pod("slurmd-1", "slurmd"), (2, 2), 1,
         at("node2", 20001), "1", "Slurm step 1.0"),
    Case("an index before an operator's words", INDEXED | PYTORCH_JOB, "--nnodes=3", WORKER,
         (3, 3), 2, at("tr-0.tr.research.svc.cluster.local", TR), "tr", "Indexed Job"),
    Case("an operator's words before a host name", PYTORCH_JOB, "", WORKER, (3, 3), 2,
         at("mnist-master-0", 23456), "mnist-master-0", "PyTorchJob"),
    Case("a node rank that is said alone stays alone", INDEXED, "--nnodes=2", pod("tr-2"), (2, 2),
         0, Place("static", "127.0.0.1", 29500), "none", "subdomain"),
    Case("PET_NNODES alone leaves the place to the scheduler", INDEXED | {"PET_NNODES": "3"}, "",
         WORKER, (3, 3), 2, at("tr-0.tr.research.svc.cluster.local", TR), "tr", "Indexed Job"),
    Case("ELASTICRUN_ before PET_", SRUN | {"ELASTICRUN_NNODES": "1:2", "PET_NNODES": "3"}, "",
         NOT_A_POD, (1, 2), 1, at("node2", 20001), "1", "Slurm"),
    Case("a flag before ELASTICRUN_", SRUN | {"ELASTICRUN_NNODES": "1:2"}, "--nnodes=2", NOT_A_POD,
         (2, 2), 1, at("node2", 20001), "1", "Slurm"),
    Case("ELASTICRUN_ before an operator's words", TRAINER_2 | {"ELASTICRUN_NPROC_PER_NODE": "4",
         "ELASTICRUN_NODE_RANK": "1", "ELASTICRUN_MASTER_PORT": "7"}, "",
         pod("llm-node-0-3", "llm"), (4, 4), 1, Place("static", "llm-node-0-0.llm", 7),
         "none", "", nproc=4),
    Case("ELASTICRUN_ says where nodes meet, and no scheduler", SRUN | {"ELASTICRUN_NNODES": "2:4",
         "ELASTICRUN_RDZV_ENDPOINT": "h:7"}, "", NOT_A_POD, (2, 4), -1, at("h", 7), "none", ""),
    Case("an empty ELASTICRUN_ says nothing", SRUN | {"ELASTICRUN_NNODES": "", "PET_NNODES": "1:2"},
         "", NOT_A_POD, (1, 2), 1, at("node2", 20001), "1", "Slurm"),
    Case("ELASTICRUN_ names that are no flags' say nothing", SRUN | {"ELASTICRUN_NODES": "7",
         "ELASTICRUN_PROGRESS": "2", "ELASTICRUN_RANK": "5"}, "", NOT_A_POD, (2, 2), 1,
         at("node2", 20001), "1", "Slurm"),
    alone("ELASTICRUN_STANDALONE before PET_", SRUN | {"ELASTICRUN_STANDALONE": "1",
          "PET_STANDALONE": "0"}, ""),
    alone("nothing at all", {}, ""),
]  # fmt: skip


@pytest.mark.parametrize("case", [*SLURM, *KUBERNETES, *OPERATORS, *ORDER], ids=lambda c: c.name)
def test_a_row_of_the_table(case: Case) -> None:
    made = resolved(case.flags, case.environ, case.facts, case.gpus)
    assert (made.launch.spec.min_nodes, made.launch.spec.max_nodes) == case.nodes
    assert made.place == case.place
    assert made.launch.node_rank == case.rank
    assert made.launch.nproc_per_node == case.nproc
    if case.job_id == "*":
        assert len(made.identity.job_id) == 36
    else:
        assert made.identity.job_id == case.job_id
    told = [note for note in made.notes if any(word in note for word in WORDS)]
    assert len(told) == bool(case.note)
    assert case.note in "".join(told)


WORDS = ("Slurm", "pod ", "SkyPilot")
"""By which a line about a scheduler is known."""


@pytest.mark.parametrize("case", [*SLURM, *KUBERNETES, *OPERATORS], ids=lambda c: c.name)
def test_who_calls_from_python_is_told_nothing_by_a_scheduler(case: Case) -> None:
    """accelerate and notebooks say themselves what they want: without facts nothing is found."""
    flags, environ = case.flags, case.environ
    told = resolved(flags, environ, None)
    if not case.note:
        return
    bare = not flags and not any(name.startswith(("PET_", "DLROVER_")) for name in environ)
    assert not bare or told.place == ALONE
    assert not any("Slurm" in note or "SkyPilot" in note for note in told.notes)


def test_an_operators_words_mean_nothing_outside_kubernetes() -> None:
    """There they are as likely those of a launcher that has started us as a rank."""
    words = {k: v for k, v in PYTORCH_JOB.items() if not k.startswith("KUBERNETES")}
    assert detect(words, pod("mnist-worker-1")) is None
    assert detect(PYTORCH_JOB, pod("mnist-worker-1")) is not None
    assert detect(PYTORCH_JOB | {"MASTER_ADDR": "a b; c"}, pod("mnist-worker-1")) is None


def test_other_tasks_of_a_node_have_nothing_to_do() -> None:
    with pytest.raises(NothingToDo, match=r"task 3 of 4 in Slurm step 1\.0: another task on"):
        resolved("--nnodes=2", CROWD)
    resolved("", CROWD)  # a bare command is a job of its own in each task, as under torchrun
    resolved("--nnodes=2 --rdzv-endpoint=h:7 --rdzv-backend=c10d", CROWD)  # the user's own way
