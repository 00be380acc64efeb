"""What an exec'd program inherits from its parent, and a fork of another process would not.

Read from /proc for any process of the same user, so the warm process inspects its clients itself
and does not have to trust what they send.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Final

from elasticrun.forkserver.renew import read_by_c
from elasticrun.wire.spawning import NAMESPACES

STATUS: Final[Mapping[str, str]] = {
    "Umask": "umask",
    "Uid": "user",
    "Gid": "group",
    "Groups": "supplementary groups",
    "CapInh": "inheritable capabilities",
    "CapPrm": "permitted capabilities",
    "CapEff": "effective capabilities",
    "CapBnd": "bounding set of capabilities",
    "CapAmb": "ambient capabilities",
    "NoNewPrivs": "no_new_privs",
    "Seccomp": "seccomp mode",
    "Seccomp_filters": "seccomp filters",
    "Speculation_Store_Bypass": "mitigation of speculation",
    "SpeculationIndirectBranch": "mitigation of speculation",
    "THP_enabled": "huge pages",
    "Cpus_allowed_list": "cores",
    "Mems_allowed_list": "memory nodes",
}
"""Lines of /proc/PID/status that a program inherits, with the words for them."""

FILES: Final[Mapping[str, str]] = {
    "cgroup": "cgroup",
    "oom_score_adj": "OOM score",
    "loginuid": "audit user",
    "sessionid": "audit session",
    "attr/current": "security label",
    "personality": "personality",
    "timerslack_ns": "timer slack",
    "coredump_filter": "filter of core dumps",
}
"""Whole files of /proc/PID. A file that this kernel does not have counts as equal."""

POLICY: Final = "scheduling policy"

SCHEDULING: Final[Mapping[int, str]] = {
    19: "nice value",
    40: "real-time priority",
    41: POLICY,
}
"""Fields of /proc/PID/stat by their numbers in proc(5)."""

POLICIES: Final = ("OTHER", "FIFO", "RR", "BATCH", "ISO", "IDLE", "DEADLINE", "EXT")
"""Names of the scheduling policies by number, as in sched(7)."""

READ_AT_START: Final = (
    *("LD_", "GLIBC_", "MALLOC_", "PYTHON", "LC_", "OMP_", "GOMP_", "KMP_", "MKL", "BLIS_"),
    *("OPENBLAS_", "GOTO_", "NPY_", "NUMPY_", "VECLIB_", "CUDA", "CUDNN", "CUBLAS", "NVIDIA_"),
    *("NCCL_", "HIP_", "HSA_", "ROC", "GLOO_", "UCX_", "FI_", "TORCH", "PYTORCH", "TRITON_"),
    *("XLA_", "ASCEND_", "ONEAPI_", "SYCL_", "ZE_"),
)
"""Prefixes of variables that the loader, the C library, the interpreter and the libraries below
torch read once.
"""

READ_AT_START_NAMES: Final = frozenset({"LANG", "LANGUAGE", "TZ", "TZDIR", "HOME", "VIRTUAL_ENV"})

LAUNCHERS_OWN: Final = ("TORCHELASTIC_", "TORCH_ELASTIC_", "PYTHON_EXEC")
"""Prefixes of variables that a launcher reads itself or sets for each rank, despite
READ_AT_START."""

MAX_DIFFERENCES: Final = 3
"""Number of differences that a sentence names."""


def read_process(pid: int | str) -> dict[str, str]:
    """The surroundings of a process, by words for them. Raises OSError if access is denied."""
    found: dict[str, str] = {}
    base = Path(f"/proc/{pid}")
    for line in (base / "status").read_text().splitlines():
        name, _, value = line.partition(":")
        if name in STATUS:
            found[STATUS[name]] = " ".join(value.split())
    for name, words in FILES.items():
        found[words] = ""
        with suppress(OSError):  # this kernel does not have the file, or it has no value
            found[words] = (base / name).read_text().rstrip("\n\0")
    for line in (base / "limits").read_text().splitlines()[1:]:
        soft, hard, *unit = line[26:].split()
        found[f"limit of {line[4:26].strip()}"] = f"{' '.join([soft, *unit])} (hard {hard})"
    links = {f"{name} namespace": f"ns/{name}" for name in NAMESPACES}
    for words, name in {**links, "root folder": "root"}.items():
        found[words] = ""
        with suppress(FileNotFoundError):
            found[words] = os.readlink(base / name)
    fields = (base / "stat").read_text().rpartition(")")[2].split()
    for number, words in SCHEDULING.items():
        found[words] = fields[number - 3]
    found[POLICY] = POLICIES[int(found[POLICY])]
    return found


def difference(mine: Mapping[str, str], theirs: Mapping[str, str]) -> str:
    """The differences in words; empty if none. `theirs` are the client's, which the text calls
    `here`."""
    return _describe((w, theirs.get(w, ""), v) for w, v in mine.items() if theirs.get(w, "") != v)


def variables_that_differ(
    mine: Mapping[str, str], theirs: Mapping[str, str], reads: Mapping[str, str]
) -> str:
    """Like `difference`, for variables that an import has read, or that a library reads when it is
    loaded. `reads`: names that Python code has read, and the file that read them."""
    both = ((n, theirs.get(n), mine.get(n)) for n in sorted(mine.keys() | theirs.keys()))
    return _describe((n, here, v) for n, here, v in both if here != v and _is_relevant(n, reads))


def _describe(found: Iterable[tuple[str, str | None, str | None]]) -> str:
    return "; ".join(
        f"{words} {_value(here)} here, {_value(there)} in the warm process"
        for words, here, there in islice(found, MAX_DIFFERENCES)
    )


def _is_relevant(name: str, reads: Mapping[str, str]) -> bool:
    if name.startswith(LAUNCHERS_OWN):
        return False
    return (
        name in reads
        or name in READ_AT_START_NAMES
        or name.startswith(READ_AT_START)
        or read_by_c(name)
    )


def _value(value: str | None) -> str:
    if value is None:
        return "not set"
    text = " ".join(value.split())
    return (text if len(text) <= 60 else f"{text[:57]}...") or "empty"
