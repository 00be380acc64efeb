"""`elasticrun convert`: jobs as their operators' users write them, and what becomes of them."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest

from elasticrun.cli.settings import UsageError
from elasticrun.jobs.convert.command import convert
from elasticrun.jobs.convert.document import NotConvertible, documents
from elasticrun.jobs.convert.sources import scale_plan
from tests import needs

needs.packages("yaml")

DLROVER = """
apiVersion: elastic.iml.github.io/v1alpha1
kind: ElasticJob
metadata: {name: mnist, namespace: dlrover}
spec:
  distributionStrategy: AllreduceStrategy
  optimizeMode: single-job
  enableElasticScheduling: true
  envs: {NCCL_DEBUG: {value: INFO}, WHO: {valueFrom: {fieldRef: {fieldPath: spec.nodeName}}}}
  replicaSpecs:
    dlrover-master: {replicas: 1, template: {spec: {containers: [{name: m, image: master}]}}}
    worker:
      replicas: 4
      restartCount: 5
      restartPolicy: Always
      template:
        spec:
          restartPolicy: Always
          containers:
          - {name: sidecar, image: s}
          - name: main
            image: registry.example/train:1
            command: [/bin/bash, -c, "dlrover-run --nnodes=2:$NODE_NUM --nproc_per_node=8
              --network-check train.py --of $WORKER_NUM --lr 1e-3"]
"""

PYTORCH = """
apiVersion: kubeflow.org/v1
kind: PyTorchJob
metadata: {name: gpt}
spec:
  nprocPerNode: "4"
  elasticPolicy:
    {nProcPerNode: 8, rdzvBackend: c10d, minReplicas: 2, maxReplicas: 6, maxRestarts: 7}
  runPolicy:
    cleanPodPolicy: None
    ttlSecondsAfterFinished: 600
    backoffLimit: 3
    schedulingPolicy: {minAvailable: 2, queue: research, priorityClass: high}
  pytorchReplicaSpecs:
    Worker:
      replicas: 4
      restartPolicy: OnFailure
      template: &pod
        spec:
          containers:
          - name: pytorch
            image: registry.example/gpt:2
            command: [torchrun]
            args: ["--rdzv_id", "x", "train.py", "--nnodes", "9"]
            resources: {limits: {nvidia.com/gpu: 4, memory: 64Gi}}
    Master: &master {replicas: 1, template: *pod}
"""

TRAINJOB = """
apiVersion: trainer.kubeflow.org/v1alpha1
kind: TrainJob
metadata: {name: tune}
spec:
  runtimeRef: {name: torch-distributed}
  suspend: true
  activeDeadlineSeconds: 7200
  trainer:
    image: registry.example/tune:3
    numNodes: 2
    numProcPerNode: 8
    command: [python3, -u, tune.py]
    env: [{name: HF_HOME, value: /data}]
    resourcesPerNode: {requests: {cpu: 8, nvidia.com/gpu: 8}}
"""

MSJOB = """
apiVersion: mindspore.gitee.com/v1
kind: MSJob
metadata: {name: ms}
spec:
  runPolicy: {cleanPodPolicy: Running}
  msReplicaSpecs:
    Scheduler: {replicas: 1, template: {spec: {containers: [{name: mindspore, image: i}]}}}
    Worker:
      replicas: 4
      template:
        spec:
          containers:
          - {name: mindspore, image: i, command: [bash, -c, "python train.py --epochs 3"]}
"""


def converted(
    text: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *words: str
) -> tuple[str, list[str]]:
    """What is printed, and what is said."""
    from elasticrun.jobs.verbs import convert as verb

    said: list[str] = []
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(text.encode("latin-1"))))
    assert verb.main(["-", *words], said.append) == 0
    return capsys.readouterr().out, said


JOBS: dict[str, tuple[str, dict[str, Any], dict[str, Any], list[str]]] = {
    "dlrover": (
        DLROVER,
        {"nodes": 4, "minNodes": 2, "runPolicy": {"backoffLimit": 20}},
        {
            "command": ["/bin/bash", "-c"],
            "shell": "elasticrun --nproc_per_node=8 --network-check train.py --of $WORKER_NUM "
            "--lr 1e-3",
            "env": [
                {"name": "NCCL_DEBUG", "value": "INFO"},
                {"name": "WHO", "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}},
            ],
        },
        [
            "line 6: spec.distributionStrategy: left out",
            "line 7: spec.optimizeMode: left out",
            "line 8: spec.enableElasticScheduling: left out",
            "line 11: spec.replicaSpecs.dlrover-master",
            "line 14: spec.replicaSpecs.worker.restartCount: it counts per pod",
            "worker: its template's restartPolicy is left out",
            "worker: the command reads $WORKER_NUM, which is not set here",
            "line 15: spec.replicaSpecs.worker.restartPolicy: left out",
            "line 12: spec.replicaSpecs.worker: the command's --nnodes=2:$NODE_NUM is left out",
        ],
    ),
    "pytorch": (
        PYTORCH,
        {
            "nodes": 6,
            "minNodes": 2,
            "gang": {"scheduler": "volcano", "queue": "research"},
            "runPolicy": {
                "cleanPodPolicy": "None",
                "ttlSecondsAfterFinished": 600,
                "backoffLimit": 3,
            },
        },
        {
            "command": ["elasticrun", "--nproc-per-node=4", "--max-restarts=7", "train.py",
                        "--nnodes", "9"],
        },
        ["spec.elasticPolicy.rdzvBackend", "restartPolicy", "command's --rdzv_id x is left out"],
    ),
    "trainjob": (
        TRAINJOB,
        {"nodes": 2, "suspend": True, "runPolicy": {"activeDeadlineSeconds": 7200}},
        {
            "command": ["elasticrun", "--nproc-per-node=8", "tune.py"],
            "env": [{"name": "HF_HOME", "value": "/data"}],
        },
        ["line 6: spec.runtimeRef: left out"],
    ),
    "msjob": (
        MSJOB,
        {"nodes": 4, "successPolicy": "Rank0", "runPolicy": {"cleanPodPolicy": "Running"}},
        {"command": ["bash", "-c"], "shell": "elasticrun train.py --epochs 3"},
        ["spec.msReplicaSpecs.Scheduler: left out", "MS_* variables are not set"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", JOBS)
def test_a_job_of_another_operator(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its spec and its container are carried over, and everything else is named with its line."""
    text, spec, container, notes = JOBS[name]
    out, said = converted(text, monkeypatch, capsys, "-o", "json")
    job = json.loads(out)
    template = job["spec"].pop("template")
    assert (job["apiVersion"], job["kind"]) == ("elasticrun.dev/v1alpha1", "ElasticJob")
    assert job["spec"] == spec
    assert job["metadata"].get("namespace", "") == ("dlrover" if name == "dlrover" else "")
    main = template["spec"]["containers"][0]
    wanted = dict(container)
    if shell := wanted.pop("shell", ""):
        wanted["command"] = [*wanted["command"], shell]
    assert {key: main[key] for key in wanted} == wanted
    assert "args" not in main
    assert len(said) == len(set(said))
    for note in notes:
        assert any(note in line for line in said), (note, said)


def test_as_yaml_it_reads_back(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import yaml

    as_json, _ = converted(PYTORCH, monkeypatch, capsys, "-o", "json")
    as_yaml, _ = converted(PYTORCH, monkeypatch, capsys)
    assert yaml.safe_load(as_yaml) == json.loads(as_json)


def test_as_a_script_for_slurm(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script, said = converted(TRAINJOB, monkeypatch, capsys, "--to", "slurm")
    for line in ("#SBATCH --nodes=2", "#SBATCH --cpus-per-task=8", "#SBATCH --gpus-per-node=8"):
        assert line in script
    assert "#SBATCH --time=" in script
    assert "HF_HOME" in script
    assert "tune.py" in script
    assert any("image: left out" in line for line in said)
    simple = (
        DLROVER.replace("$NODE_NUM", "4")
        .replace("$WORKER_NUM", "4")
        .replace("--nproc_per_node=8", "--nproc_per_node 8")
    )
    script, said = converted(simple, monkeypatch, capsys, "--to", "slurm")
    assert "train.py --of 4 --lr 1e-3" in script
    assert "#SBATCH --nodes=2-4" in script
    named = "spec: left out: side containers, metadata.namespace, runPolicy.backoffLimit: "
    assert any(named in line for line in said)
    module = TRAINJOB.replace("[python3, -u, tune.py]", "[python3, -m, pkg.tune, --lr, x]")
    module = module.replace("image: registry.example/tune:3", "")  # its runtime's
    script, _ = converted(module, monkeypatch, capsys, "--to", "slurm")
    assert "\n    --module \\\n" in script
    assert "\n    pkg.tune --lr x\n" in script


def test_what_yaml_has_and_json_has_not(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Merged fields, and a date, which Kubernetes takes as text."""
    text = PYTORCH.replace("name: gpt", "name: gpt, annotations: {day: 2026-01-02}")
    text = text.replace("&master", "").replace("Master: ", "Master: {<<: *worker, replicas: 2}\n#")
    text = text.replace("    Worker:\n", "    Worker: &worker\n")
    out, _ = converted(text, monkeypatch, capsys, "-o", "json")
    assert json.loads(out)["metadata"]["annotations"] == {"day": "2026-01-02"}
    assert json.loads(out)["spec"]["nodes"] == 6


def test_a_scale_plan() -> None:
    """Of dlrover's, the part that says how many workers; other parts are refused."""
    plan = (
        "kind: ScalePlan\napiVersion: elastic.iml.github.io/v1alpha1\nmetadata: {name: p}\n"
        "spec: {ownerJob: gpt, manualScaling: true, replicaResourceSpecs: {worker: {replicas: 3}}}"
    )
    (document,) = documents(plan)
    assert scale_plan(document) == ("gpt", 3)
    for wrong, sentence in (
        (("replicas: 3", "replicas: -1"), "negative"),
        (("worker:", "ps:"), "only workers"),
        (("manualScaling: true", "createPods: [x]"), "unknown field"),
    ):
        (document,) = documents(plan.replace(*wrong))
        with pytest.raises(NotConvertible, match=sentence):
            scale_plan(document)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("kind: [", "not YAML"),
        ("a: 1\na: 2\n", "line 2: a occurs twice"),
        ("a: \xff", "cannot be read: it is not text"),
        ("a" * 1_100_000, "more than 1024 KiB"),
        ("kind: Deployment\napiVersion: apps/v1\n", "it contains no job"),
        ("kind: TFJob\napiVersion: kubeflow.org/v1\n", "is not one of ElasticJob"),
        (PYTORCH + "---" + MSJOB, "it contains 2 jobs"),
        (PYTORCH.replace("nprocPerNode", "nprocPerNod"), "line 6: spec.nprocPerNod: unknown field"),
        (PYTORCH.replace("replicas: 4", "replicas: four"), "'four' is not a whole number"),
        (PYTORCH.replace("Worker:", "Wroker:"), "the roles Master and Worker"),
        (TRAINJOB.replace("image", "imaeg"), "trainer.image: it has none"),
        (TRAINJOB.replace("name: tune", "labels: {}"), "a job has a name"),
        (MSJOB.replace("containers: [{", "container: [{").replace("containers", "container"),
         "its template has no container"),
        (MSJOB.replace("- {name: mindspore", "- 5\n          - {name: mindspore"),
         "is not a mapping"),
        (TRAINJOB.replace("env: [{name: HF_HOME, value: /data}]", "env: [x]\n    command: 5")
         .replace("    command: [python3, -u, tune.py]\n", ""), "trainer.command: 5 is not a list"),
        ("x: &a [1,1,1,1,1,1,1,1,1,1]\n" + "".join(
            f"{b}: &{b} [*{a},*{a},*{a},*{a},*{a},*{a},*{a},*{a},*{a},*{a}]\n"
            for a, b in zip("abcdef", "bcdefg", strict=True)), "more than 50000 values"),
    ],
)  # fmt: skip
def test_what_is_refused(
    text: str,
    sentence: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(UsageError, match=sentence.replace("*", ".")) as refused:
        converted(text, monkeypatch, capsys)
    assert refused.value.exit_code == 2
    assert capsys.readouterr().out == ""


COMMANDS = [
    # a command of words: what it becomes, and what is taken out
    (["torchrun", "--nnodes", "2", "--max_restarts=1", "train.py"],
     ["elasticrun", "--nproc-per-node=auto", "--max_restarts=1", "train.py"], ["--nnodes 2"]),
    (["python", "-m", "torch.distributed.run", "--standalone", "-m", "pkg.train", "--nnodes=3"],
     ["elasticrun", "--nproc-per-node=auto", "--max-restarts=3", "-m", "pkg.train", "--nnodes=3"],
     ["--standalone"]),
    (["/opt/bin/python3.11", "train.py", "-x"],
     ["elasticrun", "--max-restarts=3", "train.py", "-x"], []),
    (["python", "-m", "pkg.train"], ["elasticrun", "--max-restarts=3", "-m", "pkg.train"], []),
    # the texts of shells
    (["sh", "-c", "cd /code && torchrun --nproc_per_node 2 --master_addr=$MASTER_ADDR \\\n"
      "  --node_rank \"$RANK\" train.py --rdzv-id 3 && echo done"],
     ["sh", "-c", "cd /code && elasticrun --max-restarts=3 --nproc_per_node 2 \\\n"
      "  train.py --rdzv-id 3 && echo done"],
     ["--master_addr=$MASTER_ADDR", "--node_rank \"$RANK\""]),
    (["bash", "-lc", "export A=1; exec python -u /code/train.py"],
     ["bash", "-lc", "export A=1; exec elasticrun --max-restarts=3 /code/train.py"], []),
    # nothing that is known, or more than one
    (["./run.sh", "torchrun"], None, []),
    (["bash", "-c", "python a.py; python b.py"], None, []),
    ([], None, []),
    (["bash", "-c", "python -m pip install x; python -m a; python -m b"], None, []),
    # options of Python's own, and programs that are no Python
    (["python", "-c", "print(1)"],
     ["elasticrun", "--max-restarts=3", "--no-python", "python", "-c", "print(1)"], []),
    (["bash", "-c", "python -s /a.py --x='1'"],
     ["bash", "-c", "elasticrun --max-restarts=3 --no-python python -s /a.py --x='1'"], []),
    (["bash", "-c", "python -m pip install x; python3 -u -m pkg --y"],
     ["bash", "-c", "python -m pip install x; elasticrun --max-restarts=3 -m pkg --y"], []),
    (["torchrun", "--use_env", "--no-python", "python3", "-c", "x", "--nnodes", "2"],
     ["elasticrun", "--nproc-per-node=auto", "--max-restarts=3", "--no-python", "python3", "-c",
      "x", "--nnodes", "2"], ["--use_env"]),
]  # fmt: skip


@pytest.mark.parametrize(("words", "becomes", "dropped"), COMMANDS)
def test_a_command(words: list[str], becomes: list[str] | None, dropped: list[str]) -> None:
    made = convert(words, [], default="auto", restarts=3)
    assert made.known is (becomes is not None)
    assert [*made.command, *made.args] == (words if becomes is None else becomes)
    assert list(made.dropped) == dropped
