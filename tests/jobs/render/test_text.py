"""Documents as text: every reader of YAML reads what was meant."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings, strategies as st

from elasticrun.jobs.render.text import as_json, as_yaml
from tests.further import examples

TRAPS = (
    "", "y", "N", "yes", "No", "on", "OFF", "true", "null", "~", "1e3", "12e45", "0o17", "017",
    "0x1f", "1_000", "1:30", "2026-11-22", ".inf", "-", "- a", "? a", "a: b", "a #b", "#a", "&a",
    "*a", "!a", "|", ">", "%a", "@a", "`a", "'", '"', "\\", "a\nb", "a\n", "\ta", " a ", "{a}",
    "[a]", "<<", "=", "é", "\x85", "\u2028", "\ufeff", "\x00", "\x7f", "😀", "---",
    "...", "x" * 500, "/dev",
)  # fmt: skip

TEXTS = st.text(st.characters(exclude_categories=("Cs",)), max_size=30) | st.sampled_from(TRAPS)
KEYS = TEXTS.filter(lambda text: len(text) < 100)  # YAML's own limit for a key is 1024
VALUES = st.recursive(
    TEXTS | st.integers(-(2**31), 2**31) | st.booleans(),
    lambda inner: (
        st.lists(inner.filter(lambda one: not isinstance(one, list)), max_size=4)
        | st.dictionaries(KEYS, inner, max_size=4)
    ),
    max_leaves=20,
)


@pytest.mark.slow
@settings(max_examples=examples(40), deadline=None)
@given(st.lists(st.dictionaries(KEYS, VALUES, min_size=1, max_size=4), min_size=1, max_size=3))
def test_what_is_written_is_read_back(documents: list[dict[str, Any]]) -> None:
    assert list(yaml.safe_load_all(as_yaml(documents))) == documents
    assert json.loads(as_json(documents))["items"] == documents


@pytest.mark.parametrize("text", ["y", "N", "1e3", "12e45", "0o17", "017", "1_000", "~", "off"])
def test_what_only_some_readers_take_for_no_text_is_quoted(text: str) -> None:
    assert as_yaml([{"a": text}]) == f'a: "{text}"\n'


def test_an_object_without_a_place_is_refused() -> None:
    with pytest.raises(TypeError, match="float has no place"):
        as_yaml([{"a": 1.5}])


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not installed")
def test_kubectl_reads_it_as_well(tmp_path: Path) -> None:
    """Go's reader, which Kubernetes uses, is not Python's."""
    data = {f"k{number}": text for number, text in enumerate(TRAPS) if "\x00" not in text}
    config_map = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "t"}, "data": data}
    file = tmp_path / "t.yaml"
    file.write_text(as_yaml([config_map]), encoding="utf-8")
    words = [
        "kubectl",
        "label",
        "--local",
        "--dry-run=client",
        "-o",
        "json",
        "-f",
        str(file),
        "a=b",
    ]
    done = subprocess.run(words, capture_output=True, check=True, timeout=240)
    assert json.loads(done.stdout)["data"] == data
