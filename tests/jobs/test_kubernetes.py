"""Jobs of a cluster, by the words that people type: against the stand-in for an API server, with
pods without processes, and once with real ones."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from elasticrun.host.runs.index import make_run
from elasticrun.host.runs.layout import JobRecord, RunFolder
from elasticrun.jobs.backend import RequestFailed
from elasticrun.jobs.backends import is_in_cluster
from elasticrun.jobs.connection import user_at_host
from elasticrun.jobs.kube.api import KubeApi
from elasticrun.jobs.kube.capacity import quantity
from elasticrun.jobs.kube.kubeconfig import settings
from elasticrun.jobs.kube.observed import STOPPED, ClusterJob, ObservedPod
from elasticrun.jobs.kube.pod_logs import PodLogQuery, selected_pods
from elasticrun.testing.hosts import Lab
from tests.further import further
from tests.harness import await_true, ran, ran_here
from tests.jobs.operator.test_operator import Operator, install
from tests.kubernetes.cluster import StandIn
from tests.snapshots.conftest import ENDLESS, TRAIN, starts, until_printed

IMAGE = ("--image", "r/train:1")


class KubeUser:
    """Who types the verbs, as a user of a cluster; `admin` may do all. `apart`: verbs run in
    processes of their own, because a pod's output goes to the descriptor, past `sys.stdout`."""

    def __init__(
        self, cluster: StandIn, scratch: Path, name: str = "admin", *, apart: bool = False
    ) -> None:
        self._run = ran if apart else ran_here
        self.kubectl = cluster.client(name)
        folders = {"ELASTICRUN_RUNS": scratch / f"runs-{name}", "XDG_RUNTIME_DIR": scratch}
        self.environ = {**self.kubectl.environment, **{key: str(at) for key, at in folders.items()}}

    def types(self, *words: str) -> str:
        """What a verb prints that ends well."""
        done = self._run(*words, env=self.environ)
        assert done.returncode == 0, (words, done.stdout, done.stderr)
        self.notes = done.stderr
        return done.stdout

    def hears(self, *words: str) -> str:
        """The sentence of a verb that ends with 1."""
        done = self._run(*words, env=self.environ)
        assert done.returncode == 1, (words, done.stdout, done.stderr)
        assert done.stderr.count("\n") == 1, done.stderr
        return done.stderr

    def submits(self, name: str, *flags: str, script: str = "train.py") -> str:
        words = ("submit", "--on", "k8s", "--name", name, *IMAGE, *flags, "--", script, "--lr", "1")
        return self.types(*words)

    def row(self, *words: str) -> dict[str, Any]:
        """The first line of `list`."""
        found: list[dict[str, Any]] = json.loads(self.types("list", "-o", "json", *words))
        return next(row for row in found if row["where"] == "k8s")

    def until(self, state: str) -> None:
        await_true(lambda: self.row()["state"] == state, f"a job that is {state}")


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[StandIn]:
    """Two nodes with eight GPUs each, whose pods have no processes."""
    made = StandIn(tmp_path, hollow=True)
    made.node("n0", gpus=8)
    made.node("n1", gpus=8)
    yield made
    made.close()


@pytest.fixture
def operator(cluster: StandIn) -> Iterator[Operator]:
    install(cluster)
    made = Operator(cluster)
    yield made
    made.stop()


def until_running(cluster: StandIn, *names: str) -> None:
    def holds(pods: list[dict[str, Any]]) -> bool:
        run = {pod["metadata"]["name"] for pod in pods if pod["status"].get("phase") == "Running"}
        return set(names) <= run

    cluster.until("pods", holds)


@pytest.mark.slow
@pytest.mark.usefixtures("operator")
def test_an_elastic_job_from_submit_to_delete(cluster: StandIn, tmp_path: Path) -> None:
    user = KubeUser(cluster, tmp_path)
    board = ("--tensorboard", "--logdir=/logs")
    pods = ("--nodes", "1:2", "--gpus", "4", "--node-unit", "1", "--ttl", "60")
    said = user.submits("tr", *pods, *board)
    assert "--tensorboard: the master of an ElasticJob runs in a separate pod" in user.notes
    assert "created in namespace default: ElasticJob tr" in said
    assert "elasticrun logs tr -f" in said
    until_running(cluster, "tr-0-0", "tr-1-0", "tr-master-0")
    (job,) = cluster.objects("elasticjobs", "elasticrun.dev")
    assert (job["spec"]["nodes"], job["spec"]["minNodes"]) == (2, 1)
    assert job["spec"]["runPolicy"]["ttlSecondsAfterFinished"] == 60
    (container,) = job["spec"]["template"]["spec"]["containers"]
    assert container["args"][0] == "--nproc-per-node=4"
    assert {"--save-at-breakpoint", "--exit-codes=scheduler"} <= set(container["args"])
    assert container["args"][-3:] == ["train.py", "--lr", "1"]
    words = " ".join(container["args"])
    assert not any(flag in words for flag in ("--nnodes", "--rdzv", "--node-rank", "--node-unit"))

    row = user.row()
    assert (row["name"], row["where"], row["id"], row["max_nodes"]) == (
        "tr",
        "k8s",
        "default/tr",
        2,
    )
    assert user.row("--on", "k8s", "-A")["id"] == "default/tr"
    page = user.types("status", "t")
    for part in (
        "ElasticJob in namespace default",
        "Admitted: yes",
        "tr-1-0       1",
        "created pod",
    ):
        assert part in page
    assert all(len(line) <= 80 for line in page.splitlines() if "  " in line), page
    assert json.loads(user.types("status", "tr", "-o", "json"))["pods"][-1]["node"] == "master"

    assert "is set to 3 nodes (before: 2)" in user.types("scale", "3", "tr")
    until_running(cluster, "tr-2-0")
    (tmp_path / "plan.yaml").write_text(
        "kind: ScalePlan\napiVersion: elastic.iml.github.io/v1alpha1\nmetadata: {name: p}\n"
        "spec: {ownerJob: tr, replicaResourceSpecs: {worker: {replicas: 2}}}"
    )
    assert "2 nodes (before: 3)" in user.types("scale", "-f", str(tmp_path / "plan.yaml"))
    top = user.types("top", "nodes", "--on", "k8s")
    assert "GPUs taken" in top
    node = json.loads(user.types("top", "nodes", "--on", "kubernetes", "-o", "json"))[0]
    assert (node["node"], node["gpus"], node["memory"] < 2**30) == ("n0", 8, True), node
    assert "already exists: choose another --name" in user.hears(
        "submit", "--on", "k8s", "--name", "tr", *IMAGE, "--", "train.py"
    )

    assert "job tr is suspended" in user.types("suspend", "tr")
    assert (user.row()["state"], user.row()["nodes"]) == ("suspended", 0)
    assert "resumes" in user.types("resume", "tr")
    assert "nothing to resume" in user.hears("resume", "tr")
    until_running(cluster, "tr-0-0")
    assert "job tr is stopped" in user.types("stop", "tr")
    assert user.row()["state"] == "stopped"
    assert "the pods of job tr no longer exist, and their output is gone" in user.hears(
        "logs", "tr"
    )
    user.types("delete", "tr")
    assert cluster.objects("elasticjobs", "elasticrun.dev") == []
    assert "k8s" not in user.types("list")
    assert "no job tr is in namespace default" in user.hears("status", "tr", "--on", "k8s")

    user.submits("gone")
    user.submits("gone-too")
    user.types("suspend", "gone")
    assert "several jobs are in namespace default" in user.hears("status", "--on", "k8s")
    user.kubectl("delete", "ej", "gone")
    assert user.row()["name"] == "gone-too"
    assert "lost" in user.types("list")
    assert "remove it from the list with `elasticrun delete gone`" in user.hears("suspend", "gone")
    user.submits("gone")
    assert "Suspended" not in user.types("status", "gone"), "which befell the one before"
    rows = json.loads(user.types("list", "-o", "json"))
    assert [row["state"] == "lost" for row in rows if row["name"] == "gone"] == [False, True]
    user.kubectl("delete", "ej", "gone")
    assert "2 jobs are called gone" in user.hears("delete", "gone")
    (newest,) = [row for row in rows if row["name"] == "gone" and row["state"] != "lost"]
    own = RunFolder(Path(newest["run"])).id
    assert "the cluster no longer has job gone" in user.types("delete", own)
    said = user.types("prune", "--since", "0s")
    assert said.startswith("removed gone-"), said
    assert "1 run folder removed" in said
    assert "lost" not in user.types("list")
    assert "gone-too" in user.types("status", "--on", "k8s")
    done = ran("list", env={**user.environ, "KUBECONFIG": "/none"})
    assert "gone-too: no cluster is configured here" in done.stdout


@pytest.mark.slow
def test_an_indexed_job_where_there_is_no_operator(cluster: StandIn, tmp_path: Path) -> None:
    """All of it goes with the Job, which has a token of its own."""
    user = KubeUser(cluster, tmp_path)
    said = user.submits("tr", "--nodes", "2", "--rbac", "--namespace", "default")
    for kind in ("ServiceAccount", "Role", "RoleBinding", "Service", "Secret", "Job"):
        assert f"{kind} tr" in said
    (job,) = cluster.objects("jobs", "batch")
    token = {one["name"]: one for one in job["spec"]["template"]["spec"]["containers"][0]["env"]}
    assert token["ELASTICRUN_TOKEN"]["valueFrom"]["secretKeyRef"]["name"] == "tr-token"
    (run,) = (tmp_path / "runs-admin").iterdir()
    assert '"token":' not in (run / "submitted.json").read_text()
    user.until("running")
    assert (user.row()["nodes"], user.row()["max_nodes"]) == (2, 2)
    assert "its ranks use at most 2" in user.types("scale", "tr", "3")
    (job,) = cluster.objects("jobs", "batch")
    assert (job["spec"]["completions"], job["spec"]["parallelism"]) == (3, 3)
    assert "is suspended" in user.types("suspend", "tr")
    assert "resumes" in user.types("resume", "tr")
    user.types("delete", "tr")
    for kind, group in (
        ("jobs", "batch"),
        ("services", ""),
        ("roles", "rbac.authorization.k8s.io"),
    ):
        cluster.until(kind, lambda found: not found, group=group)
    cluster.until("secrets", lambda found: not found)


ROLE = """\
apiVersion: rbac.authorization.k8s.io/v1
kind: Role
metadata: {name: jobs}
rules:
- {apiGroups: [elasticrun.dev], resources: [elasticjobs], verbs: [get, list, create]}
- {apiGroups: [""], resources: [pods], verbs: [list]}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: RoleBinding
metadata: {name: jobs}
roleRef: {apiGroup: rbac.authorization.k8s.io, kind: Role, name: jobs}
subjects: [{apiGroup: rbac.authorization.k8s.io, kind: User, name: ada}]
"""


@pytest.mark.slow
def test_rights_that_are_missing_are_one_sentence(cluster: StandIn, tmp_path: Path) -> None:
    admin, user = KubeUser(cluster, tmp_path), KubeUser(cluster, tmp_path, "ada")
    install(cluster)
    admin.submits("tr")
    assert "you may not list" in user.hears("list", "--on", "k8s")
    assert "you may not make ElasticJob mine" in user.hears(
        "submit", "--on", "k8s", "--name", "mine", *IMAGE, "--", "train.py"
    )
    assert not (tmp_path / "runs-ada").exists(), "nothing is left of what was refused"
    admin.kubectl("apply", "-f", "-", given=ROLE)
    done = ran_here("list", "--on", "k8s", env=user.environ)
    assert (done.returncode, done.stderr.count("\n")) == (0, 1)
    assert "tr" in done.stdout
    assert "you may not list Jobs" in done.stderr
    assert "created in namespace" in user.submits("mine")
    for words, what in (
        (("logs", "mine", "-f"), "watch "),
        (("suspend", "mine"), "change ElasticJob mine"),
        (("delete", "mine"), "delete ElasticJob mine"),
        (("top", "nodes", "--on", "k8s"), "list Nodes"),
    ):
        sentence = user.hears(*words)
        assert f"you may not {what}" in sentence
        assert "ask the cluster's administrator for a Role" in sentence


@pytest.mark.slow
def test_what_cannot_be_is_one_sentence(cluster: StandIn, tmp_path: Path) -> None:
    user = KubeUser(cluster, tmp_path)
    install(cluster)

    def says(*flags: str) -> str:
        done = ran_here(
            "submit", "--on", "k8s", "--name", "tr", *IMAGE, *flags, "--", "t.py", env=user.environ
        )
        assert done.returncode in (1, 2)
        assert done.stdout == ""
        return done.stderr.splitlines()[-1]

    assert "nodes is not a multiple of nodeUnit" in says("--nodes", "3", "--node-unit", "2")
    assert "--plain makes an Indexed Job" in says("--rbac")
    assert "--plain makes an Indexed Job" in says("--tls-cert=/c", "--tls-key=/k")
    assert "has no context none; it has it" in says("--context", "none")
    assert "could not find the requested resource" in says("--plain", "--gang", "volcano")
    user.environ["KUBECONFIG"] = str(tmp_path / "none")
    assert "no cluster is configured here" in says()
    assert not (tmp_path / "runs-admin").exists()
    assert cluster.objects("jobs", "batch") == []


def test_without_the_extra_there_is_one_sentence() -> None:
    code = (
        "import sys; sys.modules['lightkube'] = None\n"
        "from elasticrun.cli.main import main; sys.exit(main(['list', '--on', 'k8s']))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == (
        "elasticrun list: jobs in Kubernetes need the extra k8s: pip install 'elasticrun[k8s]'\n"
    )


LOOPS = """
import os, pathlib, sys, time
rank, size = os.environ["RANK"], os.environ["WORLD_SIZE"]
print(f"rank {rank} of {size} begins", flush=True)
at = pathlib.Path(sys.argv[1])
while not (at / "end").exists():
    if (at / "fail").exists() and rank == (at / "fail").read_text():
        sys.exit(f"rank {rank} is unlucky")
    time.sleep(0.05)
print(f"rank {rank} is done", flush=True)
"""


@pytest.fixture
def in_pods(lab: Lab, tmp_path: Path) -> Iterator[StandIn]:
    """A node with real pods, and an operator in one."""
    made = StandIn(tmp_path, lab=lab, env={"ELASTICRUN_PRELOAD": "off", "OMP_NUM_THREADS": "1"})
    made.node("n0", gpus=8)
    install(made, deploy=True)
    yield made
    made.close()


@further("test_an_elastic_job_from_submit_to_delete", why="real pods, under an operator in a pod")
def test_logs_and_commands_of_pods_that_run(in_pods: StandIn, tmp_path: Path) -> None:
    user = KubeUser(in_pods, tmp_path, apart=True)
    (tmp_path / "train.py").write_text(LOOPS)
    script = str(tmp_path / "train.py")
    words = ("submit", "--on", "k8s", "--name", "tr", *IMAGE, "--nodes", "2", "--cpu", "1")
    user.types(*words, "--memory", "9Gi", "--", script, str(tmp_path))
    user.until("running")
    await_true(lambda: "rank 0 of 2" in user.types("logs", "tr"), "what rank 0 prints")
    assert "rank 1" not in user.types("logs", "tr")
    assert "rank 1 of 2 begins" in user.types("logs", "tr", "--node", "1", "--tail", "1")
    assert user.types("logs", "tr", "--rank", "1", "-t", "1") == "rank 1 of 2 begins\n"
    whole = user.types("logs", "tr", "--all", "--grep", "rank . of 2")
    assert whole.splitlines()[::2] == ["== tr-0-0 ==", "== tr-1-0 =="]
    command = ("exec", "tr", "--node", "tr-1", "--", "sh", "-c", "hostname; exit 7")
    done = ran(*command, env=user.environ)
    assert (done.returncode, done.stdout) == (7, "tr-1\n"), done.stderr
    assert "has no pod 5" in user.hears("exec", "tr", "--node", "5", "--", "true")
    with subprocess.Popen(
        [sys.executable, "-m", "elasticrun", "logs", "tr", "-f", "--tail", "0"],
        env=user.environ, stdout=subprocess.PIPE, text=True,
    ) as following:  # fmt: skip
        assert following.stdout is not None

        def begins() -> str:
            return next(line for line in following.stdout or () if "begins" in line)

        assert "rank 0 of 2 begins" in begins()
        user.kubectl("delete", "pod", "tr-0-0")  # whose successor has its name
        assert "rank 0 of 2 begins" in begins()
        user.types("suspend", "tr")
        user.types("resume", "tr")
        assert "rank 0 of 2 begins" in begins()
        assert in_pods.cut_logs() == 1
        (tmp_path / "end").touch()
        rest = following.communicate()[0]
        assert ("rank 0 is done" in rest, "begins" in rest) == (True, False), rest
    user.until("succeeded")
    name, _, *state = user.types("list").splitlines()[1].split()[:4]
    assert (name, state) == ("tr", ["succeeded", "2/2"])
    deletes = re.search(r"stay until `elasticrun (delete .*)`", user.types("prune", "tr"))
    assert deletes
    assert "job tr is deleted" in user.types(*deletes[1].split())

    (tmp_path / "end").unlink()
    words = ("submit", "--on", "k8s", "--name", "bad", *IMAGE, "--nodes", "2")
    words += ("--nproc-per-node", "2", "--tee", "3", "--max-restarts", "0")
    user.types(*words, "--", script, str(tmp_path))
    user.until("running")
    for rank, begins in (("1", "[default1]:rank 1 of"), ("2", "[default0]:rank 2 of 4")):
        look = ("logs", "bad", "--rank", rank, "--tail", "1")
        await_true(
            lambda look=look, begins=begins: begins in ran(*look, env=user.environ).stdout,
            begins,
        )
    assert "rank 1 runs on node 0" in user.hears("logs", "bad", "--rank=1", "-i", "1")
    assert "the job has 4 ranks: 2 on each of 2" in user.hears("logs", "bad", "--rank", "4")
    (tmp_path / "fail").write_text("3")
    await_true(lambda: "failed" in user.types("list"), "a job that has failed")
    first, *_ = user.types("logs", "bad").splitlines()
    assert first == "== bad-1-0, ended with 93 =="
    assert "rank 3 is unlucky" in user.types("logs", "bad")
    page = user.types("status", "bad")
    assert "ended with 93: another pod would fail" in page


CLAIM = """\
apiVersion: v1
kind: PersistentVolumeClaim
metadata: {name: shared}
spec: {accessModes: [ReadWriteMany], resources: {requests: {storage: 1Gi}}}
"""


@further("test_an_elastic_job_from_submit_to_delete", why="real pods, under an operator in a pod")
def test_a_suspended_job_has_saved_and_its_master_answers(in_pods: StandIn, tmp_path: Path) -> None:
    """What only a master knows is asked in its pod; a suspend right after a scale saves as well,
    and the ranks go on from there."""
    out, repository = tmp_path / "out", str(TRAIN.parents[2])
    out.mkdir()
    program = [str(TRAIN), *ENDLESS, "--every", "5", "--print-at", "5"]
    program += ["--out", str(out), "--ckpt", str(tmp_path / "ckpt")]
    user = KubeUser(in_pods, tmp_path, apart=True)
    words = ("submit", "--on", "k8s", "--name", "tr", *IMAGE, "--nodes", "1:2", "--cpu", "1")
    user.kubectl("apply", "-f", "-", given=CLAIM)
    data = ("--data", f"shared:{tmp_path / 'mnt'}")
    words = (*words, *data, "--run-dir", str(tmp_path / "mnt" / "run"))
    user.types(*words, "--env", f"PYTHONPATH={repository}", "--", *program)
    user.until("running")
    until_printed(out, 0)
    assert "the job has 2 ranks" in user.hears("stacks", "tr", "--rank", "7")
    assert "train.py" in user.types("stacks", "--rank", "1", "--on", "k8s")
    assert user.types("incidents", "tr").startswith("no incident")
    assert "stepping" in user.types("top", "tr")
    assert "it has tr-0-" in user.hears("exclude", "tr-5", "tr")
    assert "node tr-1 is not excluded" in user.hears("include", "1", "tr")
    assert f": for {user_at_host()}: a look" in user.types("restart", "tr", "--reason", "a look")
    told = json.loads(user.types("events", "tr", "-o", "json"))
    assert any("a look" in event["text"] for event in told), told
    await_true(lambda: len(starts(out, 0)) == 2, "another life")

    user.types("scale", "tr", "3")
    assert "job tr is suspended at step" in user.types("suspend", "tr")
    assert "tr is suspended, and its master" in user.hears("events", "tr")
    assert "what its ranks wrote is on its volume" in user.hears("logs", "tr")
    run = RunFolder(tmp_path / "claims/default/shared/run")
    result = run.result()
    assert result is not None
    assert result.state == "saved", result
    assert (run.path / "events.jsonl").stat().st_size > 0
    words = ("submit", "--on", "k8s", "--name", "reader", *IMAGE, *data, "--no-python")
    user.types(*words, "--", "sleep", "1000")
    kept = re.compile(r"^\[0\] ", re.M)
    await_true(lambda: kept.search(ran("logs", "tr", env=user.environ).stdout), "kept logs")
    before = len(starts(out, 0))
    user.types("resume", "tr")
    await_true(lambda: len(starts(out, 0)) > before, "a life after it was resumed")
    assert starts(out, 0)[-1] > starts(out, 0)[1]


@further("test_an_elastic_job_from_submit_to_delete", why="real pods, under an operator in a pod")
def test_a_job_that_has_succeeded_in_its_run_folder_is_not_run_again(
    in_pods: StandIn, tmp_path: Path
) -> None:
    """The pods of a job that is made anew end with 0, and no rank begins."""
    script, ran_here = tmp_path / "train.py", tmp_path / "ran"
    script.write_text("import sys\nopen(sys.argv[1], 'a').write('x')\n")
    user = KubeUser(in_pods, tmp_path, apart=True)
    user.kubectl("apply", "-f", "-", given=CLAIM)
    words = ("submit", "--on", "k8s", "--name", "tr", *IMAGE, "--nodes", "2", "--cpu", "1")
    words += ("--data", f"shared:{tmp_path / 'mnt'}", f"--run-dir={tmp_path / 'mnt/run'}")
    for _ in range(2):
        user.types(*words, "--", str(script), str(ran_here))
        user.until("succeeded")
        assert ran_here.read_text() == "xx"
        said = user.types("logs", "tr", "--all")
        user.types("delete", "tr")
    assert "has already succeeded" in said


# ---------------------------------------------------------------- what is read


def a_job(phase: str, **status: Any) -> ClusterJob:
    annotations = {STOPPED: "2026-01-01T00:00:00Z"} if status.pop("stopped", False) else {}
    meta = {"name": "tr", "namespace": "team", "uid": "u", "generation": 1}
    body = {"metadata": {**meta, "annotations": annotations}, "spec": {"nodes": 4}}
    return ClusterJob({**body, "kind": "ElasticJob", "status": {"phase": phase, **status}})


def test_states_of_elastic_jobs() -> None:
    why = [
        {"type": "Failed", "status": "True", "message": "gave up"},
        {"type": "Scheduled", "status": "False", "message": "3 of 4 pods run"},
        {"type": "Admitted", "status": "True", "message": "fine"},
    ]
    for job, state, reason in (
        (a_job(""), "submitted", ""),
        (a_job("Pending", conditions=why), "waiting", "3 of 4 pods run"),
        (a_job("Running", conditions=why, nodes="3/4"), "running", ""),
        (a_job("Suspended", running=1), "leaving", ""),
        (a_job("Suspended"), "suspended", ""),
        (a_job("Suspended", stopped=True), "stopped", ""),
        (a_job("Failed", conditions=why), "failed", "gave up"),
        (
            ClusterJob({**a_job("").body, "status": {}}),
            "submitted",
            "no operator has handled it yet",
        ),
    ):
        assert (job.state, job.reason) == (state, reason), job.body
    row = a_job("Running", nodes="3/4", step=17, restarts=2).row(0.0)
    assert (row.nodes, row.max_nodes, row.step, row.restarts) == (3, 4, 17, 2)


def test_states_of_indexed_jobs() -> None:
    def of(status: dict[str, Any], **spec: Any) -> str:
        body = {"kind": "Job", "metadata": {"name": "tr", "uid": "u"}, "spec": spec}
        return ClusterJob({**body, "status": status}).state

    complete = {"type": "Complete", "status": "True"}
    assert of({}) == "waiting"
    assert of({"ready": 1, "active": 2}) == "running"
    assert of({"active": 1}, suspend=True) == "leaving"
    assert of({}, suspend=True) == "suspended"
    assert of({"conditions": [complete]}) == "succeeded"
    assert of({"conditions": [{"type": "Failed", "status": "True"}]}) == "failed"


def test_where_a_run_folder_is() -> None:
    """Its path by either spelling, and what is mounted there in the end."""
    mounts = [{"name": "d", "mountPath": "/d"}, {"name": "e", "mountPath": "/d/e", "subPath": "x"}]
    volumes = [{"name": "d", "nfs": {"server": "s"}}, {"name": "e", "emptyDir": {}}]
    for words, folder, there in (
        (["--run-dir=/d/run"], "/d/run", {"at": "/d", "sub": None, "nfs": {"server": "s"}}),
        (["elasticrun", "--run_dir", "/d/e/run"], "/d/e/run", None),
        (["--run-dir", "/data"], "/data", None),
        (["train.py", "--run-dir=/d"], "", None),
    ):
        container = {"name": "t", "command": words, "volumeMounts": mounts}
        template = {"spec": {"containers": [container], "volumes": volumes}}
        job = ClusterJob({**a_job("").body, "spec": {"template": template}})
        assert (job.run_dir, job.volume_at(folder)) == (folder, there)


def a_pod(name: str, index: str, phase: str = "Running", code: int | None = None) -> ObservedPod:
    return ObservedPod(
        uid=name,
        name=name,
        host=name,
        index=index,
        phase=phase,
        node="n0",
        container="m",
        created=1.0,
        ended=float(len(name)),
        code=code,
        started=True,
        is_terminating=False,
        message="",
    )


def test_whose_log_is_meant() -> None:
    """The first node's newest; of a job that has failed, of the pod that did first."""
    old, new = a_pod("a-0-0", "0", "Failed", 1), a_pod("a-0-1", "0")
    one, master = a_pod("a-1-0", "1"), a_pod("a-master-0", "master")
    pods = [old, new, one, master]
    assert selected_pods(pods, PodLogQuery()) == [new]
    assert selected_pods(pods, PodLogQuery(everything=True)) == [old, new, one]
    assert selected_pods(pods, PodLogQuery(node="master")) == [master]
    assert selected_pods(pods, PodLogQuery(node="0")) == [old, new]
    assert selected_pods(pods, PodLogQuery(node="a-worker-0")) == [one]
    failed = [a_pod("a-0-000", "0", "Failed", 1), a_pod("a-1-0", "1", "Failed", 1)]
    assert selected_pods(failed, PodLogQuery()) == failed[1:]
    told = [replace(failed[0], failed_rank_node="a-0-000"), failed[1]]
    assert selected_pods(told, PodLogQuery()) == told[:1]
    assert selected_pods([], PodLogQuery()) == []
    by_rank = PodLogQuery(rank=1)
    assert by_rank.matches("[default1]:step 3")
    assert not by_rank.matches("[default11]:step 3")
    assert not by_rank.matches("step 1]")


def test_quantities() -> None:
    for text, number in (("500m", 0.5), ("16Gi", 2.0**34), ("8", 8.0), ("1k", 1000.0), ("x", 0.0)):
        assert quantity(text) == number


def test_which_words_are_about_a_cluster(tmp_path: Path) -> None:
    environ = {"ELASTICRUN_RUNS": str(tmp_path)}
    for name, where, launch in (("far", "k8s", "0" * 8), ("near", "local", "1" * 8)):
        RunFolder(make_run(tmp_path, name, launch)).write_job(JobRecord(name=name, where=where))
    for words, meant in (
        (["far"], True),
        (["--tail", "5", "fa"], True),
        (["--grep", "near", "fa"], True),
        (["-i", "near", "fa"], True),
        (["near"], False),
        (["near", "--on=k8s"], True),
        (["near", "--on", "kubernetes"], True),
        (["x", "--namespace", "team"], True),
        (["x", "--", "--on", "k8s"], False),
        ([], False),
    ):
        assert is_in_cluster(words, environ) is meant, words
    for word in ("k8s", "kubernetes"):
        assert is_in_cluster([], {**environ, "ELASTICRUN_ON": word})
    with pytest.raises(RequestFailed, match="--on=local: leave it out"):
        is_in_cluster(["far", "--on", "local"], environ)
    with pytest.raises(RequestFailed, match=r"ELASTICRUN_ON=k8: .* did you mean k8s"):
        is_in_cluster([], {**environ, "ELASTICRUN_ON": "k8"})
    assert not is_in_cluster(["near"], {**environ, "ELASTICRUN_ON": "k8s"})


A_CONFIG = """\
current-context: it
contexts: [{name: it, context: {cluster: c, user: me, namespace: team}}]
clusters: [{name: c, cluster: {server: "https://k:1"}}]
users: [{name: me, user: {token: t}}]
"""
"""A kubeconfig."""


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "is not a kubeconfig"),
        ("this: [is: broken", "is not a kubeconfig"),
        ("current-context: it", "is not a kubeconfig"),
        (A_CONFIG.replace("user: me", "user: you"), "has a user you that is not in it"),
        (A_CONFIG.replace("cluster: c,", "cluster: d,"), "has a cluster d that is not in it"),
        (
            A_CONFIG.replace("current-", "#"),
            "no current context: choose one with --context; it",
        ),
        (A_CONFIG.replace("text: it", "text: itt"), "has no context itt; did you mean it?"),
        (None, "no cluster is configured here"),
    ],
)
def test_a_kubeconfig_that_is_none_is_one_sentence(
    text: str | None, why: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "config"))
    if text is not None:
        (tmp_path / "config").write_text(text)
    with pytest.raises(RequestFailed, match=re.escape(why)):
        KubeApi()


def test_kubeconfigs_are_read_as_kubectl_does(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Several files, of which some may be missing; a program that logs in is told what it asks."""
    login = "{exec: {apiVersion: client.authentication.k8s.io/v1, command: in}}"
    (tmp_path / "a").write_text("contexts: []\nclusters: []\nusers: []")
    (tmp_path / "b").write_text(A_CONFIG.replace("{token: t}", login))
    monkeypatch.setenv("KUBECONFIG", ":".join(str(tmp_path / one) for one in ("none", "a", "b")))
    found = settings()
    assert (found.context_name, found.namespace) == ("it", "team")
    assert found.cluster.server == "https://k:1"
    assert found.user is not None
    assert found.user.exec is not None
    assert found.user.exec.env is not None
    (told,) = found.user.exec.env
    assert '"apiVersion": "client.authentication.k8s.io/v1"' in told.value
