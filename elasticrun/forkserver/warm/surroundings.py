"""What a program that is exec'd finds around itself, and a fork of another process would not get.

Read from /proc for any process of the same user, so that the warm process looks at whoever asks it
and need not believe a word of what is said.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Final

from elasticrun.forkserver.renew import C_READS, REREAD
from elasticrun.wire.spawning import NAMESPACES

STATUS: Final[Mapping[str, str]] = {
    "Umask": "its umask",
    "Uid": "its user",
    "Gid": "its group",
    "Groups": "its supplementary groups",
    "CapInh": "its inheritable capabilities",
    "CapPrm": "its permitted capabilities",
    "CapEff": "its effective capabilities",
    "CapBnd": "its bounding set of capabilities",
    "CapAmb": "its ambient capabilities",
    "NoNewPrivs": "its no_new_privs",
    "Seccomp": "its seccomp mode",
    "Seccomp_filters": "its seccomp filters",
    "Speculation_Store_Bypass": "its mitigation of speculation",
    "SpeculationIndirectBranch": "its mitigation of speculation",
    "THP_enabled": "its huge pages",
    "Cpus_allowed": "its cores",
    "Mems_allowed": "its memory nodes",
}
"""Lines of /proc/PID/status that a program inherits, in words."""

FILES: Final[Mapping[str, str]] = {
    "cgroup": "its cgroup",
    "oom_score_adj": "its OOM score",
    "loginuid": "its audit user",
    "sessionid": "its audit session",
    "attr/current": "its security label",
    "personality": "its personality",
    "timerslack_ns": "its timer slack",
    "coredump_filter": "its filter of core dumps",
}
"""Files of /proc/PID, whole. One that this kernel does not have is the same for everybody."""

SCHEDULING: Final[Mapping[int, str]] = {
    19: "its nice value",
    40: "its real-time priority",
    41: "its scheduling policy",
}
"""Fields of /proc/PID/stat by their numbers in proc(5)."""

READ_AT_START: Final = (
    *("LD_", "GLIBC_", "MALLOC_", "PYTHON", "LC_", "OMP_", "GOMP_", "KMP_", "MKL", "BLIS_"),
    *("OPENBLAS_", "GOTO_", "NPY_", "NUMPY_", "VECLIB_", "CUDA", "CUDNN", "CUBLAS", "NVIDIA_"),
    *("NCCL_", "HIP_", "HSA_", "ROC", "GLOO_", "UCX_", "FI_", "TORCH", "PYTORCH", "TRITON_"),
    *("XLA_", "ASCEND_", "ONEAPI_", "SYCL_", "ZE_"),
)
"""Beginnings of variables that the loader, the C library, the interpreter and the libraries below
torch read once."""

READ_AT_START_NAMES: Final = frozenset({"LANG", "LANGUAGE", "TZ", "TZDIR", "HOME", "VIRTUAL_ENV"})

LAUNCHERS_OWN: Final = ("TORCHELASTIC_", "TORCH_ELASTIC_", "PYTHON_EXEC")
"""Variables with such a beginning that a launcher reads itself, or sets for each rank."""


def look(pid: int | str) -> dict[str, str]:
    """What is around a process, by words for it. OSError where it may not be looked at."""
    found: dict[str, str] = {}
    base = Path(f"/proc/{pid}")
    for line in (base / "status").read_text().splitlines():
        name, _, value = line.partition(":")
        if name in STATUS:
            found[STATUS[name]] = " ".join(value.split())
    for name, words in FILES.items():
        found[words] = ""
        with suppress(OSError):  # not of this kernel, or of nobody
            found[words] = (base / name).read_text().rstrip("\n\0")
    for line in (base / "limits").read_text().splitlines()[1:]:
        found[f"its limit of {line[4:26].strip()}"] = " ".join(line[26:].split())
    links = {f"its {name} namespace": f"ns/{name}" for name in NAMESPACES}
    for words, name in {**links, "its root folder": "root"}.items():
        found[words] = ""
        with suppress(FileNotFoundError):
            found[words] = os.readlink(base / name)
    fields = (base / "stat").read_text().rpartition(")")[2].split()
    for number, words in SCHEDULING.items():
        found[words] = fields[number - 3]
    return found


def difference(mine: Mapping[str, str], theirs: Mapping[str, str]) -> str:
    """The first thing that is not alike, as half a sentence; empty if all is."""
    for words, value in mine.items():
        other = theirs.get(words, "")
        if other != value:
            return f"{words} differs ({_short(other)}; there {_short(value)})"
    return ""


def variable_that_differs(
    mine: Mapping[str, str], theirs: Mapping[str, str], read: Collection[str]
) -> str:
    """The first variable that an import has read, or a library reads when it is loaded, and that
    has another value; empty if there is none. `read`: names that Python code was seen to read."""
    for name in sorted(mine.keys() | theirs.keys()):
        if mine.get(name) != theirs.get(name) and _is_read(name, read):
            here, there = _value(theirs.get(name)), _value(mine.get(name))
            return f"{name} differs ({here}; there {there})"
    return ""


def _is_read(name: str, read: Collection[str]) -> bool:
    if name in REREAD or name.startswith(LAUNCHERS_OWN):
        return False
    return (
        name in read
        or name in READ_AT_START_NAMES
        or name.startswith(READ_AT_START)
        or any(name in names for names in C_READS.values())
    )


def _value(value: str | None) -> str:
    return "not set" if value is None else _short(value) or "empty"


def _short(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= 60 else f"{text[:57]}..."
