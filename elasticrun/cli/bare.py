"""A command for several nodes that nobody has told where they meet: no flag, no variable and no
scheduler. And meeting by a file. Pure, but for what is handed in."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Final

from elasticrun import config
from elasticrun.cli import values
from elasticrun.cli.table import FLAGS
from elasticrun.cli.values import UsageError
from elasticrun.config import Rendezvous

if TYPE_CHECKING:
    from elasticrun.cli.settings import Asked

FILE: Final = "file:"
"""How an endpoint begins that is a file."""

SHARED_VARIABLE: Final = "ELASTICRUN_SHARED"
"""Folders, with colons between, that several machines share although statfs does not say so."""

SLOT: Final = "\0"
"""In a command for other nodes: where the flags go that are known only when the master serves."""

_PLACES: Final = (
    "standalone",
    "rdzv_endpoint",
    "rdzv_backend",
    "master_addr",
    "master_port",
    "master_store",
    "node_rank",
)
"""Flags that say where nodes meet, or which one this is."""

_OF_ONE_NODE: Final = ("--node-id", "--local-addr")
"""Flags that are another's on each node."""


def says_nothing(asked: Asked) -> bool:
    """Whether neither a flag nor a variable says where nodes meet, or which of them this is."""
    numbered = any(asked.environ.get(name, "").strip() for name in ("NODE_RANK", "WORKER_RANK"))
    return not numbered and not any(map(asked.explicitly, _PLACES))


def is_file(asked: Asked) -> bool:
    """Whether the endpoint is a file."""
    return asked.text("rdzv_endpoint").strip().startswith(FILE)


def by_hand(place: Rendezvous) -> bool:
    """Whether people type the command on one machine after another, since nothing says where nodes
    meet: who types it wants that machine in at once."""
    return place.kind == "open" or bool(place.found)


def refuse_fixed(asked: Asked, nodes: int) -> UsageError:
    """Why a fixed number of nodes cannot begin: every one of them would wait for the others."""
    what = f"--nnodes={nodes}" if asked.explicitly("nnodes") else f"a job of {nodes} nodes"
    return UsageError(
        f"{what} does not say where the nodes meet, and no scheduler does: add "
        f"--rdzv-backend=c10d --rdzv-endpoint=HOST:{values.C10D_PORT} with the name of one of "
        "them, or --rdzv-endpoint=file:///SHARED/FOLDER/NAME, the same on all; or --node-rank, "
        f"--master-addr and --master-port; --nnodes=1:{nodes} begins at once with this node and "
        "lets others join",
        config.EXIT_USAGE,
    )


def open_place(
    asked: Asked, shared: Callable[[str], str], here: str, user: str
) -> tuple[Rendezvous, str]:
    """Where nodes meet that were told nothing: by a file beside the script where this folder is on
    a network file system, else at this node; and a sentence for the user. `shared(folder)`: the
    name of the network file system there, "" for none."""
    named = asked.text("rdzv_id") if asked.explicitly("rdzv_id") else ""
    kind = shared(here)
    if not kind:
        return Rendezvous(kind="open", port=config.FIRST_PORT, named=bool(named)), ""
    script = os.path.join(here, str(asked.ns.training_script))
    beside = os.path.dirname(script)
    is_script = not asked.switch("module") and not asked.switch("no_python")
    folder = here
    if is_script and os.path.isfile(script) and shared(beside) and os.access(beside, os.W_OK):
        folder = os.path.normpath(beside)
    args = [str(word) for word in asked.ns.training_script_args or ()]
    stem = job_stem(asked)
    told = json.dumps([user, os.path.basename(script), args, named])
    digest = hashlib.sha256(told.encode(errors="surrogateescape")).hexdigest()[:12]
    path = os.path.join(folder, f".elasticrun-{_plain(user)}-{stem}-{digest}")
    found = f"this folder is on {kind}"
    note = (
        f"{found}: all machines on which you start this very command meet by {path}; "
        "--rdzv-endpoint=HOST:PORT would name another place"
    )
    place = Rendezvous(
        kind="file", port=config.FIRST_PORT, path=path, found=found, named=bool(named)
    )
    return place, note


def file_place(asked: Asked, conf: Mapping[str, str]) -> Rendezvous:
    """The rendezvous file that the endpoint names; raises `UsageError`."""
    text = asked.text("rdzv_endpoint").strip()
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
    word = asked.text("rdzv_backend")
    if asked.explicitly("rdzv_backend") and word not in ("c10d", "elasticrun"):
        raise UsageError(
            f"--rdzv-endpoint={text} does not go with --rdzv-backend={word}: leave the backend out",
            config.EXIT_USAGE,
        )
    is_host = values.boolean(conf["is_host"], "is_host") if "is_host" in conf else None
    return Rendezvous(
        kind="file",
        port=config.FIRST_PORT,
        path=os.path.normpath(path),
        is_host=is_host,
        named=asked.explicitly("rdzv_id"),
    )


def job_stem(asked: Asked) -> str:
    """What a job is called after its script."""
    name = str(asked.ns.training_script)
    if not asked.switch("module"):
        name = os.path.basename(name.rstrip("/"))
    return _plain(name.removesuffix(".py"))[:40] or "job"


def _plain(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9_.]+", "_", text).strip(".")


def for_others(words: Sequence[str], asked: Asked, grow: str = "") -> str:
    """The command that other nodes type, by the words of this one; `SLOT` stands where flags are
    missing that only the running master can tell. `grow`: what --grow is to say."""
    tail = 1 + len(asked.ns.training_script_args or ())
    flags, program = _shared_flags(words[:-tail]), list(words[-tail:])
    given: Mapping[str, str] = getattr(asked.ns, "given", {})
    if "nnodes" not in given:
        flags.insert(0, f"--nnodes={asked.text('nnodes')}")
    if grow and "grow" not in given:
        flags.insert(1, f"--grow={grow}")
    return " ".join(["elasticrun", *([shlex.join(flags)] if flags else []), SLOT,
                     shlex.join(program)])  # fmt: skip


def _shared_flags(flags: Sequence[str]) -> list[str]:
    """Without those of this node alone."""
    kept: list[str] = []
    drop = False
    for word in flags:
        name, equals, _ = word.partition("=")
        if drop or _is_of_one_node(name):
            drop = not drop and not equals
        else:
            kept.append(word)
    return kept


def _is_of_one_node(name: str) -> bool:
    """Also abbreviated: by the beginning of no other flag."""
    if not name.startswith("--"):
        return False
    spellings = [spelling for flag in FLAGS for spelling in flag.spellings]
    meant = [one for one in spellings if one == name] or [
        one for one in spellings if one.startswith(name)
    ]
    return bool(meant) and all(one.replace("_", "-") in _OF_ONE_NODE for one in meant)
