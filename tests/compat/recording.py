"""What torchrun made of the cases, kept in a file, so that a run of the tests need not repeat it.

torchrun is pinned to one version, and no change of ours can change it: it is run live where another
torch or Python is installed than that of the recording, where a case has no recording, and in `make
soak` ($ELASTICRUN_TORCHRUN=live). `ELASTICRUN_TORCHRUN=record pytest tests/compat -m "not soak"`
makes the file anew: tests compare torchrun with itself then, and what they say means nothing.

What a machine has of its own (folders, names, limits) stands in the file as words in «these», and
is put in again as this machine has it.
"""

from __future__ import annotations

import json
import os
import platform
import re
import resource
import socket
import sys
import sysconfig
from collections.abc import Callable, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

HOW = os.environ.get("ELASTICRUN_TORCHRUN", "")
FILE = Path(__file__).parent / "torchrun.json"
VERSIONS = {
    "torch": metadata.version("torch").partition("+")[0],
    "python": ".".join(platform.python_version_tuple()[:2]),
}
OF_THE_LAUNCHER = ("limits", "affinity", "nice", "umask")
"""Places of a dump that torchrun hands on as it has them."""

FQDN = "«FQDN»"


def known() -> dict[str, Any]:
    """The recorded cases by their names, none where they are of other versions."""
    if HOW == "live" or not FILE.exists():
        return {}
    text = json.loads(FILE.read_text(encoding="utf-8"))
    return dict(text["cases"]) if text["versions"] == VERSIONS else {}


def keep(name: str, recorded: Mapping[str, Any]) -> None:
    text = json.loads(FILE.read_text(encoding="utf-8")) if FILE.exists() else {}
    cases = text.get("cases", {}) if text.get("versions") == VERSIONS else {}
    cases[name] = recorded
    whole = {"versions": VERSIONS, "cases": dict(sorted(cases.items()))}
    draft = FILE.with_suffix(".part")
    draft.write_text(json.dumps(whole, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    draft.rename(FILE)


def _places(scratch: Path, port: int) -> dict[str, str]:
    """Words of the recording and what stands for them here, the longest first."""
    found = {
        "«SCRATCH»": str(scratch),
        "«PYTHON»": sys.executable,
        "«PREFIX»": sys.prefix,
        "«STDLIB»": sysconfig.get_paths()["stdlib"],
        "«ROOT»": str(Path(__file__).parents[2]),
        "«PORT»": str(port),
    }
    return dict(sorted(found.items(), key=lambda item: -len(item[1])))


def _everywhere(value: Any, change: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        return {change(name): _everywhere(one, change) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [_everywhere(one, change) for one in value]
    return value


def plain(value: Any, scratch: Path, port: int) -> Any:
    """With words in the place of what is this machine's."""
    places = {text: word for word, text in _places(scratch, port).items()}
    pattern = re.compile(r"(?<![\w-])(" + "|".join(map(re.escape, places)) + r")(?![\w-])")
    host = re.compile(r"(?<=host {6}: )" + re.escape(socket.getfqdn()) + r"$", re.M)

    def change(text: str) -> str:
        return host.sub(FQDN, pattern.sub(lambda found: places[found[1]], text))

    return _everywhere(value, change)


def here(value: Any, scratch: Path, port: int) -> Any:
    """The other way round."""
    places = {**_places(scratch, port), FQDN: socket.getfqdn()}
    pattern = re.compile("|".join(map(re.escape, places)))
    return _everywhere(value, lambda text: pattern.sub(lambda found: places[found[0]], text))


def without_base(dump: dict[str, Any], base: Mapping[str, str], *, umask: bool) -> dict[str, Any]:
    """A dump with what the launcher was given left out; `umask`: the case has named one."""
    environ = dict(dump["environ"])
    if environ.get("MASTER_ADDR") == socket.getfqdn():
        environ["MASTER_ADDR"] = FQDN
    handed_on = [
        what for what in OF_THE_LAUNCHER if what in dump and not (what == "umask" and umask)
    ]
    return {
        **{what: value for what, value in dump.items() if what not in handed_on},
        "environ": {name: value for name, value in environ.items() if base.get(name) != value},
        "handed on": handed_on,
        "taken away": [name for name in base if name not in environ],
    }


def with_base(kept: Mapping[str, Any], base: Mapping[str, str]) -> dict[str, Any]:
    """The dump again, with what this launcher would be given."""
    os.umask(mask := os.umask(0))
    names = ("RLIMIT_NOFILE", "RLIMIT_CORE", "RLIMIT_STACK")
    ours = {
        "umask": mask,
        "limits": {name: list(resource.getrlimit(getattr(resource, name))) for name in names},
        "affinity": sorted(os.sched_getaffinity(0)),
        "nice": os.nice(0),
    }
    dump = {what: value for what, value in kept.items() if what not in ("handed on", "taken away")}
    left = {name: value for name, value in base.items() if name not in kept["taken away"]}
    handed_on = {what: ours[what] for what in kept["handed on"]}
    return {**dump, **handed_on, "environ": {**left, **kept["environ"]}}
