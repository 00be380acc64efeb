"""Writes the resource ElasticJob into the Helm chart: python scripts/gen_chart.py"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from elasticrun.jobs.operator.crd import crd
from elasticrun.jobs.render import text

TEMPLATE: Final = (
    Path(__file__).resolve().parent.parent / "charts/elasticrun-operator/templates/crd.yaml"
)
KEEP: Final = {"helm.sh/resource-policy": "keep"}
"""Uninstalling the chart would otherwise delete all jobs."""


def template() -> str:
    """The whole template. No text of the resource has braces that Helm would read."""
    made: dict[str, Any] = crd()
    made = made | {"metadata": made["metadata"] | {"annotations": KEEP}}
    body = text.as_yaml([made])
    assert "{{" not in body
    return "{{- if .Values.crd }}\n" + body + "{{- end }}\n"


if __name__ == "__main__":
    TEMPLATE.write_text(template(), encoding="utf-8")
