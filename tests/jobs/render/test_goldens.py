"""What is printed, whole; and that clusters of current versions would take it.

ELASTICRUN_REWRITE_GOLDENS=1 writes the files anew: read the difference before it is committed.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import kubernetes_validate
import pytest
import yaml

from tests.jobs.render.cases import CASES
from tests.jobs.render.rendered import VERSIONS, check, render

GOLDENS = Path(__file__).parent / "goldens"
MANIFESTS = [name for name in CASES if not name.endswith(".sh")]


@pytest.mark.parametrize("name", CASES)
def test_what_is_printed(name: str) -> None:
    file = GOLDENS / name
    out = render(*CASES[name]).out
    if os.environ.get("ELASTICRUN_REWRITE_GOLDENS") == "1":
        file.write_text(out, encoding="utf-8")
    assert out == file.read_text(encoding="utf-8")


def test_no_golden_is_left_over() -> None:
    assert {file.name for file in GOLDENS.iterdir()} == set(CASES)


@pytest.mark.slow
@pytest.mark.parametrize("name", MANIFESTS)
def test_current_clusters_would_take_it(name: str) -> None:
    printed = render(*CASES[name])
    documents = printed.documents
    if name.endswith(".json"):
        documents = documents[0]["items"]
    native = "native" in name
    old = "1.29" if "old" in name else ""
    for version in (old, *VERSIONS):
        if version and (not native or version >= "1.37"):
            check(documents, version)


@pytest.mark.parametrize("name", ["k8s_full.yaml", "k8s_native.yaml", "k8s_kueue.yaml"])
def test_the_validator_by_itself_agrees(name: str) -> None:
    """Strictly: it refuses a field that it does not know."""
    for one in render(*CASES[name]).documents:
        if "volcano" not in one["apiVersion"]:
            assert kubernetes_validate.validate(one, "1.37", strict=True) == "1.37"
    job = render(*CASES[name]).one("Job")
    job["spec"]["backofLimit"] = 3
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(job, "1.37", strict=True)


def test_json_and_yaml_say_the_same() -> None:
    both = (render(*CASES["k8s_full.yaml"]).documents, render(*CASES["k8s_full.json"]).out)
    assert json.loads(both[1]) == {"apiVersion": "v1", "kind": "List", "items": both[0]}


def test_a_misspelt_field_of_a_crd_is_seen() -> None:
    documents = list(yaml.safe_load_all((GOLDENS / "jobset.yaml").read_text()))
    documents[-1]["spec"]["network"]["publishNotReady"] = True
    with pytest.raises(Exception, match="publishNotReady"):
        check(documents, "1.37")
