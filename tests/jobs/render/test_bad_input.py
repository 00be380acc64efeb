"""What cannot be is refused in one sentence that says what to do, with exit code 2."""

from __future__ import annotations

import pytest

from elasticrun.cli.settings import UsageError
from tests.jobs.render.rendered import render

RUN = ("--", "train.py")
BAD_PODS = [
    (("--name", "Tr"), "lower case"),
    (("--name", "1tr"), "begins with a letter"),
    (("--name", "tr-"), "lower case"),
    (("--name", "a" * 62), "may have 61"),
    (("--name", "a" * 61, "--nnodes", "2:11"), "may have 60"),
    (("--image", "Repo/Train"), "is not an image"),
    (("--image", "repo/train@sha256:12"), "is not an image"),
    (("--image", "a b"), "is not an image"),
    (("--namespace", "a.b"), "--namespace"),
    (("--nnodes", "4:2"), "not above the largest"),
    (("--nnodes", "x"), "neither a number of nodes nor MIN:MAX"),
    (("--nnodes", "2:4", "--pods", "1"), "2 nodes are the fewest"),
    (("--cpu", "eight"), "not a Kubernetes quantity"),
    (("--memory", "64gb"), "not a Kubernetes quantity"),
    (("--memory", "64"), "less than one MiB"),
    (("--shm", "0Gi"), "must not be 0"),
    (("--shm", "8Gi", "--memory", "8Gi"), "does not fit"),
    (("--gpus", "-1"), "a number from 0"),
    (("--gpu-resource", "gpu"), "DOMAIN/NAME"),
    (("--gpu-resource", "nvidia.com/gpu", "--nproc-per-node", "auto"), "give --gpus N"),
    (("--nproc-per-node", "gpu"), "no GPU unless --gpus"),
    (("--rdma", "hca"), "DOMAIN/NAME"),
    (("--port", "0"), "--port 0"),
    (("--gang", "kueue"), "--queue NAME"),
    (("--gang", "koordinator", "--queue", "q"), "has no queues"),
    (("--queue", "q"), "has no queues"),
    (("--gang", "native", "--k8s-version", "1.35"), "1.36"),
    (("--k8s-version", "1.20"), "too old"),
    (("--k8s-version", "new"), "not a version"),
    (("--volume", "data"), "NAME=KIND:SOURCE:/MOUNT"),
    (("--volume", "data=nfs:x:/data"), "NAME=KIND:SOURCE:/MOUNT"),
    (("--volume", "data=pvc:x"), "NAME=KIND:SOURCE:/MOUNT"),
    (("--volume", "Data=pvc:x:/data"), "--volume"),
    (("--volume", "d=host:data:/data"), "not an absolute path"),
    (("--volume", "d=csi:driver,attr:/data"), "is not KEY=VALUE"),
    (("--volume", "d=pvc:x:/a", "--volume", "d=pvc:y:/b"), "given twice"),
    (("--volume", "d=pvc:x:/a", "--volume", "e=pvc:y:/a"), "/a is already mounted"),
    (("--volume", "d=pvc:x:/dev/shm"), "/dev/shm is already mounted"),
    (("--volume", "shm=pvc:x:/s"), "--shm"),
    (("--env", "A"), "is not KEY=VALUE"),
    (("--env", "A=1", "--env", "A=2"), "given twice"),
    (("--env", "A-B=1"), "environment variable"),
    (("--env", "A=\udcff"), "not UTF-8"),
    (("--label", "a=b c"), "not a valid label value"),
    (("--label", "/a=b"), "--label"),
    (("--label", "job-name=x"), "the controller sets it"),
    (("--label", "batch.kubernetes.io/controller-uid=x"), "the controller sets it"),
    (("--label", "jobset.sigs.k8s.io/job-index=1"), "the controller sets it"),
    (("--env", "JOB_COMPLETION_INDEX=1"), "choose another name"),
    (("--env", "ELASTICRUN_JOB_UID=1"), "choose another name"),
    (("--token-secret", "s", "--token-file", "/t"), "give one of them"),
    (("--signals-to-handle", "SIGINT"), "add SIGTERM"),
    (("--backoff-limit", "-1"), "a number from 0"),
    (("--annotation", "a b=c"), "not a valid key"),
    (("--selector", "a=" + "b" * 64), "not a valid label value"),
    (("--toleration", "=x"), "KEY[=VALUE][:EFFECT]"),
    (("--toleration", "a:Never"), "not one of NoSchedule"),
    (("--service-account", "A"), "name of an object"),
    (("--token-secret", "A"), "name of an object"),
    (("--rdzv-id", "a\nb"), "cannot be printed"),
    (("--max-restarts", "-1"), "must not be negative"),
    (("--node-unit", "3", "--nnodes", "2"), "--node-unit=3"),
    (("--redirects", "9"), "--redirects=9"),
    (("--master-store", "http://x"), "--master-store"),
    (("--tls-cert", "/c"), "--tls-cert and --tls-key belong together"),
    (("--tls-key", "/k", "--tls-ca", "/a"), "--tls-cert and --tls-key belong together"),
    (("--env", "PET_STANDALONE=1"), "already sets --standalone"),
    (("--env", "PET_MAX_RESTARTS=1"), "use --max-restarts"),
    (("--env", "ELASTICRUN_NNODES=1"), "use --nnodes"),
    (("--rdzv-endpoint=a:1",), "--rdzv-endpoint: the output already sets this"),
    (("--standalone",), "--standalone: the output already sets this"),
    (("--node_rank=1",), "--node_rank: the output already sets this"),
    (("--dry-run",), "--dry-run: the output already sets this"),
    (("--learning-rate=1",), "--learning-rate is no flag of this verb"),
    (("other.py", "--lr", "3"), "other.py: put the script and its arguments after --"),
]
BAD_BATCH = [
    (("--name", "a b"), "--name"),
    (("--time", "soon"), "not a Slurm time"),
    (("--time", "0"), "above 0"),
    (("--time", "3"), "nothing is left"),
    (("--time", "1:99:99"), "an hour has 60 minutes"),
    (("--time", "1-24"), "a day 24 hours"),
    (("--signal", "TERM"), "NAME@SECONDS"),
    (("--signal", "KILL@9"), "not one of TERM"),
    (("--signal", "INT@9"), "which ranks defer"),
    (("--signal", "TERM@0"), "1 to 65535"),
    (("--signal", "USR1@60", "--signals-to-handle=SIGTERM,SIGINT"), "add SIGUSR1"),
    (("--requeue", "-1"), "must not be negative"),
    (("--array", "x"), "--array"),
    (("--array", "5-2"), "--array"),
    (("--array", "0-7:0"), "--array"),
    (("--sbatch", "constraint=a b"), "NAME=VALUE"),
    (("--sbatch", "C h100"), "NAME=VALUE"),
    (("--sbatch", "time=30"), "use --time"),
    (("--sbatch", "nodes=3"), "use --nnodes and --spares"),
    (("--sbatch=--no-kill",), "already sets --no-kill"),
    (("--gpus-per-node", "a:b:8"), "--gpus-per-node"),
    (("--gpus-per-node", "many"), "--gpus-per-node"),
    (("--mem", "much"), "--mem"),
    (("--output", "a b"), "--output"),
    (("--partition", "a;b"), "--partition"),
    (("--spares", "-1"), "--spares"),
    (("--env", "ELASTICRUN_TOKEN=x"), "--token-file"),
]


@pytest.mark.parametrize("target", ["k8s", "jobset"])
@pytest.mark.parametrize(("words", "why"), BAD_PODS, ids=lambda one: " ".join(one)[:40])
def test_pods(target: str, words: tuple[str, ...], why: str) -> None:
    defaults = ("--name", "tr") if "--name" not in words else ()
    defaults += ("--image", "a:1") if "--image" not in words else ()
    if target == "jobset" and "may have" in why:
        why = "may have 4"  # NAME-node-0-INDEX-abcde leaves less room
    _refused((target, *defaults, *words, *RUN), why)


@pytest.mark.parametrize(("words", "why"), BAD_BATCH, ids=lambda one: " ".join(one)[:40])
def test_batch(words: tuple[str, ...], why: str) -> None:
    defaults = ("--name", "tr") if "--name" not in words else ()
    _refused(("slurm", *defaults, *words, *RUN), why)


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ((), "one of k8s, jobset, trainer-runtime, slurm"),
        (("swarm",), "one of k8s, jobset, trainer-runtime, slurm"),
        (("slurm", "--name", "a"), "put the script after --"),
        (("slurm", "--name", "a", "train.py", "--lr", "3"), "train.py: put the script and its"),
        (("slurm", "--name", "a", "--"), "put the script after --"),
        (("slurm", "--name", "a", "--", "--lr"), "put the script after --"),
    ],
)
def test_the_verb_itself(words: tuple[str, ...], why: str) -> None:
    _refused(words, why)


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (("--spares", "x"), "--spares: 'x' is not a whole number"),
        (
            ("--max-restarts", "x"),
            "--max-restarts: 'x' is not a whole number",
        ),
        (("--qos",), "--qos needs a value, as in --qos="),
    ],
)
def test_what_is_no_value(
    words: tuple[str, ...], why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        render("slurm", "--name", "a", *words, *RUN)
    assert end.value.code == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert why in said


def _refused(words: tuple[str, ...], why: str) -> None:
    with pytest.raises(UsageError) as end:
        render(*words)
    sentence = str(end.value)
    assert end.value.exit_code == 2
    assert why in sentence
    assert "\n" not in sentence
    assert len(sentence) < 400
