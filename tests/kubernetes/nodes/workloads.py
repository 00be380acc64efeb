"""Jobs and Deployments: who makes pods of a template, and makes them again.

A Deployment's pods are its own (there is no ReplicaSet between them), and are all replaced at once
when the template changes. A Job's ttlSecondsAfterFinished, activeDeadlineSeconds and limits per
index are not kept.
"""

from __future__ import annotations

import asyncio
import copy
import hashlib
import json
from typing import Any

from tests.kubernetes.server.kinds import Obj
from tests.kubernetes.server.registry import FINAL, Registry, now
from tests.kubernetes.server.store import Change, place_of

PREFIX = "batch.kubernetes.io"
INDEX = f"{PREFIX}/job-completion-index"
JOBS = ("batch", "jobs")
DEPLOYMENTS = ("apps", "deployments")
OF_WORKLOADS = (("", "pods"), JOBS, DEPLOYMENTS)


def owner(obj: Obj) -> Obj:
    named = {"apiVersion": obj["apiVersion"], "kind": obj["kind"], "name": obj["metadata"]["name"]}
    return {**named, "uid": obj["metadata"]["uid"], "controller": True}


class Workloads:
    """The controllers of both. `pause`: seconds before a Job's pod that has failed is replaced,
    doubling; 10 in a real cluster."""

    def __init__(self, registry: Registry, pause: float) -> None:
        self._registry, self._store, self._pause = registry, registry.store, pause
        self._pods, self._jobs = registry.kind("pods"), registry.kind(JOBS[1], JOBS[0])
        self._deployments = registry.kind(DEPLOYMENTS[1], DEPLOYMENTS[0])
        self._ends: dict[str, dict[str, Obj]] = {}
        """By job: its pods that have ended, by uid; also those that are no more."""

        self._after: dict[str, float] = {}
        """By job: when its next replacement may come."""

        self._taken: set[str] = set()
        """Pods that a controller itself has deleted: they have not failed."""

        self._dirty = True

    def see(self, change: Change) -> None:
        self._dirty |= change.key in OF_WORKLOADS
        if change.key != ("", "pods"):
            return
        ended = change.obj["status"]["phase"] in FINAL or change.type == "DELETED"
        for one in change.obj["metadata"].get("ownerReferences", ()):
            taken = change.obj["metadata"]["uid"] in self._taken
            if ended and one["kind"] == "Job" and not taken:
                self._ends.setdefault(one["uid"], {})[change.obj["metadata"]["uid"]] = change.obj

    def look(self) -> None:
        if self._dirty:
            self._dirty = False
            for job in list(self._store.all(JOBS)):
                self._job(job)
            for deployment in list(self._store.all(DEPLOYMENTS)):
                self._deployment(deployment)

    def _owned(self, obj: Obj) -> list[Obj]:
        places = sorted(self._store.owned.get(obj["metadata"]["uid"], ()))
        return [self._store.objects[key][place] for key, place in places if key == ("", "pods")]

    def _make(self, obj: Obj, stem: str, extra: Obj, spec: Obj) -> None:
        """`extra`: labels."""
        template = obj["spec"]["template"]
        meta = copy.deepcopy(template.get("metadata") or {})
        meta["labels"] = {**meta.get("labels", {}), **extra}
        meta |= {"generateName": f"{stem}-", "ownerReferences": [owner(obj)]}
        body = {"metadata": meta, "spec": {**copy.deepcopy(template["spec"]), **spec}}
        if INDEX in extra:
            meta["annotations"] = {**meta.get("annotations", {}), INDEX: extra[INDEX]}
            for one in (*body["spec"].get("initContainers", ()), *body["spec"]["containers"]):
                source = {"fieldRef": {"fieldPath": f"metadata.labels['{INDEX}']"}}
                told = {"name": "JOB_COMPLETION_INDEX", "valueFrom": source}
                one["env"] = [*one.get("env", ()), told]
        self._registry.create(self._pods, obj["metadata"]["namespace"], body)

    def _delete(self, pods: list[Obj]) -> None:
        for pod in pods:
            if "deletionTimestamp" not in pod["metadata"]:
                self._taken.add(pod["metadata"]["uid"])
                self._registry.delete(self._pods, place_of(pod), {})

    # ------------------------------------------------------------ Deployments

    def _deployment(self, obj: Obj) -> None:
        spec = obj["spec"]
        text = json.dumps(spec["template"], sort_keys=True)
        stamp = hashlib.sha256(text.encode()).hexdigest()[:9]
        pods = self._owned(obj)
        current = [one for one in pods if one["metadata"]["labels"]["pod-template-hash"] == stamp]
        self._delete([one for one in pods if one not in current])
        self._delete(current[spec["replicas"] :])
        alive = [one for one in current if one["status"]["phase"] not in FINAL]
        alive = [one for one in alive if "deletionTimestamp" not in one["metadata"]]
        for _ in range(spec["replicas"] - len(alive)):
            stem = f"{obj['metadata']['name']}-{stamp}"
            self._make(obj, stem, {"pod-template-hash": stamp}, {})
        ready = sum(one["status"]["phase"] == "Running" for one in alive)
        fits = "True" if ready >= spec["replicas"] else "False"
        status = {"replicas": len(alive), "readyReplicas": ready, "availableReplicas": ready,
                  "updatedReplicas": len(alive),
                  "observedGeneration": obj["metadata"]["generation"],
                  "conditions": [{"type": "Available", "status": fits}]}  # fmt: skip
        self._say(self._deployments, obj, status)

    def _say(self, kind: Any, obj: Obj, status: Obj) -> None:
        self._registry.edit(kind, place_of(obj), lambda one: one["status"].update(status), "status")

    # ------------------------------------------------------------ Jobs

    def _job(self, job: Obj) -> None:
        status = job["status"]
        pods = [one for one in self._owned(job) if one["status"]["phase"] not in FINAL]
        if any(one["type"] in ("Complete", "Failed") for one in status.get("conditions", ())):
            return
        ends = self._ends.get(job["metadata"]["uid"], {}).values()
        done = {_index(one) for one in ends if one["status"]["phase"] == "Succeeded"}
        failed, fate = self._judged(job, [p for p in ends if p["status"]["phase"] != "Succeeded"])
        spec = job["spec"]
        wanted = spec.get("completions", spec["parallelism"])
        done = {index for index in done if index < wanted}
        fate = fate or _success(spec, done, wanted)
        active = [one for one in pods if "deletionTimestamp" not in one["metadata"]]
        extra = (
            active if fate or spec.get("suspend") else [p for p in active if _index(p) >= wanted]
        )
        self._delete(extra)
        if not fate and not spec.get("suspend"):
            self._fill(job, pods, active, done, failed)
        told = {"active": len(active), "terminating": len(pods) - len(active), "failed": failed,
                "succeeded": len(done), "completedIndexes": ",".join(map(str, sorted(done))),
                "ready": sum(one["status"]["phase"] == "Running" for one in active)}  # fmt: skip
        told.setdefault("startTime", status.get("startTime", now()))
        if fate:
            told |= {"active": 0, "conditions": [{**fate, "lastTransitionTime": now()}]}
            told |= {"completionTime": now()} if fate["type"] == "Complete" else {}
        self._say(self._jobs, job, told)

    def _fill(
        self, job: Obj, pods: list[Obj], active: list[Obj], done: set[int], failed: int
    ) -> None:
        """Make the pods that are missing, after the pause where one has failed."""
        meta, spec = job["metadata"], job["spec"]
        gone_first = spec.get("podReplacementPolicy") == "Failed"
        taken = {_index(one) for one in (pods if gone_first else active)} | done
        missing = [i for i in range(spec.get("completions", spec["parallelism"])) if i not in taken]
        missing = missing[: spec["parallelism"] - len(active)]
        if not missing:
            return
        loop = asyncio.get_running_loop()
        if failed > self._after.get(f"{meta['uid']}/failed", 0):
            self._after[f"{meta['uid']}/failed"] = failed
            self._after[meta["uid"]] = loop.time() + self._pause * 2 ** min(failed - 1, 5)
        if (left := self._after.get(meta["uid"], 0.0) - loop.time()) > 0:
            loop.call_later(left, self._again)
            return
        labels = {"job-name": meta["name"], f"{PREFIX}/job-name": meta["name"],
                  f"{PREFIX}/controller-uid": meta["uid"]}  # fmt: skip
        for index in missing:
            stem = meta["name"]
            if spec["completionMode"] == "Indexed":
                labels[INDEX] = str(index)
                stem = f"{stem}-{index}"
                self._make(job, stem, labels, {"hostname": stem})
            else:
                self._make(job, stem, labels, {})

    def _again(self) -> None:
        self._dirty = True
        self._store.wake()

    def _judged(self, job: Obj, failed: list[Obj]) -> tuple[int, Obj | None]:
        """How many failures count, and what becomes of the job by that."""
        spec, counted = job["spec"], 0
        for pod in failed:
            action, number = _action(spec.get("podFailurePolicy") or {}, pod)
            if action == "FailJob":
                name = pod["metadata"]["name"]
                return counted + 1, {
                    "type": "Failed", "status": "True", "reason": "PodFailurePolicy",
                    "message": f"Pod {name} matching FailJob rule at index {number}",
                }  # fmt: skip
            counted += action == "Count"
        if counted > spec["backoffLimit"]:
            return counted, {"type": "Failed", "status": "True", "reason": "BackoffLimitExceeded",
                             "message": "Job has reached the specified backoff limit"}  # fmt: skip
        return counted, None


def _index(pod: Obj) -> int:
    return int(pod["metadata"].get("labels", {}).get(INDEX, 0))


def _action(policy: Obj, pod: Obj) -> tuple[str, int]:
    """Of the first rule that fits a pod that has failed, and which one that is."""
    states = pod["status"].get("containerStatuses", ())
    codes = {
        one["name"]: one["state"]["terminated"]["exitCode"]
        for one in states
        if "terminated" in one["state"]
    }
    conditions = {one["type"]: one["status"] for one in pod["status"].get("conditions", ())}
    for number, rule in enumerate(policy.get("rules", ())):
        if on := rule.get("onExitCodes"):
            tried = [code for name, code in codes.items()
                     if code and on.get("containerName", name) == name]  # fmt: skip
            fits = any((code in on["values"]) == (on["operator"] == "In") for code in tried)
        else:
            fits = any(conditions.get(one["type"]) == one.get("status", "True")
                       for one in rule.get("onPodConditions", ()))  # fmt: skip
        if fits:
            return rule["action"], number
    return "Count", -1


def _success(spec: Obj, done: set[int], wanted: int) -> Obj | None:
    for rule in (spec.get("successPolicy") or {}).get("rules", ()):
        among = done
        if indices := rule.get("succeededIndexes"):
            named: set[int] = set()
            for part in str(indices).split(","):
                first, _, last = part.partition("-")
                named |= set(range(int(first), int(last or first) + 1))
            among = done & named
            if "succeededCount" not in rule and among != named:
                continue
        if len(among) >= rule.get("succeededCount", 1):
            return {"type": "Complete", "status": "True", "reason": "SuccessPolicy"}
    if len(done) >= wanted:
        return {"type": "Complete", "status": "True", "reason": "CompletionsReached"}
    return None
