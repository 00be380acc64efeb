"""--master-store: from words to a configuration."""

from __future__ import annotations

import pytest

from elasticrun.cli.flags import get_args_parser
from elasticrun.cli.resolve import resolve
from elasticrun.cli.settings import UsageError
from elasticrun.cli.verbs.dry_run import describe
from elasticrun.config import Place
from tests.cli.test_resolve import machine, made, notes

STORE = "--master-store=etcd://h1:2379,h2:2379"


def test_nodes_meet_by_way_of_etcd() -> None:
    config = made(f"{STORE} --rdzv-id=j --nnodes=1:4")
    assert config.launch.master.store == "etcd://h1:2379,h2:2379"
    assert config.place == Place("etcd", "h1", 0)
    spec = config.launch.spec
    assert (config.identity.job_id, spec.min_nodes, spec.max_nodes) == ("j", 1, 4)
    assert config.launch.node_rank == -1


def test_of_an_endpoint_only_the_port_counts() -> None:
    config = made(f"{STORE} --rdzv-id=j --nnodes=2 --rdzv-endpoint=h9:29999 --rdzv-backend=c10d")
    assert config.place == Place("etcd", "h1", 29999)
    assert "only the port counts" in notes(config)
    assert made(f"{STORE} --rdzv-id=j --rdzv-endpoint=h9").place.port == 0


@pytest.mark.parametrize("word", ["etcd", "etcd-v2"])
def test_torchruns_words_for_it(word: str) -> None:
    config = made(f"--rdzv-backend={word} --rdzv-endpoint=e0:2379 --rdzv-id=j --nnodes=1:4")
    assert config.place == Place("etcd", "e0", 0)
    assert (config.launch.master.store, config.identity.job_id) == ("etcd://e0:2379", "j")
    said = (
        f"--rdzv-backend={word} --rdzv-endpoint=e0:2379: treated as --master-store=etcd://e0:2379"
    )
    assert said in config.notes
    secure = "--rdzv-conf=protocol=https,join_timeout=7"
    config = made(f"--rdzv-backend={word} --rdzv-endpoint=e0,e1:7 --rdzv-id=j --nnodes=2 {secure}")
    assert config.launch.master.store == "etcds://e0,e1:7"
    assert "has no effect" not in notes(config)


def test_variables_say_it_too() -> None:
    environ = {"ELASTICRUN_MASTER_STORE": "etcd://h1", "PET_RDZV_ID": "j"}
    config = made("--nnodes=1:2", environ)
    assert config.place.kind == "etcd"
    assert config.identity.job_id == "j"


def test_it_is_stronger_than_dlrovers_variable() -> None:
    environ = {"DLROVER_MASTER_ADDR": "h3:1"}
    assert made(f"{STORE} --rdzv-id=j --nnodes=2", environ).place.kind == "etcd"


def test_a_dry_run_names_the_place() -> None:
    words = [STORE, "--rdzv-id=j", "--nnodes=1:2", "s.py"]
    ns = get_args_parser({}).parse_args(words)
    said = describe(resolve(ns, {}, machine()), ns, {})
    assert "job master            on a node that the nodes elect through etcd://h1:2379" in said


def test_whoever_talks_to_all_the_network_is_told_so() -> None:
    assert "no token" in notes(made(f"{STORE} --rdzv-id=j --nnodes=2"))
    here = made("--master-store=etcd://localhost --rdzv-id=j --nnodes=2")
    assert "no token" not in notes(here)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (STORE, "--master-store needs --rdzv-id=NAME"),
        (f"{STORE} --rdzv-id=j --standalone", "cannot be combined with --standalone"),
        (f"{STORE} --rdzv-id=j --rdzv-backend=static", "excludes --rdzv-backend=static"),
        ("--master-store=h1:2379 --rdzv-id=j", "is not an etcd address: write etcd://HOST:PORT"),
        ("--master-store=etcd://a:b@h1 --rdzv-id=j", "name and password"),
    ],
)
def test_what_does_not_go_together_is_one_sentence(words: str, sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence):
        made(words)
