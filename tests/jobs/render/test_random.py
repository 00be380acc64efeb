"""Random wishes: what is printed is always valid, and always says what was wished."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from elasticrun.cli.flags import get_args_parser
from tests.further import examples
from tests.jobs.render.rendered import check, expanded, render

NAMES = st.from_regex(r"[a-z]([-a-z0-9]{0,20}[a-z0-9])?", fullmatch=True)
KEYS = st.from_regex(
    r"([a-z]{1,8}\.io/)?[A-Za-z0-9]([-A-Za-z0-9_.]{0,20}[A-Za-z0-9])?", fullmatch=True
)
LABELS = st.from_regex(r"([A-Za-z0-9]([-A-Za-z0-9_.]{0,20}[A-Za-z0-9])?)?", fullmatch=True)
VARIABLES = st.from_regex(r"[B-Z][A-Z0-9_]{0,10}", fullmatch=True)
TEXTS = st.text(st.characters(exclude_categories=("Cs",), exclude_characters="\0"), max_size=20)
VERSIONS = st.sampled_from(("1.29", "1.31", "1.34", "1.36", "1.37"))
POD = {"HOME": "oops", "JOB_COMPLETION_INDEX": "1", "ELASTICRUN_JOB_UID": "u"}
SOURCES = ("pvc:c", "csi:d.io,a=b,,c", "host:/x", "empty:1Gi", "secret:s", "configmap:m")


@st.composite
def wishes(draw: st.DrawFn) -> tuple[list[str], str, dict[str, str], list[str]]:
    """Words of the verb, the version they are for, variables, and the program."""
    version = draw(VERSIONS)
    low, more = draw(st.integers(1, 50)), draw(st.integers(0, 60))
    words = [
        "--name",
        draw(NAMES),
        "--image",
        draw(st.sampled_from(("a/b:1", "r:5/x@sha256:" + "1" * 64))),
    ]
    words += [f"--nnodes={low}:{low + more}", f"--k8s-version={version}"]
    words += [f"--pods={draw(st.integers(low, low + more + 3))}"] if draw(st.booleans()) else []
    words += [f"--nproc-per-node={draw(st.integers(1, 16))}"]
    gangs = ["none", "volcano", "coscheduling", "kueue", "koordinator"] + ["native"] * (
        version >= "1.36"
    )
    gang = draw(st.sampled_from(gangs))
    words += ["--gang", gang] + (["--queue", draw(NAMES)] if gang in ("kueue", "volcano") else [])
    for flag in ("--rbac", "--suspend", "--host-network", "--save-at-breakpoint"):
        words += [flag] if draw(st.booleans()) else []
    numbers = st.integers(0, 10**6)
    for flag, values in (
        ("--gpus", st.integers(0, 16)), ("--ttl", numbers), ("--grace", st.integers(0, 999)),
        ("--deadline", numbers), ("--cpu", st.sampled_from(("8", "500m", "2.5"))),
        ("--memory", st.sampled_from(("9Gi", "1T"))), ("--rdma", st.just("rdma/hca")),
        ("--service-account", NAMES), ("--priority", NAMES), ("--token-secret", NAMES),
        ("--namespace", NAMES), ("--max-restarts", st.integers(0, 99)),
        ("--working-dir", st.just("/w")),
    ):  # fmt: skip
        words += [f"{flag}={draw(values)}"] if draw(st.booleans()) else []
    env = draw(st.dictionaries(VARIABLES, TEXTS, max_size=3))
    words += [f"--env={key}={value}" for key, value in env.items()]
    for flag, values in (("--label", LABELS), ("--annotation", TEXTS), ("--selector", LABELS)):
        found: dict[str, str] = draw(st.dictionaries(KEYS, values, max_size=2))
        words += [f"{flag}={key}={value}" for key, value in found.items()]
    sources = draw(st.lists(st.sampled_from(SOURCES), max_size=3))
    words += [f"--volume=v{n}={source}:/m{n}" for n, source in enumerate(sources)]
    words += [f"--toleration={draw(st.sampled_from(('a', 'a=b', 'a:NoExecute', 'a=:NoSchedule')))}"]
    return words, version, env, ["train.py", *draw(st.lists(TEXTS, max_size=4))]


@pytest.mark.slow
@settings(max_examples=examples(10), deadline=None)
@given(wishes(), st.sampled_from(("k8s", "jobset")))
def test_any_wish_is_a_valid_manifest(
    wish: tuple[list[str], str, dict[str, str], list[str]], target: str
) -> None:
    words, version, env, program = wish
    printed = render(target, *words, "--", *program)
    documents: list[dict[str, Any]] = printed.documents
    check(documents, version)
    again = render(target, "-o", "json", *words, "--", *program)
    assert json.loads(again.out)["items"] == documents
    ns = get_args_parser({}).parse_args(expanded(printed.container["args"], POD))
    assert [ns.training_script, *ns.training_script_args] == program
    got = {one["name"]: one["value"] for one in printed.container.get("env", ()) if "value" in one}
    assert got.pop("ELASTICRUN_LAST_WORDS") == printed.container["terminationMessagePath"]
    assert dict(zip(got, expanded(list(got.values()), POD), strict=True)) == env
