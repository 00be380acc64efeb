"""LaunchConfig and what becomes of it, against torch's; exceptions with and without torch."""

from __future__ import annotations

import dataclasses
import pickle
import signal
import sys
from typing import Any

import pytest
from msgspec import structs
from torch.distributed.launcher.api import LaunchConfig as TorchConfig

from elasticrun import errors
from elasticrun.cli.resolve import Resolved
from elasticrun.config import CalledLaunch, Caller, LogPlan
from elasticrun.core.events import Exit
from elasticrun.launcher import LaunchConfig, elastic_launch, entry_of, raise_for, resolve_config
from elasticrun.wire.messages import Failure, FailureKind
from elasticrun.wire.types import EntryKind, dumps, loads
from tests.api import functions
from tests.harness import program


def one_node(**more: Any) -> LaunchConfig:
    return LaunchConfig(**({"min_nodes": 1, "max_nodes": 1, "nproc_per_node": 2} | more))


def test_fields_and_defaults_are_torchs() -> None:
    def table(cls: Any) -> dict[str, Any]:
        made = {}
        for field in dataclasses.fields(cls):
            factory = field.default_factory
            made[field.name] = field.default if factory is dataclasses.MISSING else factory()
        return made

    ours, theirs = table(LaunchConfig), table(TorchConfig)
    assert list(ours.items())[: len(theirs)] == list(theirs.items())


def test_what_post_init_makes_of_them_is_torchs(monkeypatch) -> None:
    monkeypatch.setenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "7")
    for more in ({}, {"rdzv_timeout": 5}, {"rdzv_configs": {"timeout": 3}}):
        words = {"min_nodes": 1, "max_nodes": 2, "nproc_per_node": 3}
        ours = LaunchConfig(**words, **{k: dict(v) if k == "rdzv_configs" else v
                                        for k, v in more.items()})  # fmt: skip
        theirs = TorchConfig(**words, **more)
        assert ours.rdzv_configs == theirs.rdzv_configs
        assert ours.shutdown_timeout == theirs.shutdown_timeout == 7
    with pytest.raises(ValueError, match="negative"):
        one_node(shutdown_timeout=-1)


def test_unknown_fields_are_ignored_and_named(caplog) -> None:
    with caplog.at_level("WARNING", logger="elasticrun"):
        config = one_node(of_torch_3="x")
    assert config.nproc_per_node == 2
    assert "LaunchConfig: of_torch_3 has no effect here" in caplog.text
    assert dataclasses.replace(config, role="r").role == "r"


def configured(**more: Any) -> Resolved:
    return resolve_config(one_node(**more), functions.echo, [])


def test_the_default_backend_on_one_node_needs_no_endpoint() -> None:
    found = configured(run_id="me")
    assert found.place.kind == "standalone"
    assert found.identity.job_id == "me"
    assert found.launch.spec.max_restarts == 3
    assert found.launch.role == "default_role"
    assert found.notes == ()


def test_more_nodes_need_one() -> None:
    with pytest.raises(ValueError, match="rdzv_endpoint='HOST:PORT'"):
        configured(max_nodes=2)
    config = configured(max_nodes=2, rdzv_endpoint="there:1234", rdzv_backend="c10d")
    place = config.place
    assert (place.kind, place.host, place.port) == ("elastic", "there", 1234)


def test_an_etcd_is_an_etcd() -> None:
    found = configured(max_nodes=2, rdzv_endpoint="e0:2379", rdzv_backend="etcd-v2", run_id="j")
    assert (found.place.kind, found.launch.master.store) == ("etcd", "etcd://e0:2379")


def test_static() -> None:
    where = {"rdzv_backend": "static", "rdzv_endpoint": "a:5", "rdzv_configs": {"rank": 1}}
    found = configured(min_nodes=2, max_nodes=2, **where)
    assert (found.place.kind, found.place.port, found.launch.node_rank) == ("static", 5, 1)
    assert found.launch.spec.join_timeout == 900.0


def test_a_logs_specs_of_the_callers_own_is_refused_in_a_sentence() -> None:
    class Mine:
        pass

    with pytest.raises(ValueError, match=r"logs_specs is a Mine: register .* torchrun.logs_specs"):
        configured(logs_specs=Mine())


@pytest.mark.parametrize(
    ("entry", "args", "kind", "target", "rest"),
    [
        (sys.executable, ["-u", "a.py", "-x"], EntryKind.SCRIPT, "a.py", ("-x",)),
        (sys.executable, ["a.py"], EntryKind.SCRIPT, "a.py", ()),
        (sys.executable, ["-u", "-m", "a.b", 1], EntryKind.MODULE, "a.b", ("1",)),
        (sys.executable, ["-c", "pass"], EntryKind.COMMAND, sys.executable, ("-c", "pass")),
        ("bash", ["-c", "true"], EntryKind.COMMAND, "bash", ("-c", "true")),
        (functions.echo, [1], EntryKind.FUNCTION, "echo", ()),
    ],
)
def test_entry_points(entry: Any, args: list[Any], kind: Any, target: str, rest: Any) -> None:
    found = entry_of(entry, args)
    assert (found.kind, found.target, found.args) == (kind, target, rest)


def test_a_configuration_survives_its_journey() -> None:
    plan = LogPlan(
        log_dir=None, redirects={3: 1}, local_ranks_filter=(1, 2), stdout_filters=("a,b",)
    )
    made = resolve_config(one_node(start_method="fork"), sys.executable, ["-u", "s.py"])
    launch = dataclasses.replace(made.launch, logs=plan, local_addr=None)
    called = CalledLaunch(launch, made.place, made.identity, Caller((3, 4), {"A": "ü"}))
    assert loads(dumps(called), CalledLaunch) == called
    outcome = Exit(1, "why", (BOOM,), 15)
    assert loads(dumps(outcome), Exit) == outcome


@pytest.mark.parametrize(
    "text", ["", "[]", "null", '{"code": 1}', '{"code": "1", "reason": "", "failures": []}',
             '{"code": 1, "reason": "", "failures": [{}], "signum": 0}', '{"x": 1}', "[" * 9999],
)  # fmt: skip
def test_rubbish_is_no_configuration(text: str) -> None:
    with pytest.raises(ValueError, match="Exit") as caught:
        loads(text, Exit)
    assert "\n" not in str(caught.value)


# ---------------------------------------------------------------- exceptions

BOOM = Failure("h", 3, 1, 77, 9, 1_795_229_851_000_001, FailureKind.SCRIPT, "E: boom", "tb", "")
ECHO = Failure("h", 0, 0, 76, -6, 1_795_229_850_000_000, FailureKind.PEER_LOST, "reset", "", "")


def test_failures_become_torchs_exception() -> None:
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

    with pytest.raises(ChildFailedError) as caught:
        raise_for(Exit(1, "", (BOOM, ECHO), 0), "train")
    error = caught.value
    assert type(error).__name__ == "ChildFailedError"
    assert error.get_first_failure()[0] == 3, "not the earliest, but the one found to be the cause"
    assert isinstance(error.failures[0], ProcessFailure)
    assert error.failures[0].signal_name() == "SIGABRT"
    assert error.failures[3].message["extraInfo"]["py_callstack"] == "tb"
    assert str(error) == error.format_msg()
    assert "Root Cause" in str(error)
    copy = pickle.loads(pickle.dumps(error))
    assert str(copy) == str(error)


def test_signals_become_torchs_exception() -> None:
    from torch.distributed.elastic.multiprocessing import SignalException

    with pytest.raises(SignalException, match="got signal: ") as caught:
        raise_for(Exit(1, "", (), 15), "train")
    assert caught.value.sigval is signal.SIGTERM


def test_other_ends() -> None:
    with pytest.raises(errors.LaunchError, match="too few nodes") as caught:
        raise_for(Exit(76, "too few nodes", (), 0), "train")
    assert caught.value.exit_code == 76
    raise_for(Exit(0, "", (), 0), "train")


def test_without_torch_the_shape_is_the_same() -> None:
    code = (
        "import sys, pickle\n"
        "from elasticrun import errors\n"
        "from elasticrun.wire.messages import Failure, FailureKind\n"
        f"boom = Failure{structs.astuple(BOOM)!r}\n"
        "error = errors.child_failed_error('train', [boom])\n"
        "assert isinstance(error, errors.ChildFailedError)\n"
        "rank, failure = error.get_first_failure()\n"
        "print(rank, failure.exitcode, failure.signal_name(), failure.timestamp)\n"
        "print(str(error).splitlines()[2], type(error).__name__, str(errors.signal_exception(2)))\n"
        "assert str(pickle.loads(pickle.dumps(error))) == str(error)\n"
        "assert 'torch' not in sys.modules and 'grpc' not in sys.modules\n"
    ).replace("<FailureKind.SCRIPT: 'script'>", "FailureKind.SCRIPT")
    done = program("-c", code)
    assert done.stderr == ""
    first, second = done.stdout.splitlines()
    assert first == "3 9 <N/A> 1795229851"
    assert second.startswith("train FAILED ChildFailedError Process ")


def test_no_entry_point() -> None:
    with pytest.raises(ValueError, match="no entry point"):
        elastic_launch(one_node(), None)()
