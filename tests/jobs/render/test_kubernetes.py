"""What the fields come to, one rule a test; what goldens/ show is not said again."""

from __future__ import annotations

import pytest

from elasticrun.cli.flags import get_args_parser
from elasticrun.cli.settings import UsageError
from elasticrun.config import DEPARTURE_GRACE, SHUTDOWN_TIMEOUT
from elasticrun.jobs.render.settings import GRACE_MARGIN
from tests.jobs.render.rendered import check, expanded, render

LEAST = ("k8s", "--name", "tr", "--image", "repo/train:1.0")
RUN = ("--", "train.py")
POD = {"ELASTICRUN_JOB_UID": "0f-1", "JOB_COMPLETION_INDEX": "2", "HOME": "/root", "x": "oops"}


@pytest.mark.parametrize("target", ["k8s", "jobset"])
@pytest.mark.parametrize(
    "program",
    [
        ("train.py",),
        ("train.py", "--lr", "3e-4", "--name", "a b"),
        ("train.py", "$(HOME)", "$$(HOME)", "$$", "$", "$x", "a$", "$(", "${local_rank}"),
        ("train.py", "--", "--lr", "--"),
        ("train.py", "", "\n", "-h", "--nnodes=7"),
    ],
)
def test_a_node_reads_the_command_that_was_meant(target: str, program: tuple[str, ...]) -> None:
    printed = render(
        target, *LEAST[1:], "--nnodes", "2:4", "--nproc-per-node", "8", "--max-restarts=3", "--",
        *program,
    )  # fmt: skip
    assert printed.container["command"] == ["elasticrun"]
    words = expanded(printed.container["args"], POD)
    ns = get_args_parser({}).parse_args(words)
    assert (ns.training_script, *ns.training_script_args) == program
    assert (ns.nnodes, ns.nproc_per_node, ns.max_restarts) == ("2:4", "8", 3)
    assert (ns.rdzv_backend, ns.rdzv_id, ns.node_rank) == ("c10d", "tr-0f-1", 2)
    host0 = "tr-0" if target == "k8s" else "tr-node-0-0"
    assert ns.rdzv_endpoint == f"{host0}.tr:29400"


def test_values_of_variables_are_handed_on_as_they_are() -> None:
    printed = render(*LEAST, "--env", "A=$(HOME) $$x $y", "--env", "B=a=b", *RUN)
    env = {one["name"]: one.get("value") for one in printed.container["env"]}
    assert expanded([env["A"], env["B"]], POD) == ["$(HOME) $$x $y", "a=b"]


def test_it_may_begin_with_fewer_pods_or_with_spares() -> None:
    assert render(*LEAST, "--nnodes", "2:8", "--pods", "3", *RUN).job["parallelism"] == 3
    assert render(*LEAST, "--nnodes", "2:4", "--pods", "6", *RUN).job["completions"] == 6


def test_a_pod_has_the_time_that_its_node_needs_to_leave() -> None:
    def grace(*words: str) -> int:
        return int(render(*LEAST, *words, *RUN).job["template"]["spec"][FIELD])

    assert grace() == int(DEPARTURE_GRACE) + SHUTDOWN_TIMEOUT + GRACE_MARGIN
    assert grace("--departure-grace", "0", "--shutdown-timeout", "1") == 60
    assert grace("--departure-grace", "120", "--shutdown-timeout", "7.5") == 133
    printed = render(*LEAST, "--grace", "30", *RUN)
    assert printed.job["template"]["spec"][FIELD] == 30
    assert any("--grace 30: a node may need 60 s" in note for note in printed.notes)


FIELD = "terminationGracePeriodSeconds"


def test_gpus_are_as_many_as_ranks_where_their_resource_is_named() -> None:
    def limits(*words: str) -> object:
        return render(*LEAST, *words, *RUN).container.get("resources")

    assert limits("--nproc-per-node", "8") is None
    assert limits("--nproc-per-node", "8", "--gpu-resource", "amd.com/gpu") == {
        "limits": {"amd.com/gpu": "8"}
    }
    assert limits("--nproc-per-node", "gpu", "--gpus", "4") == {"limits": {"nvidia.com/gpu": "4"}}
    assert limits("--gpu-resource", "amd.com/gpu") == {"limits": {"amd.com/gpu": "1"}}


def test_ranks_are_as_many_as_gpus_where_nobody_says() -> None:
    printed = render(*LEAST, "--gpus", "4", *RUN)
    assert "--nproc-per-node=4" in printed.container["args"]
    assert any(note.startswith("4 ranks on each node, one for each GPU") for note in printed.notes)
    printed = render(*LEAST, "--gpus", "4", "--nproc-per-node", "2", *RUN)
    assert "--nproc-per-node=2" in printed.container["args"]
    assert not any("GPU" in note for note in printed.notes)
    printed = render(*LEAST, "--gpus", "4", "--nproc-per-node", "8", *RUN)
    assert any("8 ranks on each node" in note and "share its 4" in note for note in printed.notes)
    assert "--nproc-per-node=1" in render(*LEAST, "--gpus", "0", *RUN).container["args"]


def test_data_is_a_claim_of_its_name_and_is_looked_at_in_the_pod() -> None:
    printed = render(*LEAST, "--data", "corpus:/data,more:/more", *RUN).container
    assert "--data=corpus:/data,more:/more" in printed["args"]
    mounts = {one["name"]: one["mountPath"] for one in printed["volumeMounts"]}
    assert mounts.items() >= {"corpus": "/data", "more": "/more"}.items()


def test_secrets_are_named_and_never_shown() -> None:
    words = ("--token-secret", "s:k", "--git-secret", "g")
    env = {one["name"]: one for one in render(*LEAST, *words, *RUN).container["env"]}
    for name, key in (
        ("ELASTICRUN_TOKEN", {"name": "s", "key": "k"}),
        ("GIT_SYNC_USERNAME", {"name": "g", "key": "username", "optional": True}),
        ("GIT_SYNC_PASSWORD", {"name": "g", "key": "password"}),
    ):
        assert env[name]["valueFrom"] == {"secretKeyRef": key}
    for flag, variable in (("--token-secret", "ELASTICRUN_TOKEN"), ("", "GIT_SYNC_PASSWORD")):
        with pytest.raises(UsageError, match=flag or "would put the secret into"):
            render(*LEAST, "--env", f"{variable}=x", *RUN)


@pytest.mark.parametrize(("version", "stage"), [("1.36", "v1alpha2"), ("1.37", "v1beta1")])
def test_the_native_gang_is_that_of_the_version(version: str, stage: str) -> None:
    printed = render(*LEAST, "--nnodes=3", "--gang=native", f"--k8s-version={version}", *RUN)
    group = printed.one("PodGroup")
    assert group["apiVersion"] == f"scheduling.k8s.io/{stage}"
    assert group["spec"] == {"schedulingPolicy": {"gang": {"minCount": 3}}}
    assert printed.job["template"]["spec"]["schedulingGroup"] == {"podGroupName": "tr"}
    check(printed.documents, version)


def test_a_gang_scheduler_may_have_another_name_and_no_queue() -> None:
    printed = render(*LEAST, "--nnodes", "2:4", "--gang", "volcano", *RUN)
    assert printed.one("PodGroup")["spec"] == {"minMember": 2}
    printed = render(*LEAST, "--nnodes", "2:4", "--gang", "coscheduling", "--scheduler", "s", *RUN)
    assert printed.job["template"]["spec"]["schedulerName"] == "s"


@pytest.mark.parametrize(
    ("words", "limit"),
    [
        ((), 0),
        (("--retries", "2"), 2),
        (("--nnodes=2:4",), 3),
        (("--nnodes=2:4", "--retries=1"), 7),
    ],
)
def test_a_job_that_is_over_is_not_tried_for_ever(words: tuple[str, ...], limit: int) -> None:
    """Hopeless ends fail the Job at once; of the others, so many tries of all pods are made."""
    printed = render(*LEAST, *words, *RUN)
    assert printed.job["backoffLimit"] == limit
    assert "--exit-codes=scheduler" in printed.container["args"]
    kept = render(*LEAST, "--exit-codes=torchrun", *words, *RUN).container["args"]
    assert [word for word in kept if "exit-codes" in word] == ["--exit-codes=torchrun"]


def test_what_the_user_should_know_is_said() -> None:
    def said(*words: str) -> str:
        return "\n".join(render("k8s", "--name", "tr", *words, *RUN).notes)

    for image in ("repo/train", "repo/train:latest", "r:5000/train:main", "train:stable"):
        assert "has a tag that may move" in said("--image", image)
    for image in ("repo/train:1.0", "r:5000/train@sha256:" + "a" * 64, "train:stable-2.1"):
        assert "tomorrow" not in said("--image", image)
    fixed = ("--image", "a:1")
    assert said(*fixed).count("\n") == 0, "nothing that is always so"
    assert said(*fixed).startswith("no --token-secret NAME: anyone who can reach")
    assert not said(*fixed, "--token-secret", "s")
    secret = (*fixed, "--token-secret", "s")
    assert "foo is not known and has no effect" in said(*secret, "--rdzv-conf", "foo=1")
    assert "has no effect" in said(*secret, "--auto-tunning")
    assert "are lost with the pod" in said(*secret, "--run-dir=/runs/tr", "--data=x:/run")
    assert not said(*secret, "--run-dir=/runs/tr", "--data=x:/runs", "--log-dir", "/runs/logs")
    assert not said(*secret, "--nnodes=2", "--nproc-per-node=8"), "that is for the nodes to say"
    for plugin in ("default", "mine"):
        assert not said(*secret, "--logs-specs", plugin), "the nodes know which ones they have"
    assert "every index" in said(*fixed, "--nnodes=1:2", "--k8s-version=1.30")
    assert "written as for" in said(*fixed, "--k8s-version=1.99")
    assert "GangScheduling" in said(*fixed, "--gang=native", "--k8s-version=1.36")
