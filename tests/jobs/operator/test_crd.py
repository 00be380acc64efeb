"""The object ElasticJob: what a server refuses of it, and that nothing can be written in vain."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import jsonschema
import msgspec
import pytest

from elasticrun.jobs.operator import crd, objects, plan

ONE = {"name": "train", "image": "i"}
TEMPLATE = {"spec": {"containers": [ONE]}}
SCHEMA = crd.crd()["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]


def strict(schema: Any) -> Any:
    """As a server reads it that is asked to refuse unknown fields."""
    if isinstance(schema, list):
        return [strict(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    found = {key: strict(value) for key, value in schema.items()}
    if "properties" in found and "x-kubernetes-preserve-unknown-fields" not in found:
        found["additionalProperties"] = False
    return found


REFUSED = [
    ({"nodess": 2}, "nodess"),
    ({"nodes": 0}, "minimum"),
    ({"nodes": "two"}, "not of type"),
    ({"runPolicy": {"cleanPodPolicy": "Never"}}, "not one of"),
    ({"runPolicy": {"backofLimit": 3}}, "backofLimit"),
    ({"successPolicy": "Rank1"}, "not one of"),
    ({"gang": {}}, "'scheduler' is a required property"),
    ({"gang": {"scheduler": "slurm"}}, "not one of"),
    ({"template": {"spec": {"containers": []}}}, "non-empty"),
    ({"template": {"spec": {"containers": [{"name": "train"}]}}}, "'image' is a required"),
    ({"template": {"spec": {"containers": [{**ONE, "env": [{"value": "x"}]}]}}}, "'name' is a"),
    ({"template": {"spec": {"containers": [{**ONE, "volumeMounts": {}}]}}}, "not of type"),
    ({"template": {"spec": {"containers": [ONE], "affinity": []}}}, "not of type"),
    ({"template": {"metadata": {"labels": {"a": 1}}, "spec": {"containers": [ONE]}}}, "not of"),
    ({"status": {}}, "status"),
]


@pytest.mark.parametrize(("spec", "why"), REFUSED, ids=lambda value: str(value)[:40])
def test_what_is_wrong_is_refused(spec: dict[str, Any], why: str) -> None:
    with pytest.raises(jsonschema.ValidationError, match=why):
        jsonschema.validate({"template": TEMPLATE, **spec}, strict(SCHEMA))


def test_ten_lines_are_enough() -> None:
    jsonschema.validate({"template": TEMPLATE}, strict(SCHEMA))
    spec = msgspec.convert({"template": TEMPLATE}, crd.ElasticSpec)
    assert (spec.nodes, spec.least, spec.run_policy.pending_timeout_seconds) == (1, 1, 900)


def test_no_field_is_without_effect() -> None:
    """Each is read where things are decided or made."""
    read: set[str] = set()
    for module in (plan, objects, crd):
        tree = ast.parse(Path(str(module.__file__)).read_text())
        read |= {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    for struct in (crd.ElasticSpec, crd.RunPolicy, crd.GangSpec, crd.MasterSpec):
        assert set(struct.__struct_fields__) <= read


def test_the_whole_of_it_is_small() -> None:
    """A client may write it into an annotation, which holds 262,144 bytes."""
    assert len(msgspec.json.encode(crd.crd())) < 8_000
