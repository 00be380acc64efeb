"""What a rank is given. The comparison with a real torchrun is in tests/compat."""

from __future__ import annotations

import pytest

from elasticrun.agent.workers.ranks import BadEnvironment, rank_entry, rank_environment
from elasticrun.config import Rendezvous
from elasticrun.wire.env import RANK_VARIABLES
from elasticrun.wire.types import Endpoint, Entry, EntryKind
from tests.agent.configs import agent_config, start


def test_every_variable_of_the_table() -> None:
    made = rank_environment(
        agent_config(), start(), 1, {}, {"TORCHELASTIC_ERROR_FILE": "/logs/error.json"}
    )
    assert made == {
        "RANK": "3",
        "LOCAL_RANK": "1",
        "GROUP_RANK": "1",
        "ROLE_RANK": "3",
        "ROLE_NAME": "default",
        "WORLD_SIZE": "6",
        "LOCAL_WORLD_SIZE": "2",
        "GROUP_WORLD_SIZE": "3",
        "ROLE_WORLD_SIZE": "6",
        "MASTER_ADDR": "10.0.0.7",
        "MASTER_PORT": "4711",
        "TORCHELASTIC_RESTART_COUNT": "2",
        "TORCHELASTIC_MAX_RESTARTS": "3",
        "TORCHELASTIC_RUN_ID": "the-job",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_ERROR_FILE": "/logs/error.json",
        "TORCHELASTIC_SIGNALS_TO_HANDLE": "SIGTERM,SIGINT,SIGHUP,SIGQUIT",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
    }


def test_nothing_that_says_which_rank_this_is_is_inherited() -> None:
    """Operators of Kubernetes use RANK, WORLD_SIZE and MASTER_ADDR for nodes."""
    operators = dict.fromkeys(RANK_VARIABLES, "the operator's")
    made = operators | rank_environment(agent_config(), start(), 1, operators, {})
    assert "the operator's" not in made.values()


def test_what_the_user_has_set_stands() -> None:
    environ = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "3", "OMP_NUM_THREADS": "8"}
    made = rank_environment(agent_config(), start(), 0, environ, {})
    assert made["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "3"
    assert "OMP_NUM_THREADS" not in made  # inherited


def test_omp_is_one_where_the_command_line_decided_so() -> None:
    made = rank_environment(agent_config(set_omp_threads=True), start(), 0, {}, {})
    assert made["OMP_NUM_THREADS"] == "1"


def test_a_static_job_sees_the_port_that_was_named() -> None:
    config = agent_config(rendezvous=Rendezvous("static", "head", 29612), node_rank=1)
    made = rank_environment(config, start(store=Endpoint("10.0.0.9", 40000)), 0, {}, {})
    assert (made["MASTER_ADDR"], made["MASTER_PORT"]) == ("head", "29612")


@pytest.mark.parametrize(
    ("visible", "device"), [(None, "1"), ("4, 5", "5"), ("GPU-a,GPU-b", "GPU-b")]
)
def test_virtual_local_rank(visible: str | None, device: str) -> None:
    environ = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    made = rank_environment(agent_config(virtual_local_rank=True), start(), 1, environ, {})
    assert (made["LOCAL_RANK"], made["CUDA_VISIBLE_DEVICES"]) == ("0", device)
    assert made["RANK"] == "3"


def test_virtual_local_rank_without_a_device_is_a_sentence() -> None:
    config = agent_config(virtual_local_rank=True)
    with pytest.raises(BadEnvironment, match="local rank 1 has no device"):
        rank_environment(config, start(), 1, {"CUDA_VISIBLE_DEVICES": "3"}, {})


def test_local_rank_in_arguments() -> None:
    entry = Entry(EntryKind.SCRIPT, "t${local_rank}.py", ("--d=${local_rank}", "$HOME", "$$", "$"))
    made = rank_entry(entry, 5)
    assert (made.target, made.args) == ("t5.py", ("--d=5", "$HOME", "$", "$"))


def test_a_command_is_taken_as_it_is() -> None:
    made = rank_entry(Entry(EntryKind.COMMAND, "./${local_rank}", ("${local_rank}",)), 2)
    assert (made.target, made.args) == ("./${local_rank}", ("2",))
