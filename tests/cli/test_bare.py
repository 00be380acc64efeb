"""Commands for several nodes that nobody has told where they meet."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path

import pytest

from elasticrun.cli.detection.found import HostFacts, Machine
from elasticrun.cli.devices import shared_folder
from elasticrun.cli.flags import get_args_parser
from elasticrun.cli.rendezvous import join_command
from elasticrun.cli.resolve import Resolved, resolve
from elasticrun.cli.settings import FlagValues, UsageError
from elasticrun.cli.verbs.dry_run import describe
from elasticrun.config import Identity, JoinCommand, MasterConfig, Place
from elasticrun.master.outward.record import name_of, run_folder_path

LOCAL: Mapping[str, str] = {}


def machine(shared: str = "") -> Machine:
    """A machine without a scheduler; every folder is on this network file system."""
    facts = HostFacts(hostname="h", fqdn="h")
    return Machine(
        lambda: 1, lambda word: 0, lambda group: [], lambda: facts, lambda folder: shared, "ada"
    )


def made(words: str, environ: Mapping[str, str] = LOCAL, shared: str = "") -> Resolved:
    ns = get_args_parser(environ).parse_args(words.split())
    return resolve(ns, environ, machine(shared))


def test_a_range_and_nothing_else_begins_here_under_a_name_of_its_own() -> None:
    found = made("--nnodes=1:10 train.py --lr=1")
    assert found.place == Place("open", port=29400)
    assert (found.launch.spec.min_nodes, found.launch.spec.max_nodes) == (1, 10)
    assert found.identity.job_id.startswith("train-")
    assert found.identity.job_id != made("--nnodes=1:10 train.py --lr=1").identity.job_id
    assert found.notes == (), "its token is made by the agent"
    assert made("--nnodes=1:10 --rdzv-id=j train.py").identity.job_id == "j"
    assert made("train.py", {"PET_NNODES": "1:10"}).place.kind == "open"


@pytest.mark.parametrize("shared", ["", "NFS"])
def test_a_job_that_nobody_has_named_has_one_name(
    shared: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In lists and as the id by which nodes join; also the end of it is the id of its run."""
    monkeypatch.setenv("ELASTICRUN_RUNS", "/runs")
    found = made("--nnodes=1:10 my-train.py", shared=shared)
    config = MasterConfig(found.identity, "", 0, None, found.launch.master)
    assert name_of(config) == found.identity.job_id
    ours = found.launch.master.run.launch
    assert run_folder_path(config) == f"/runs/my-train-{ours}"
    assert found.identity.job_id.endswith(f"-{ours}")
    joined = Identity("my_train-0badcafe")  # of a job that this node has found, and joined
    config = MasterConfig(joined, "", 0, None, found.launch.master)
    assert name_of(config) == "my_train-0badcafe"
    assert not run_folder_path(config).endswith(ours)
    named = made("--nnodes=1:10 --name=n my-train.py", shared=shared)
    config = MasterConfig(named.identity, "", 0, None, named.launch.master)
    assert name_of(config) == "n"
    assert run_folder_path(config) == f"/runs/n-{named.launch.master.run.launch}"


@pytest.mark.parametrize("shared", ["", "NFS"])
def test_who_types_the_line_on_a_second_machine_is_let_in_at_once(shared: str) -> None:
    """And not when the first minute, or ten, are over: nobody else is on the way."""
    assert made("--nnodes=1:10 s.py", shared=shared).launch.spec.grow == "now"
    assert made("--nnodes=1:10 --grow=auto s.py", shared=shared).launch.spec.grow == "auto"
    assert (
        made("--nnodes=1:10 s.py", {"ELASTICRUN_GROW": "auto"}, shared).launch.spec.grow == "auto"
    )
    for endpoint in ("h:1", "file:///x/a"):
        named = made(f"--nnodes=1:10 --rdzv-endpoint={endpoint} s.py", shared=shared)
        assert named.launch.spec.grow == "auto"
    shown = rows("--nnodes=1:10 s.py", shared)["grow"]
    assert shown.split(maxsplit=1) == ["now", "no rendezvous is set"]


@pytest.mark.parametrize(
    ("words", "environ", "kind"),
    [
        ("--nnodes=1:2 --rdzv-endpoint=h:1 s.py", {}, "elastic"),
        ("--nnodes=1:2 --rdzv-backend=c10d s.py", {}, "elastic"),
        ("--nnodes=1:2 --master-port=7 s.py", {}, "static"),
        ("--nnodes=1:2 --node-rank=0 s.py", {}, "static"),
        ("--nnodes=1:2 s.py", {"NODE_RANK": "1"}, "static"),
        ("--nnodes=2 s.py", {"PET_NODE_RANK": "1"}, "static"),
        ("--nnodes=2 s.py", {"PET_MASTER_ADDR": "h"}, "static"),
        ("--nnodes=1:2 --standalone s.py", {}, "standalone"),
        ("--nnodes=1:1 s.py", {}, "standalone"),
        ("--nnodes=1:2 s.py", {"DLROVER_MASTER_ADDR": "h:1"}, "external"),
        ("--nnodes=1:2 s.py", {"SLURM_JOB_ID": "1", "SLURM_JOB_NUM_NODES": "2"}, "static"),
    ],
)
def test_what_says_where_nodes_meet_keeps_its_meaning(
    words: str, environ: Mapping[str, str], kind: str
) -> None:
    assert made(words, environ, "NFS").place.kind == kind


@pytest.mark.parametrize(
    ("words", "environ", "begins"),
    [
        ("--nnodes=4 s.py", {}, "--nnodes=4 needs a rendezvous"),
        ("--nnodes=2:2 s.py", {}, "--nnodes=2 needs a rendezvous"),
        ("s.py", {"PET_NNODES": "4"}, "--nnodes=4 needs a rendezvous"),
        ("--auto-config s.py", {"NODE_NUM": "3"}, "a job of 3 nodes needs a rendezvous"),
    ],
)
def test_a_fixed_number_and_nothing_else_is_refused_with_the_flags_that_are_missing(
    words: str, environ: Mapping[str, str], begins: str
) -> None:
    with pytest.raises(UsageError) as refused:
        made(words, environ, "NFS")
    sentence = str(refused.value)
    assert sentence.startswith(begins)
    for flag in ("--rdzv-endpoint=HOST:29400", "file:///", "--node-rank, --master-addr"):
        assert flag in sentence
    assert refused.value.exit_code == 2


def test_on_a_network_file_system_a_file_beside_the_script(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "train.py").touch()
    monkeypatch.chdir(tmp_path)
    words = "--nnodes=1:10 sub/train.py --lr=1"
    found = made(words, shared="NFS")
    where = found.place
    assert where.kind == "file"
    folder, _, name = where.path.rpartition("/")
    assert folder == str(tmp_path / "sub")
    assert name.startswith(".elasticrun-ada-train-")
    assert "this folder is on NFS: all machines" in found.notes[0]
    assert made(words, shared="NFS").place == where, "so machines find each other"
    others = [
        made("--nnodes=1:10 sub/train.py --lr=2", shared="NFS"),
        made("--nnodes=1:10 --rdzv-id=j sub/train.py --lr=1", shared="NFS"),
        made("--nnodes=1:10 sub/other.py --lr=1", shared="NFS"),
    ]
    assert len({one.place.path for one in others} | {where.path}) == 4
    module = made("--nnodes=1:10 -m pkg.train", shared="NFS").place.path
    assert module.startswith(f"{tmp_path}/.elasticrun-ada-pkg.train-")


@pytest.mark.parametrize(
    ("endpoint", "path"),
    [
        ("file:///shared/jobs/a", "/shared/jobs/a"),
        ("file:/shared/a", "/shared/a"),
        ("file://localhost/shared/../a", "/a"),
    ],
)
def test_a_file_that_is_named(endpoint: str, path: str) -> None:
    for nodes, backend in (("2", ""), ("1:4", "--rdzv-backend=c10d")):
        found = made(f"--nnodes={nodes} {backend} --rdzv-endpoint={endpoint} s.py")
        assert found.place == Place("file", port=29400, path=path)
        assert found.notes == ()
    named = made(f"--nnodes=2 --rdzv-id=j --rdzv-endpoint={endpoint} s.py")
    assert (named.identity.job_id, named.identity.named) == ("j", True)
    joins = made(f"--nnodes=2 --rdzv-conf=is_host=0 --rdzv-endpoint={endpoint} s.py")
    assert joins.place.is_host is False


@pytest.mark.parametrize(
    ("words", "part"),
    [
        ("--rdzv-endpoint=file://h/a", "write file:///FOLDER/NAME"),
        ("--rdzv-endpoint=file:a", "write file:///FOLDER/NAME"),
        ("--rdzv-endpoint=file:///", "write file:///FOLDER/NAME"),
        ("--rdzv-backend=static --rdzv-endpoint=file:///a/b", "leave the backend out"),
    ],
)
def test_files_that_cannot_be(words: str, part: str) -> None:
    with pytest.raises(UsageError, match=part):
        made(f"--nnodes=2 {words} s.py")


def rows(words: str, shared: str = "") -> dict[str, str]:
    ns = get_args_parser({}).parse_args(words.split())
    text = describe(resolve(ns, {}, machine(shared)), ns, {})
    return {line[:22].strip(): line[22:].strip() for line in text.splitlines()}


def test_a_dry_run_shows_where_the_meeting_place_comes_from() -> None:
    assert rows("--nnodes=1:2 s.py")["job master"].startswith(
        "started by this agent, on the first free port from 29400 on (no"
    )
    implied = rows("--nnodes=1:2 s.py", "NFS")
    assert "s-" in implied["job master"]
    assert "(this folder is on NFS)" in implied["job master"]
    assert implied["rdzv-endpoint"].endswith("this folder is on NFS")
    named = rows("--nnodes=1:2 --rdzv-endpoint=file:///x/a s.py")["job master"]
    assert named.startswith("where the file /x/a says (--rdzv-endpoint)")


def parts(command: JoinCommand) -> str:
    """Flags | program."""
    assert command.folder == "/here"
    flags, program = command.words[: command.program_at], command.words[command.program_at :]
    return f"{shlex.join(flags)} | {shlex.join(program)}"


@pytest.mark.parametrize(
    ("words", "environ", "shown"),
    [
        ("--nnodes=1:10 train.py --lr 1", {}, "--nnodes=1:10 | train.py --lr 1"),
        ("--nnodes=1:9 --tee 3 -m a.b", {}, "--nnodes=1:9 --tee 3 -m | a.b"),
        ("train.py 'a b'", {"PET_NNODES": "1:3"}, "--nnodes=1:3 | train.py 'a b'"),
        ("--name tr --nnodes 1:2 -- s.py", {}, "--name tr --nnodes 1:2 -- | s.py"),
    ],
)
def test_the_command_for_other_nodes(words: str, environ: Mapping[str, str], shown: str) -> None:
    given = shlex.split(words)
    ns = get_args_parser(environ).parse_args(given)
    assert parts(join_command(given, FlagValues(ns, environ), "/here")) == shown


@pytest.mark.parametrize(
    ("meets", "shown"),
    [
        ("--nnodes=1:4", "--grow=now --nnodes=1:4 | s.py"),
        ("--nnodes=1:4 --rdzv-endpoint=file:///x/a", None),
        ("--nnodes=1:4 --rdzv-endpoint=h:1", ""),
        ("--nnodes=1", ""),
    ],
)
def test_a_launch_has_it_if_other_nodes_meet_here(
    meets: str, shown: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = [*meets.split(), "s.py"]
    monkeypatch.setattr("os.getcwd", lambda: "/here")
    ns = get_args_parser(LOCAL).parse_args(words)
    found = resolve(ns, LOCAL, machine(), ("elasticrun", *words)).launch.master.to_join
    expected = f"{meets} | s.py" if shown is None else shown
    assert ("" if found is None else parts(found)) == expected
    assert resolve(ns, LOCAL, machine()).launch.master.to_join is None, "a Python caller's words"


@pytest.mark.parametrize(
    "own", ["--node-id=a", "--node_id a", "--local-addr 10.0.0", "--local_addr=::1", "--local-a b"]
)
def test_what_is_of_this_node_alone_is_not_in_it(own: str) -> None:
    given = [*own.split(), "--nnodes=1:2", "--local-ranks-filter=0", "s.py", *own.split()]
    ns = get_args_parser(LOCAL).parse_args(given)
    shown = f"--nnodes=1:2 --local-ranks-filter=0 | s.py {own}"
    assert parts(join_command(given, FlagValues(ns, LOCAL), "/here")) == shown


def test_it_says_when_newcomers_are_let_in_where_the_first_command_meant_it() -> None:
    """Else the master would say that the second node was started otherwise."""
    given = ["--nnodes=1:2", "s.py"]
    asked = FlagValues(get_args_parser(LOCAL).parse_args(given), LOCAL)
    assert parts(join_command(given, asked, "/here", "now")) == "--grow=now --nnodes=1:2 | s.py"
    given = ["--name", "tr", "--nnodes", "1:2", "s.py"]  # a value of its own follows the first word
    asked = FlagValues(get_args_parser(LOCAL).parse_args(given), LOCAL)
    shown = "--grow=now --name tr --nnodes 1:2 | s.py"
    assert parts(join_command(given, asked, "/here", "now")) == shown


def test_folders_that_are_shared_although_statfs_does_not_say_so(tmp_path: Path) -> None:
    environ = {"ELASTICRUN_SHARED": f"/nowhere:{tmp_path}"}
    inside = tmp_path / "a"
    inside.mkdir()
    assert shared_folder(str(inside), environ) == "$ELASTICRUN_SHARED"
    assert shared_folder(str(tmp_path.parent), environ) == ""
    assert shared_folder("/proc/self", {}) == ""
    assert shared_folder(str(tmp_path / "gone"), {}) == ""
