"""What the operator orders, over histories without a cluster."""

from __future__ import annotations

import dataclasses
from typing import Any

import kubernetes_validate
import msgspec
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from elasticrun.core.reasons import Banned, Excluded, code, text
from elasticrun.host.runs.last_word import LastWord
from elasticrun.host.runs.layout import RunResult
from elasticrun.jobs.operator import objects, plan
from elasticrun.jobs.operator.plan import LONGEST_WAIT, RUN_ENDS, SETTLE
from elasticrun.jobs.operator.view import GAVE_UP, PAUSE, ObservedState
from tests.further import examples
from tests.jobs.operator.world import Cluster, excluded, page, placed


def training(**spec: Any) -> Cluster:
    """A job whose pods run, and whose master says that all of them train."""
    world = Cluster(**{"nodes": 2, **spec})
    world.settle()
    world.run()
    nodes = world.job["spec"]["nodes"]
    hosts = [f"tr-{index}" for index in range(nodes)]
    world.master = page(phase="running", max_nodes=nodes, nodes=placed(*hosts))
    world.settle()
    assert world.status.phase == "Running"
    return world


def test_a_job_begins() -> None:
    world = Cluster(nodes=2, minNodes=1, spares=1)
    todo = world.look()
    assert world.names() == ["tr-0-0", "tr-1-0", "tr-2-0", "tr-master-0"]
    kinds = [o.body["kind"] for o in todo.orders if isinstance(o, plan.CreateObject)]
    assert kinds == ["Service", "Pod", "Pod", "Pod", "Pod"], "the master first"
    assert world.env("tr-1-0")["ELASTICRUN_NNODES"] == "1:2"
    assert world.env("tr-1-0")["ELASTICRUN_MAX_RESTARTS"] == "3"
    assert world.env("tr-1-0")["ELASTICRUN_RDZV_ENDPOINT"] == "tr-master.tr:29400"
    assert (world.status.phase, world.status.nodes) == ("Pending", "0/2")
    world.run()
    world.settle()
    assert (world.status.phase, world.status.nodes) == ("Starting", "2/2")
    world.master = page(phase="running", max_nodes=2, nodes=placed("tr-0", "tr-1"), step=7)
    world.settle()
    assert (world.status.phase, world.status.nodes, world.status.step) == ("Running", "2/2", 7)
    assert world.status.running == 3, "with the spare"
    assert [c.type for c in world.status.conditions if c.status == "True"] == [
        "Admitted", "Scheduled", "MasterReachable", "Training",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("container", "fails"),
    [
        ({"command": ["elasticrun", "--tls-ca", "/c", "train.py"]}, True),
        ({"env": [{"name": "ELASTICRUN_TLS_CERT", "value": "/c"}]}, True),
        ({"command": ["elasticrun", "train.py"], "args": ["--tls-ca=/c"]}, False),
    ],
)
def test_files_of_tls_are_not_offered(container: dict[str, Any], fails: bool) -> None:
    one = {"name": "train", "image": "i", **container}
    world = Cluster(template={"spec": {"containers": [one]}})
    world.settle()
    assert (world.status.phase == "Failed") is fails
    assert bool(world.names()) is not fails
    assert ("elasticrun render k8s" in world.status.condition("Failed").message) is fails


REPLACED = [(137, "free"), (143, "free"), (75, "free"), (99, "free"), (None, "free"),
            (1, "counted"), (139, "counted")]  # fmt: skip


@pytest.mark.parametrize(("code", "cost"), REPLACED)
def test_a_pod_that_dies_is_replaced_at_once(code: int | None, cost: str) -> None:
    world = training()
    world.end("tr-1-0", code)
    world.master = page(phase="gathering", max_nodes=2, last_failure="node tr-1 is lost")
    (made,) = (o for o in world.look().orders if isinstance(o, plan.CreateObject))
    assert made.notice is not None
    assert made.notice.reason == "Replaced"
    assert made.notice.message.endswith(", counted" if cost == "counted" else ", not counted")
    assert "tr-1-1" in world.pods
    assert world.status.phase == "Recovering"
    assert world.status.condition("Recovering").reason == "PodsLost"


def test_a_pod_that_is_deleted_is_replaced_when_it_has_gone() -> None:
    world = training()
    world.delete("tr-1-0")
    assert world.look().orders == ()
    world.vanish()
    (made,) = (o for o in world.look().orders if isinstance(o, plan.CreateObject))
    assert "tr-1-0" in world.pods
    assert made.notice is not None
    said = "created pod tr-1-0: the one before it was deleted, not counted"
    assert made.notice == ("Replaced", said, False)
    world.run()
    world.delete("tr-1-0")
    world.now += 60 + 29
    assert world.settle() == 0
    world.now += 2
    world.look()
    assert "tr-1-1" in world.pods, "its node has gone, and nobody says so"


def test_of_two_at_one_place_the_younger_goes() -> None:
    """An operator that was shown an older state than its own has made one too many."""
    world = training()
    world.end("tr-1-0", 137)
    world.look()
    world.run()
    del world.pods["tr-1-0"]
    older, world.pods = world.pods, {}
    world.now += 2
    world.look()
    world.pods |= older
    world.run()
    assert [name for name in world.names() if name.startswith("tr-1")] == ["tr-1-0", "tr-1-1"]
    (order,) = (one for one in world.look().orders if isinstance(one, plan.Delete))
    assert order.pod.name == "tr-1-0"


def last_word(word: LastWord) -> str:
    """As a cluster keeps it."""
    return msgspec.json.encode(word).decode()


def excluded_word(banned: Banned) -> str:
    return last_word(LastWord(text(banned), reason=code(banned)))


SUMMARY = last_word(LastWord("rank 1 on tr-1.tr: ValueError: no number", 1, "tr-1.tr"))
RESULT = RunResult(
    state="failed",
    reason="rank 1 on node tr-1-ab-0: OSError",
    failed_node="tr-1-ab-0",
    step=9,
    restarts=2,
)
BY_MASTER = f"{RESULT.reason}; tr-1-0 ended"


@pytest.mark.parametrize(
    ("code", "name", "message", "said"),
    [
        (93, "tr-0-0", SUMMARY, "rank 1 on tr-1.tr: ValueError: no number; tr-0-0 ended with 93"),
        (93, "tr-master-0", msgspec.json.encode(RESULT).decode(), f"{BY_MASTER} with 93"),
        (
            2,
            "tr-1-0",
            "usage: ...\nerror: no flag --x\n",
            "error: no flag --x; tr-1-0 ended with 2",
        ),
        (2, "tr-1-0", "", "tr-1-0 ended with 2"),
    ],
)
def test_never_after_these(code: int, name: str, message: str, said: str) -> None:
    """It says which rank failed first, and how; its last step is the master's last word."""
    world = training()
    world.end(name, code, message=message)
    if name == "tr-master-0":
        world.master = None
    todo = world.look()
    status = world.status
    assert (status.phase, status.nodes[1:]) == ("Failed", "/2")
    assert status.condition("Failed").message == f"{said}: another pod would fail in the same way"
    assert status.condition("Scheduled").reason == "Over"
    assert (status.step, status.restarts) == ((None, 0) if name != "tr-master-0" else (9, 2))
    assert [notice.reason for notice in todo.notices] == ["Failed"]
    world.now += SETTLE
    world.settle()
    world.vanish()
    world.settle()
    world.vanish()
    assert world.names() == [name]


def test_pods_that_do_not_run_elasticrun_are_told_of() -> None:
    world = Cluster(nodes=1, runPolicy={"backoffLimit": 1})
    world.settle()
    world.master = page(reason="no agent has attached yet")
    for attempt in range(2):
        world.run()
        world.now += 100
        world.end(f"tr-0-{attempt}", 1, message="hi\nno module torch\n")
        world.look()
        kind, count = ("Failed", "2 pods") if attempt else ("Training", "1 pod")
        said = world.status.condition(kind).message
        assert said.startswith(f"{count} failed and no agent has attached: does the")
        assert said.endswith(f"run elasticrun? tr-0-{attempt} ended with 1: no module torch")
        assert world.status.restarts == attempt + 1
    world = Cluster(nodes=1)
    world.settle()
    world.run()
    world.master = page(reason="no agent has attached yet")
    world.end("tr-0-0", 1, message=last_word(LastWord("no program")))
    world.look()
    assert world.status.condition("Training").message == "no agent has attached yet"
    world.run("tr-0-1")
    world.end("tr-0-1", 0)
    del world.pods["tr-0-0"]
    world.look()
    assert world.status.phase == "Succeeded"
    assert "does the template's first" in world.status.condition("Succeeded").message


def test_failures_are_counted_by_what_is_left_of_them() -> None:
    world = training(runPolicy={"backoffLimit": 2})
    for attempt in range(3):
        world.run()
        world.now += 100
        world.end(f"tr-1-{attempt}", 1 if attempt else 137, reason="" if attempt else "OOMKilled")
        world.look()
    assert world.status.phase == "Failed"
    assert world.status.condition("Failed").reason == "BackoffLimitExceeded"


def test_pods_that_end_soon_after_each_other_wait_longer_and_longer() -> None:
    world = training()
    waits = []
    for attempt in range(9):
        world.run()
        world.end(f"tr-1-{attempt}", 143)
        again = world.look().again or 0.0
        waits.append(again)
        world.now += again
        world.look()
    assert waits[:4] == [0.0, 1.0, 2.0, 4.0]
    assert waits[-1] == LONGEST_WAIT
    old = [name for name in world.names() if name.startswith("tr-1")]
    assert old == ["tr-1-7", "tr-1-8", "tr-1-9"], "the older ones are no record of anything"


def test_the_masters_pod_is_replaced_and_the_others_train_on() -> None:
    world = training()
    world.delete("tr-master-0")
    world.vanish()
    world.master = None
    world.look()
    assert "tr-master-0" in world.names()
    assert world.status.phase == "Running"
    assert world.status.condition("MasterReachable").reason == "NoPod"
    assert world.status.condition("Training").reason == "Unasked"


def test_a_bad_node_is_avoided() -> None:
    world = training(nodes=3)
    world.now += 10
    world.end("tr-1-0", 75)
    world.master = page(phase="gathering", max_nodes=3, excluded=(excluded("tr-2.tr.ns.svc"),))
    todo = world.look()
    assert {one.node for one in world.status.excluded_nodes} == {"on-tr-1-0", "on-tr-2-0"}
    assert [notice.reason for notice in todo.notices] == ["Excluded", "Excluded"]
    (term,) = world.pods["tr-1-1"]["spec"]["affinity"]["nodeAffinity"][
        "requiredDuringSchedulingIgnoredDuringExecution"
    ]["nodeSelectorTerms"]
    rules = [(rule["operator"], rule["values"]) for rule in term["matchFields"]]
    assert rules == [("NotIn", ["on-tr-1-0"]), ("NotIn", ["on-tr-2-0"])], "one value is allowed"
    no_room = {"type": "PodScheduled", "status": "False", "message": "0/2 nodes are available"}
    world.pods["tr-1-1"]["status"]["conditions"] = [no_room]
    world.look()
    why = world.status.condition("Scheduled").message
    assert "tr-1-1: 0/2 nodes are available; pods avoid on-tr-2-0, on-tr-1-0" in why
    assert why.endswith(f"until {objects.format_time(world.now + 3599)}")
    world.end("tr-2-0", 143)
    world.look()
    world.run("tr-1-1")
    world.run("tr-2-1", node="good")
    assert world.look().notices == (), "where its successor is, is another node"
    world.master = None
    world.now += 3601
    world.look()
    assert world.status.excluded_nodes == ()


@pytest.mark.parametrize("lift", ["include", "suspend"])
def test_a_node_that_a_person_wants_out_is_avoided_until_he_lets_it_in(lift: str) -> None:
    """One pod's node, not those of its successors: who is not let in has found nothing."""
    world = training(nodes=2)
    world.now += 10.4
    how = Excluded("asked", "asked by me: loud")
    world.end("tr-1-0", 75, message=excluded_word(Banned(how, 3600.0)))
    world.master = page(
        max_nodes=2, excluded=(excluded("tr-1.tr", "asked by me: loud", 0.1, "asked"),)
    )
    world.look()
    world.run("tr-1-1", node="next")
    again = Banned(how, 3599.0, "tr-1-ab-0", "tr-1.tr")
    refused = text(again)
    assert refused == (
        "node tr-1-ab-0 on tr-1.tr is excluded for 3599 s more: asked by me: loud; "
        "`elasticrun include tr-1-ab-0` admits it sooner"
    )
    world.end("tr-1-1", 75, message=excluded_word(again))
    world.look()
    found = [(one.node, one.reason) for one in world.status.excluded_nodes]
    assert found == [("on-tr-1-0", "asked by me: loud")]
    assert world.status.condition("Recovering").message.endswith(f"with 75: {refused}")
    world.master = page(max_nodes=2) if lift == "include" else None
    world.job["spec"]["suspend"] = lift == "suspend"
    world.look()
    assert world.status.excluded_nodes == ()


def test_a_job_is_scaled_live() -> None:
    world = training(nodes=3, minNodes=2)
    world.job["spec"]["nodes"] = 2
    assert world.look().orders == (plan.Resize(2),), "the master first"
    assert world.master is not None
    assert world.look().orders == (), "tr-2 has a place still"
    world.master = msgspec.structs.replace(world.master, nodes=placed("tr-0", "tr-1"))
    world.look()
    assert [pod.index for pod in world.living() if pod.deleted] == [2]
    world.vanish()
    world.settle()
    world.job["spec"]["nodes"] = 4
    world.look()
    assert world.resized == [2, 4]
    assert [pod.index for pod in world.living()] == [0, 1, 2, 3]


def test_a_job_of_one_node_begins_anew_when_it_grows() -> None:
    """Its agent is where no other can reach it."""
    world = training(nodes=1)
    assert world.env("tr-0-0")["ELASTICRUN_NNODES"] == "1:1"
    world.job["spec"]["nodes"] = 2
    world.settle()
    assert world.living(0)[0].deleted
    world.vanish()
    world.settle()
    assert world.env("tr-0-0")["ELASTICRUN_NNODES"] == "2:2"


def test_a_suspended_job_saves_and_has_no_pods() -> None:
    world = training()
    world.job["spec"]["suspend"] = True
    world.end("tr-master-0", 99)
    world.settle()
    world.run()
    world.look()
    assert all(pod.deleted for pod in world.living())
    assert not any(pod.deleted for pod in world.living(-1)), "the master is needed to save"
    assert world.status.phase == "Suspended"
    world.vanish()
    world.settle()
    world.vanish()
    assert world.names() == []
    world.job["spec"]["suspend"] = False
    world.master = None
    todo = world.look()
    assert [notice.reason for notice in todo.notices] == ["Resumed"]
    assert world.names() == ["tr-0-0", "tr-1-0", "tr-master-0"]
    assert world.status.phase == "Pending"


@pytest.mark.parametrize(
    ("gang", "group"),
    [
        ({"scheduler": "volcano", "queue": "q"}, "scheduling.volcano.sh/v1beta1"),
        ({"scheduler": "coscheduling"}, "scheduling.x-k8s.io/v1alpha1"),
        ({"scheduler": "koordinator"}, ""),
        ({"scheduler": "native"}, "scheduling.k8s.io/v1beta1"),
        ({"scheduler": "kueue", "queue": "q"}, ""),
        (None, ""),
    ],
)
def test_what_is_made_is_what_kubernetes_takes(gang: dict[str, str] | None, group: str) -> None:
    world = Cluster(nodes=2, **({"gang": gang} if gang else {}))
    made = [o.body for o in world.look().orders if isinstance(o, plan.CreateObject)]
    made.append(objects.secret(objects.parse_job(world.job), "token"))
    groups = [body["apiVersion"] for body in made if body["kind"] == "PodGroup"]
    assert groups == ([group] if group else [])
    for body in made:
        if body["kind"] != "PodGroup":
            kubernetes_validate.validate(body, "1.37", strict=True)


def test_half_a_gang_is_given_back_and_tried_again() -> None:
    world = Cluster(nodes=2, runPolicy={"pendingTimeoutSeconds": 300})
    world.settle()
    world.run("tr-0-0", "tr-master-0")
    world.pods["tr-1-0"]["status"]["conditions"] = [
        {"type": "PodScheduled", "status": "False", "message": "0/4 nodes are available"}
    ]
    world.look()
    assert world.status.condition("Scheduled").message == (
        "1 of 2 pods runs; tr-1-0: 0/4 nodes are available"
    )
    world.now += 299
    assert world.look().again == pytest.approx(1.0)
    world.now += 1
    todo = world.look()
    assert GAVE_UP in [notice.reason for notice in todo.notices]
    world.vanish()
    world.settle()
    assert world.living() == []
    world.now += PAUSE
    world.settle()
    assert len(world.living()) == 2
    assert world.status.condition("Scheduled").reason == "Waiting"


def test_a_run_that_ends_with_1_begins_anew_when_all_of_it_has_ended() -> None:
    world = training()
    world.now += 100
    world.end("tr-0-0", 1)
    world.end("tr-master-0", 1)
    world.master = None
    assert world.look().again == pytest.approx(RUN_ENDS), "tr-1-0 ends first"
    world.end("tr-1-0", 1)
    world.settle()
    alive = sorted(pod.name for pod in world.living()) + [pod.name for pod in world.living(-1)]
    assert alive == ["tr-0-1", "tr-1-1", "tr-master-1"]
    world.run()
    world.end("tr-master-1", 1)
    world.settle()
    world.now += RUN_ENDS
    world.settle()
    assert [pod.name for pod in world.living(-1)] == ["tr-master-2"], "others wait for it"


@pytest.mark.parametrize(
    ("policy", "success", "left"),
    [
        ("Running", "AllWorkers", ["tr-0-0", "tr-1-0", "tr-master-0"]),
        ("All", "AllWorkers", []),
        ("None", "AllWorkers", ["tr-0-0", "tr-1-0", "tr-master-0"]),
        ("Running", "", ["tr-0-0", "tr-master-0"]),
        ("None", "Rank0", ["tr-0-0", "tr-1-0", "tr-master-0"]),
    ],
)
def test_a_job_succeeds(policy: str, success: str, left: list[str]) -> None:
    world = training(runPolicy={"cleanPodPolicy": policy}, successPolicy=success)
    world.end("tr-0-0", 0)
    world.end("tr-master-0", 0)
    world.master = None
    world.look()
    if success == "AllWorkers":
        assert world.status.phase == "Running"
        world.end("tr-1-0", 0)
        world.look()
    assert world.status.phase == "Succeeded"
    world.now += SETTLE
    world.look()
    world.vanish()
    world.settle()
    assert world.names() == left


def test_a_job_has_a_deadline_and_goes_by_itself() -> None:
    world = training(runPolicy={"activeDeadlineSeconds": 100, "ttlSecondsAfterFinished": 50})
    world.now += 99
    assert world.look().again == pytest.approx(1.0)
    world.now += 1
    world.look()
    assert world.status.condition("Failed").reason == "DeadlineExceeded"
    world.now += 49
    world.look()
    assert not world.gone
    world.now += 1
    world.look()
    assert world.gone


def test_the_master_has_the_volume_of_the_run_folder() -> None:
    """And no other; what was there before is put away by the first of its pods alone."""
    volumes = [{"name": "d", "nfs": {"server": "s"}}, {"name": "k", "secret": {"secretName": "k"}}]
    mounts = [{"name": "k", "mountPath": "/k"}, {"name": "d", "mountPath": "/d"}]
    words = ["elasticrun", "--fresh", "--run-dir=/d/run", "train.py", "--run-dir=/k"]
    container = {"name": "train", "image": "i", "command": words, "volumeMounts": mounts}
    template = {"spec": {"containers": [container], "volumes": volumes}}
    job = objects.parse_job(Cluster(nodes=2, template=template).job)
    for attempt, flags in ((0, ["--run-dir=/d/run", "--fresh"]), (1, ["--run-dir=/d/run"])):
        spec = objects.master_pod(job, attempt)["spec"]
        (made,) = spec["containers"]
        assert made["args"][3:] == flags
        assert (made["volumeMounts"], spec["volumes"]) == (mounts[1:], volumes[:1])
    resumed = msgspec.structs.replace(job.status, restarts=0)
    again = objects.master_pod(dataclasses.replace(job, status=resumed), 0)
    assert "--fresh" not in str(again)
    container["command"] = words[3:]
    assert "volumes" not in objects.master_pod(job, 0)["spec"]


def test_what_the_server_refuses_is_a_condition() -> None:
    world = Cluster(nodes=1)
    seen = ObservedState(refused='pods "tr-0-0" is forbidden: exceeded quota')
    todo = plan.plan(objects.parse_job(world.job), seen, world.now)
    assert todo.status.condition("Admitted").message == seen.refused


# ---------------------------------------------------------------- any history

CODES = st.sampled_from([0, 1, 2, 75, 93, 99, 137, 139, 143, None])


@settings(max_examples=examples(60), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_whatever_happens(data: st.DataObject) -> None:
    """Never two living pods of an index, never more than nodes and spares; a terminal state stays;
    a look at what has not changed orders nothing; and it settles."""
    nodes = data.draw(st.integers(1, 4))
    world = Cluster(
        nodes=nodes,
        minNodes=data.draw(st.integers(1, nodes)),
        spares=data.draw(st.integers(0, 1)),
        runPolicy={
            "backoffLimit": data.draw(st.integers(0, 3)),
            "pendingTimeoutSeconds": 100,
            "cleanPodPolicy": data.draw(st.sampled_from(["None", "Running", "All"])),
        },
        successPolicy=data.draw(st.sampled_from(["", "Rank0", "AllWorkers"])),
    )
    most, end = nodes + world.job["spec"]["spares"], ""
    for _ in range(data.draw(st.integers(1, 25))):
        happen(world, data)
        most = max(most, world.job["spec"]["nodes"] + world.job["spec"]["spares"])
        world.look()
        alive = [pod.index for pod in world.living()]
        assert len(alive) == len(set(alive)) <= most
        assert len(world.living(-1)) <= 1
        assert not end or world.status.phase == end
        end = world.status.phase if world.status.is_over else ""
    quiet(world)
    wanted = 0 if end or world.job["spec"].get("suspend") else sum_of(world)
    if not end and not world.status.is_over and not any(pod.is_over for pod in world.sight().pods):
        assert len(world.living()) == wanted


def happen(world: Cluster, data: st.DataObject) -> None:
    """One thing, to somebody."""
    running = [name for name, pod in world.pods.items() if pod["status"]["phase"] == "Running"]
    what = data.draw(st.sampled_from(["run", "end", "delete", "vanish", "time", "spec", "master"]))
    if what == "run":
        world.run()
    elif what == "end" and running:
        world.end(data.draw(st.sampled_from(running)), data.draw(CODES))
    elif what == "delete" and world.pods:
        world.delete(data.draw(st.sampled_from(world.names())))
    elif what == "vanish":
        world.vanish()
    elif what == "time":
        world.now += data.draw(st.sampled_from([1.0, 30.0, 100.0, 3601.0]))
    elif what == "spec":
        spec = world.job["spec"]
        spec["nodes"] = data.draw(st.integers(spec["minNodes"], 5))
        spec["suspend"] = data.draw(st.booleans())
    elif what == "master":
        world.master = data.draw(
            st.sampled_from([
                None, page(phase="running", nodes=placed("tr-0")), page(), page(outcome="failed"),
            ])
        )  # fmt: skip


def quiet(world: Cluster) -> None:
    """Nothing more happens but what was ordered: it settles, and then nothing is ordered."""
    world.master = None
    for _ in range(4):
        world.vanish()
        world.now += 200
        world.run()
        world.settle()
    before = world.job["status"], world.names()
    assert world.look().orders == ()
    assert (world.job["status"], world.names()) == before


def sum_of(world: Cluster) -> int:
    spec = world.job["spec"]
    return int(spec["nodes"] + spec["spares"])
