"""Resolves the rendezvous of a job: from flags and environment to `config.Place`.

The words are torchrun's (static, c10d, an endpoint, a master address); here they determine where
the job master runs and who starts it. A command for several nodes may also name a file, or nothing
at all. Pure: facts about the machine are arguments.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

from elasticrun import config
from elasticrun.cli import settings
from elasticrun.cli.settings import FlagValues, UsageError
from elasticrun.cli.table import FLAGS, Flag
from elasticrun.config import JoinCommand, Place
from elasticrun.core.words import plural
from elasticrun.wire.rpc.etcd_place import PlaceError, parse_place

if TYPE_CHECKING:
    from elasticrun.cli.detection.found import Machine

FILE: Final = "file:"
"""Prefix of an endpoint that is a file."""

SHARED_VARIABLE: Final = "ELASTICRUN_SHARED"
"""The variable with colon-separated folders that machines share although statfs does not show
it."""

RENDEZVOUS_FLAGS: Final = (
    "standalone",
    "rdzv_endpoint",
    "rdzv_backend",
    "master_addr",
    "master_port",
    "master_store",
)
"""Flags that name the rendezvous."""

_NODE_FLAGS: Final = ("--node-id", "--local-addr")
"""Flags whose values differ on each node."""


def is_unnamed(flags: FlagValues) -> bool:
    """Whether neither a flag nor a variable names the rendezvous or the node rank."""
    numbered = any(flags.environ.get(name, "").strip() for name in ("NODE_RANK", "WORKER_RANK"))
    return not numbered and not any(map(flags.is_given, (*RENDEZVOUS_FLAGS, "node_rank")))


def is_started_by_hand(place: Place) -> bool:
    """Whether nothing names the rendezvous. People then start the command on one machine after
    another, and a new machine should join at once."""
    return place.kind == "open" or bool(place.found)


def unnamed_fixed_size(flags: FlagValues, nodes: int) -> UsageError:
    """The error for a fixed number of nodes without a rendezvous, where each node would wait for
    the others forever."""
    what = f"--nnodes={nodes}" if flags.is_given("nnodes") else f"a job of {nodes} nodes"
    return UsageError(
        f"{what} needs a rendezvous, and no scheduler provides one. Add the same "
        f"--rdzv-endpoint=HOST:{settings.C10D_PORT} (the name of one of the nodes) or "
        "--rdzv-endpoint=file:///SHARED/FOLDER/NAME on every node, or use --node-rank, "
        f"--master-addr and --master-port. With --nnodes=1:{nodes} this node begins at once, and "
        "others may join",
        config.EXIT_USAGE,
    )


def open_place(flags: FlagValues, machine: Machine) -> tuple[Place, str]:
    """The rendezvous without any setting, and a note for the user: if the working folder is on a
    network file system, a file beside the script or in that folder; else this node."""
    folder_here = working_folder()
    named = flags.text("rdzv_id") if flags.is_given("rdzv_id") else ""
    kind = machine.shared(folder_here)
    if not kind:
        return Place(kind="open", port=config.FIRST_PORT), ""
    script = os.path.join(folder_here, str(flags.ns.training_script))
    beside = os.path.dirname(script)
    is_script = os.path.isfile(script) and not any(map(flags.switch, ("module", "no_python")))
    folder = folder_here
    if is_script and machine.shared(beside) and os.access(beside, os.W_OK):
        folder = os.path.normpath(beside)
    args = [str(word) for word in flags.ns.training_script_args or ()]
    stem = job_stem(flags)
    parts = json.dumps([machine.user, os.path.basename(script), args, named])
    digest = hashlib.sha256(parts.encode(errors="surrogateescape")).hexdigest()[:12]
    path = os.path.join(folder, f".elasticrun-{_as_file_name(machine.user)}-{stem}-{digest}")
    found = f"this folder is on {kind}"
    note = (
        f"{found}: all machines on which you start this command find each other by {path}; "
        "to change that, use --rdzv-endpoint=HOST:PORT"
    )
    port = config.FIRST_PORT
    return Place("file", port=port, path=path, found=found), note


def file_place(flags: FlagValues, conf: Mapping[str, str]) -> Place:
    """The rendezvous file that the endpoint names. Raises `UsageError`."""
    text = flags.text("rdzv_endpoint").strip()
    path = text.removeprefix(FILE)
    if path.startswith("//"):
        host, slash, rest = path[2:].partition("/")
        path = slash + rest if host in ("", "localhost") else ""
    if not path.startswith("/") or path.endswith("/") or "\0" in path:
        raise UsageError(
            f"--rdzv-endpoint={text}: write file:///FOLDER/NAME, a file in a folder that all nodes "
            "share",
            config.EXIT_USAGE,
        )
    word = flags.text("rdzv_backend")
    if flags.is_given("rdzv_backend") and word not in ELASTIC_WORDS:
        raise UsageError(
            f"--rdzv-endpoint={text} excludes --rdzv-backend={word}: leave the backend out",
            config.EXIT_USAGE,
        )
    return Place(
        kind="file",
        port=config.FIRST_PORT,
        path=os.path.normpath(path),
        is_host=_is_host(conf),
    )


def working_folder() -> str:
    """The folder in which the command was typed; "/" if it was removed."""
    try:
        return os.getcwd()
    except OSError:
        return "/"


def job_stem(flags: FlagValues) -> str:
    """A name for the job, derived from its script."""
    name = str(flags.ns.training_script)
    if not flags.switch("module"):
        name = os.path.basename(name.rstrip("/"))
    return _as_file_name(name.removesuffix(".py"))[:40] or "job"


def _as_file_name(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9_.]+", "_", text).strip(".")


def join_command(
    words: Sequence[str], values: FlagValues, folder: str, grow: str = ""
) -> JoinCommand:
    """The command with which other nodes join, from this node's words and working directory.
    `grow`: the value of --grow to add; "": none."""
    tail = 1 + len(values.ns.training_script_args or ())
    flags, program = without_flags(words[:-tail], _NODE_FLAGS), list(words[-tail:])
    given: Mapping[str, str] = getattr(values.ns, "given", {})
    if grow and "grow" not in given:
        flags.insert(0, f"--grow={grow}")
    if "nnodes" not in given:
        flags.insert(0, f"--nnodes={values.text('nnodes')}")
    return JoinCommand((*flags, *program), len(flags), folder)


def without_flags(flags: Sequence[str], names: Collection[str]) -> list[str]:
    """The words without these flags and their values, in any spelling or abbreviation."""
    kept: list[str] = []
    drop = False
    for word in flags:
        name, equals, _ = word.partition("=")
        meant = None if drop else _find_flag(name)
        if meant is not None and meant.name in names:
            drop = not equals and meant.kind is not None
        elif drop:
            drop = False
        else:
            kept.append(word)
    return kept


def _find_flag(word: str) -> Flag | None:
    """The flag with that spelling, or the only one that the word abbreviates; else None."""
    if not word.startswith("--"):
        return None
    whole = [flag for flag in FLAGS if word in flag.spellings]
    abbreviated = {flag for flag in FLAGS if any(one.startswith(word) for one in flag.spellings)}
    return whole[0] if whole else abbreviated.pop() if len(abbreviated) == 1 else None


ELASTIC_WORDS: Final = ("c10d", "elasticrun")
"""Backends under which a node rank is only a preference."""
ETCD_WORDS: Final = ("etcd", "etcd-v2")

PLUGIN_GROUP: Final = "torchrun.handlers"
"""The entry-point group of rendezvous plug-ins, which torchrun alone supports."""


class RendezvousPlan(NamedTuple):
    """The rendezvous, the job id, the number of nodes, and the node rank."""

    place: Place
    job_id: str
    min_nodes: int
    max_nodes: int
    node_rank: int  # -1: none given
    notes: tuple[str, ...] = ()
    delegate: str = ""  # the plug-in that torchrun must serve
    store: str = ""  # etcd's URL, for the master's record and leadership
    named: bool = False  # the user chose the job id
    minted: str = ""  # the digits at the end of a job id that starts with the script's name


def fresh_id() -> str:
    """A new unique job id."""
    import uuid

    return str(uuid.uuid4())


def resolve_rendezvous(
    flags: FlagValues, conf: Mapping[str, str], machine: Machine, *, bare: bool
) -> RendezvousPlan:
    """All settings that depend on the rendezvous. `bare`: this is a command line and no scheduler
    was detected, so that several nodes need no rendezvous flag. Raises UsageError."""
    case = _Case(flags, conf)
    word = flags.text("rdzv_backend")
    if store := flags.text("master_store"):
        return case.etcd(store)
    if flags.environ.get("DLROVER_MASTER_ADDR") and (stronger := _overriding_flag(flags)):
        case.notes.append(f"DLROVER_MASTER_ADDR is not used: {stronger} names the rendezvous")
    if flags.switch("standalone"):
        return case.standalone()
    if master := _dlrover_master(flags):
        return case.external(master)
    if case.endpoint.startswith(FILE):
        return case.shared(file_place(flags, conf))
    if case.high > 1 and bare and is_unnamed(flags):
        return case.bare(machine)
    if word == "static" and not case.is_elastic():
        return case.static()
    if word in ("static", *ELASTIC_WORDS):
        return case.elastic()
    if word in ETCD_WORDS:
        return case.etcd_of_torchrun(word)
    if word in set(machine.entry_points(PLUGIN_GROUP)):
        return case.plan(Place("external"))._replace(delegate=word)
    known = ", ".join(("static", *ELASTIC_WORDS))
    raise UsageError(
        f"--rdzv-backend={word} is not known: use one of {known}, or the name of an installed "
        f"plug-in of the group {PLUGIN_GROUP}"
    )


class _Case:
    """Resolves the rendezvous of one command, one method per kind. Each raises UsageError."""

    def __init__(self, flags: FlagValues, conf: Mapping[str, str]) -> None:
        self.flags = flags
        self.conf = conf
        self.low, self.high, self.notes = _node_limits(flags)
        self.endpoint = flags.text("rdzv_endpoint").strip()

    def plan(self, place: Place) -> RendezvousPlan:
        """The plan for a rendezvous at this place, with the other settings from the flags. The node
        rank is a preference: -1 unless the user gave it."""
        wish = self.flags.number("node_rank") if self.flags.is_given("node_rank") else -1
        job_id, notes = self.flags.text("rdzv_id"), tuple(self.notes)
        named = self.flags.is_given("rdzv_id") and bool(job_id)
        return RendezvousPlan(place, job_id, self.low, self.high, max(-1, wish), notes, named=named)

    def standalone(self) -> RendezvousPlan:
        """One node, with the master on loopback. Its job id is unique unless the user gave one."""
        if self.low > 1:
            raise UsageError(
                f"--standalone is for one node, but --nnodes={self.flags.text('nnodes')} asks for "
                f"{self.low}: use --rdzv-endpoint=HOST:PORT with the name of one of them"
            )
        if self.high > 1:
            self.notes.append("--standalone: no other node can join, so there is one node")
        found = self.plan(Place("standalone", "127.0.0.1"))
        job_id = fresh_id() if found.job_id in ("", "none") else found.job_id
        return found._replace(job_id=job_id, min_nodes=1, max_nodes=1)

    def bare(self, machine: Machine) -> RendezvousPlan:
        """Several nodes, for which nothing names the rendezvous."""
        if self.low == self.high:
            raise unnamed_fixed_size(self.flags, self.high)
        place, note = open_place(self.flags, machine)
        self.notes += [note] if note else []
        return self.shared(place)

    def shared(self, place: Place) -> RendezvousPlan:
        """A file, or this node: the first node chooses the job's id, and the others learn it."""
        found = self.plan(place)
        if found.named:
            return found
        minted = fresh_id()[:8]
        return found._replace(job_id=f"{job_stem(self.flags)}-{minted}", minted=minted)

    def is_elastic(self) -> bool:
        """Whether only `min:max` and an endpoint are given. torchrun's default, static, would use a
        fixed number of nodes and give every node rank 0."""
        return (
            self.low != self.high
            and bool(self.endpoint)
            and not any(map(self.flags.is_given, ("rdzv_backend", "node_rank")))
            and _rank_variable(self.flags) < 0
        )

    def static(self) -> RendezvousPlan:
        """A known address, which node 0 has, and a fixed number of nodes."""
        flags, high = self.flags, self.high
        number = flags.value("master_port")
        if not self.endpoint and number is None and high == 1:
            return self.standalone()
        if self.endpoint:
            host, port = settings.endpoint(self.endpoint, None, "--rdzv-endpoint")
        else:
            port = settings.STATIC_PORT if number is None else int(number)
            port = settings.port(port, "--master-port")
            host = settings.host_name(flags.text("master_addr"), "--master-addr")
        if port == 0 and high == 1:
            return self.standalone()
        if port == 0:
            raise UsageError(
                "port 0 means any free port, which the other nodes cannot know: give a port"
            )
        if self.low != high:
            self.notes.append(
                f"--nnodes={flags.text('nnodes')}: a static job has a fixed number of nodes, "
                f"{high}; use --rdzv-endpoint with --rdzv-backend=c10d for a variable number"
            )
        rank = flags.number("node_rank")
        if high > 1 and not flags.is_given("node_rank"):
            rank = _rank_variable(flags, default=rank)
        if not 0 <= rank < high:
            raise UsageError(
                f"--node-rank={rank}: with --nnodes={high} a node rank is a number from 0 to "
                f"{high - 1}"
            )
        found = self.plan(Place("static", host, port))
        return found._replace(min_nodes=high, node_rank=rank)

    def elastic(self) -> RendezvousPlan:
        """An endpoint: the node that it names starts the master."""
        if (store := self.conf.get("store_type", "tcp")) != "tcp":
            raise UsageError(
                f"--rdzv-conf: store_type={store} has no effect here, because nodes meet at the "
                "master; "
                "use --rdzv-endpoint=HOST:PORT instead"
            )
        host, port = "localhost", settings.C10D_PORT
        if self.endpoint:
            host, port = settings.endpoint(self.endpoint, settings.C10D_PORT, "--rdzv-endpoint")
        elif any(map(self.flags.is_given, ("master_addr", "master_port"))):
            self.notes.append(
                "--master-addr and --master-port are only used with --rdzv-backend=static; nodes "
                "meet "
                f"at {host}:{port}, use --rdzv-endpoint to change that"
            )
        is_host = _is_host(self.conf)
        if port == 0 and self.high == 1 and is_host is not False:
            return self.standalone()
        if port == 0:
            raise UsageError(
                f"--rdzv-endpoint={self.endpoint}: port 0 means any free port, which the other "
                "nodes cannot know; give a port, or use --nnodes=1"
            )
        return self.plan(Place("elastic", host, port, is_host))

    def etcd_of_torchrun(self, word: str) -> RendezvousPlan:
        """Under torchrun, nodes meet in etcd itself; here they look up the master's endpoint in
        it."""
        if not self.endpoint:
            raise UsageError(
                f"--rdzv-backend={word} needs --rdzv-endpoint=HOST:PORT, the address of etcd; "
                f"without an etcd use --rdzv-backend=c10d --rdzv-endpoint=HOST:{settings.C10D_PORT}"
                " with the name of one of the nodes"
            )
        scheme = "etcds" if self.conf.get("protocol", "http").lower() == "https" else "etcd"
        store = f"{scheme}://{self.endpoint}"
        self.notes.append(
            f"--rdzv-backend={word} --rdzv-endpoint={self.endpoint}: treated as "
            f"--master-store={store}"
        )
        return self.etcd(store, "--rdzv-endpoint", f"--rdzv-backend={word}")

    def etcd(
        self, store: str, flag: str = "--master-store", given: str = "--master-store"
    ) -> RendezvousPlan:
        """The nodes elect the master's host through etcd, whose URL came from `flag`."""
        try:
            place = parse_place(store)
        except PlaceError as wrong:
            raise UsageError(f"{flag}: {wrong}") from None
        port = self._port_beside_a_store() if flag == "--master-store" else 0
        found = self.plan(Place("etcd", place.servers[0].host, port))
        if not self.flags.is_given("rdzv_id") or not found.job_id:
            raise UsageError(
                f"{given} needs --rdzv-id=NAME, the same on all nodes and new for every run, "
                "because "
                "etcd keeps the outcome of earlier jobs by name"
            )
        return found._replace(store=store)

    def _port_beside_a_store(self) -> int:
        """The port of the endpoint, 0 if none is given: with --master-store its host does not
        count."""
        flags, word = self.flags, self.flags.text("rdzv_backend")
        if flags.switch("standalone"):
            raise UsageError(
                "--master-store cannot be combined with --standalone, where no other node can join"
            )
        if flags.is_given("rdzv_backend") and word not in ELASTIC_WORDS:
            raise UsageError(
                f"--master-store excludes --rdzv-backend={word}: leave the backend out"
            )
        if not self.endpoint:
            return 0
        host, port = settings.endpoint(self.endpoint, 0, "--rdzv-endpoint")
        self.notes.append(
            f"--rdzv-endpoint={self.endpoint}: with --master-store the master's host ({host} or "
            "another) is known from etcd, and only the port counts"
        )
        return port

    def external(self, master: str) -> RendezvousPlan:
        """A master that DLRover's operator starts, at this address."""
        host, port = settings.endpoint(master, None, "DLROVER_MASTER_ADDR")
        self.notes.append(
            f"the job master is expected at {master} (DLROVER_MASTER_ADDR); with "
            f"--rdzv-backend=c10d --rdzv-endpoint={master} the node with that address would start "
            "it"
        )
        flags = self.flags
        found = self.plan(Place("external", host, port))
        if not flags.is_given("rdzv_id"):
            found = found._replace(job_id=flags.environ.get("ELASTIC_JOB_NAME") or found.job_id)
        explicit = flags.is_given("node_rank")
        rank = flags.number("node_rank") if explicit else _rank_variable(flags)
        return found._replace(node_rank=rank)


def _node_limits(flags: FlagValues) -> tuple[int, int, list[str]]:
    """The minimum and maximum number of nodes, and notes. With --auto-config or DLRover's master,
    $NODE_NUM gives both, unless --nnodes does."""
    low, high = settings.nodes(flags.text("nnodes"))
    auto = flags.switch("auto_config")
    if flags.is_given("nnodes") or not (auto or _dlrover_master(flags)):
        return low, high, []
    text = flags.environ.get("NODE_NUM", "")
    if not text:
        missing = ["--auto-config: NODE_NUM is not set, so this is a job of one node"]
        return low, high, missing if auto else []
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise UsageError(f"NODE_NUM={text} is not a number of nodes; correct it or use --nnodes")
    number, _ = settings.nodes(text)
    return number, number, [f"NODE_NUM={number}: this is a job of {plural(number, 'node')}"]


def _dlrover_master(flags: FlagValues) -> str:
    """$DLROVER_MASTER_ADDR, unless a flag or a PET_ variable names the rendezvous."""
    return "" if _overriding_flag(flags) else flags.environ.get("DLROVER_MASTER_ADDR", "").strip()


def _overriding_flag(flags: FlagValues) -> str:
    """The flag or variable that names the rendezvous, "" if the user gave none."""
    if flags.switch("standalone"):
        return flags.source("standalone")
    for dest in ("rdzv_endpoint", "rdzv_backend", "master_addr", "master_port"):
        if flags.is_given(dest):
            return flags.source(dest)
    return ""


def _is_host(conf: Mapping[str, str]) -> bool | None:
    return settings.boolean(conf["is_host"], "is_host") if "is_host" in conf else None


def _rank_variable(flags: FlagValues, default: int = -1) -> int:
    """$NODE_RANK, else dlrover-run's $WORKER_RANK, else `default`. Raises UsageError."""
    for name in ("NODE_RANK", "WORKER_RANK"):
        text = flags.environ.get(name, "").strip()
        if text:
            if not text.isascii() or not text.isdigit():
                raise UsageError(f"{name}={text} is not a node rank; correct it or use --node-rank")
            return int(text)
    return default
