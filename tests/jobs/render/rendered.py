"""Running the verb in this process, and holding what it prints against the schemas."""

from __future__ import annotations

import contextlib
import functools
import io
import re
from typing import Any, NamedTuple

import jsonschema
import yaml
from kubernetes_validate import utils as schemas
from referencing import Registry, Resource

from elasticrun.jobs.verbs.render import main
from tests.jobs.render import crds

VERSIONS = ("1.31", "1.34", "1.36", "1.37")
DNS = re.compile(r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?")


class Printed(NamedTuple):
    """What came of a command line."""

    out: str
    notes: list[str]

    @property
    def documents(self) -> list[dict[str, Any]]:
        """The documents, read by a YAML reader that is not ours."""
        return list(yaml.safe_load_all(self.out))

    def one(self, kind: str) -> dict[str, Any]:
        (found,) = (one for one in self.documents if one["kind"] == kind)
        return found

    @property
    def container(self) -> dict[str, Any]:
        (found,) = self.job["template"]["spec"]["containers"]
        return found

    @property
    def job(self) -> dict[str, Any]:
        """The spec of the Job, or of the JobSet's."""
        for one in self.documents:
            if one["kind"] == "Job":
                return one["spec"]
            if one["kind"] == "JobSet":
                return one["spec"]["replicatedJobs"][0]["template"]["spec"]
        raise AssertionError("no job")


def render(*words: str) -> Printed:
    notes: list[str] = []
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        assert main(words, notes.append) == 0
    return Printed(out.getvalue(), notes)


@functools.cache
def _validator(kind: str, api_version: str, version: str) -> jsonschema.Draft202012Validator:
    folder = f"kubernetes-json-schema/v{version}.0-local-strict"
    group = re.sub(r"^([^./]*)(?:\.[^/]*)?/", r"\1-", api_version)
    schema = schemas.schema_contents(f"{folder}/{kind.lower()}-{group}.json", version)
    shared = schemas.schema_contents(f"{folder}/_definitions.json", version)
    registry: Registry[Any] = Resource.from_contents(schema) @ Registry()
    registry = Resource.from_contents(shared) @ registry
    return jsonschema.Draft202012Validator(schema, registry=registry)


def check(documents: list[dict[str, Any]], version: str) -> None:
    """Raise unless every document is one that a cluster of this version would take."""
    for one in documents:
        schema = crds.SCHEMAS.get((one["apiVersion"], one["kind"]))
        if schema is None:
            _validator(one["kind"], one["apiVersion"], version).validate(one)
        else:
            jsonschema.validate(one, schema)
        if one["kind"] == "JobSet":
            (child,) = one["spec"]["replicatedJobs"]
            name = f"{one['metadata']['name']}-{child['name']}-0"
            job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": name},
                   "spec": child["template"]["spec"]}  # fmt: skip
            _validator("Job", "batch/v1", version).validate(job)
            _rules(job)
            last = child["template"]["spec"]["completions"] - 1
            assert DNS.fullmatch(f"{name}-{last}-abcde"), "a JobSet's webhook counts pods' names"
            assert DNS.fullmatch(one["spec"]["network"]["subdomain"])
        elif one["kind"] == "Job":
            _rules(one)


def _rules(job: dict[str, Any]) -> None:
    """What an API server refuses and no schema says."""
    spec, pod = job["spec"], job["spec"]["template"]["spec"]
    name = job["metadata"]["name"]
    assert spec["completions"] == spec["parallelism"], "or a resize is refused"
    assert DNS.fullmatch(f"{name}-{spec['completions'] - 1}"), "host names of pods"
    assert pod["restartPolicy"] == "Never", "what a podFailurePolicy needs"
    assert spec["podReplacementPolicy"] == "Failed", "what a podFailurePolicy needs"
    containers = {one["name"] for one in pod["containers"]}
    for rule in spec["podFailurePolicy"]["rules"]:
        on_codes = rule.get("onExitCodes")
        if on_codes:
            assert on_codes["containerName"] in containers
            assert on_codes["values"] == sorted(set(on_codes["values"]))
            assert 0 not in on_codes["values"]
    for rule in spec.get("successPolicy", {"rules": []})["rules"]:
        assert 1 <= rule["succeededCount"] <= spec["completions"]
    volumes = [one["name"] for one in pod["volumes"]]
    assert len(set(volumes)) == len(volumes)
    for one in pod["volumes"]:
        assert len(one) == 2, "a name and one source"
    for container in pod["containers"]:
        mounts = container["volumeMounts"]
        assert {mount["name"] for mount in mounts} == set(volumes)
        assert len({mount["mountPath"] for mount in mounts}) == len(mounts)
        env = [one["name"] for one in container.get("env", ())]
        assert len(set(env)) == len(env)


def expanded(words: list[str], values: dict[str, str]) -> list[str]:
    """The words as a kubelet hands them to a container whose variables are `values`."""

    def expand(word: str) -> str:
        return re.sub(
            r"\$(\$|\(([^)]*)\))",
            lambda found: "$" if found[1] == "$" else values.get(found[2], found[0]),
            word,
        )

    return [expand(word) for word in words]
