"""Whose word a value is: detection's, a flag's, a variable's, another maker's, or nobody's."""

from __future__ import annotations

from argparse import Namespace

import pytest

from elasticrun.cli.flags import get_args_parser
from elasticrun.cli.settings import Asked, Filled

VARIABLE = {"PET_NNODES": "3"}


def asked(*words: str, environ: dict[str, str] | None = None, filled: str = "") -> Asked:
    environ = environ or {}
    namespace = get_args_parser(environ).parse_args([*words, "s.py"])
    found = {"nnodes": Filled(filled, "$SLURM_JOB_NUM_NODES")} if filled else {}
    return Asked(namespace, environ, found)


@pytest.mark.parametrize(
    ("given", "value", "source"),
    [
        (asked(), "1:1", "default"),
        (asked("--nnodes=2"), "2", "--nnodes"),
        (asked(environ=VARIABLE), "3", "$PET_NNODES"),
        (asked("--nnodes=2", environ=VARIABLE), "2", "--nnodes"),
        (asked(filled="5"), "5", "$SLURM_JOB_NUM_NODES"),
        (asked(environ=VARIABLE, filled="5"), "5", "$SLURM_JOB_NUM_NODES"),
        (Asked(Namespace(nnodes="7"), {}), "7", "the caller"),
        (Asked(Namespace(), {}), "1:1", "default"),
    ],
)
def test_a_value_and_whose_it_is(given: Asked, value: str, source: str) -> None:
    assert (given.text("nnodes"), given.source("nnodes")) == (value, source)
    assert given.explicitly("nnodes") is (source != "default")


@pytest.mark.parametrize(
    ("namespace", "on", "source"),
    [
        (Namespace(), False, "default"),
        (Namespace(standalone=False), False, "default"),
        (Namespace(standalone=True), True, "the caller"),
    ],
)
def test_a_switch_of_another_maker(namespace: Namespace, on: bool, source: str) -> None:
    given = Asked(namespace, {})
    assert (given.switch("standalone"), given.source("standalone")) == (on, source)
