"""The Helm chart of the operator installs what `elasticrun render operator` prints. It is rendered
by Helm itself, as a library (`pip install -e '.[release]'`)."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import yaml

from elasticrun.jobs.operator.deployment import Installation, documents
from tests import needs

ROOT = Path(__file__).resolve().parents[3]
CHART = ROOT / "charts/elasticrun-operator"
IMAGE = "registry.example/train:1.0"


def _helm() -> Any:
    """Helm 4: a library of 85 MB."""
    needs.packages("helm_python")
    import helm_python.chart

    return helm_python.chart


def rendered(namespace: str = "team", **values: Any) -> list[dict[str, Any]]:
    with _helm().Chart.load(CHART) as chart:
        files = chart.render(values, name="release", namespace=namespace)
    texts = [text for name, text in files.items() if not name.endswith("NOTES.txt")]
    return [one for text in texts for one in yaml.safe_load_all(text) if one]


def by_name(objects: list[dict[str, Any]]) -> dict[tuple[str, str], dict[str, Any]]:
    return {(one["kind"], one["metadata"]["name"]): one for one in objects}


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("namespaced", [False, True])
def test_the_chart_is_what_render_operator_prints(replicas: int, namespaced: bool) -> None:
    home = "team" if namespaced else "elasticrun"
    printed = by_name(documents(Installation("team" if namespaced else "", IMAGE, replicas)))
    printed.pop(("Namespace", home), None)  # Helm's own: --create-namespace
    found = by_name(rendered(home, image=IMAGE, replicas=replicas, namespaced=namespaced))
    crd = found["CustomResourceDefinition", "elasticjobs.elasticrun.dev"]
    assert crd["metadata"].pop("annotations") == {"helm.sh/resource-policy": "keep"}
    assert found == printed


def test_values_for_scheduling_reach_the_pod() -> None:
    more = {
        "imagePullSecrets": [{"name": "registry"}],
        "nodeSelector": {"pool": "system"},
        "tolerations": [{"key": "a", "operator": "Exists"}],
    }
    found = by_name(rendered(image=IMAGE, crd=False, **more))
    pod = found["Deployment", "elasticrun-operator"]["spec"]["template"]["spec"]
    assert {name: pod[name] for name in more} == more
    assert not [kind for kind, _ in found if kind == "CustomResourceDefinition"]


@pytest.mark.parametrize(
    ("values", "why"),
    [
        ({}, "image: name an image"),
        ({"image": IMAGE, "replicas": 3}, "replicas"),
        ({"image": IMAGE, "namespaces": ["team"]}, "namespaces"),
    ],
)
def test_wrong_values_are_refused(values: dict[str, Any], why: str) -> None:
    with pytest.raises(Exception, match=why):
        rendered(**values)


def test_helm_has_nothing_to_complain_about() -> None:
    found = _helm().lint(CHART, {"image": IMAGE}, strict=True)
    assert found["errors"] == []
    assert [one["error"] for one in found["messages"]] == ["icon is recommended"]


def test_the_chart_has_the_resource_as_it_is() -> None:
    """Without Helm: `python scripts/gen_chart.py` writes it anew."""
    at = ROOT / "scripts/gen_chart.py"
    spec = importlib.util.spec_from_file_location("gen_chart", at)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.TEMPLATE.read_text() == module.template()
