"""What an import in the fork server does once, and what of it is made good in a rank.

- Environment variables that Python code reads while it is imported are recorded; a module that asks
  which rank it is may not be preloaded (`environment_watch`), but for a few that are told it
  again (`RANK_READERS`).
- The rank's environment is compared with what the server had when it imported; the moment is the
  script's own first import of the package. What can be read again is; for the rest the operator is
  told by name, and later lives of that script are exec'd (`EnvironmentCheck`).
- A preloaded module is shared by all ranks and is never freed: to free it, a rank would touch, and
  so copy, every page of it, which takes a second of a core for torch with its compiler. Nobody sees
  that, but for libraries that count what is left: bindings made with nanobind (triton's) print
  every object of theirs that is alive when the interpreter has ended, where any *instance* is. Such
  instances are default arguments of its functions. So the functions go (`prepare_end`).
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from types import FrameType, ModuleType
from typing import Any, Final

from elasticrun.wire.env import LOCAL_RANK, RANK

_LOOKUP_FILES = ("os.py", "_collections_abc.py")

_FOR_OTHERS: Final = ("get_terminal_size", "_setup_logger", "get_logger")
"""Functions (shutil's, torch.distributed.elastic's) that read a variable for who calls them."""

_MENU: Final = "/accelerate/commands/menu/"

READERS: Final = {"LOGLEVEL": "/torch/distributed/", "COLUMNS": _MENU, "LINES": _MENU}
"""Variables that can be taken over where the import of no other file has read them. Terminals
differ in the size, and elasticrun itself reads LOGLEVEL."""


def add_reads(reads: dict[str, str], more: Mapping[str, str]) -> None:
    """The first reader of each variable, or the first by which it cannot be taken over."""
    reads |= {name: file for name, file in more.items() if _is_news(name, reads)}


def _is_news(name: str, reads: Mapping[str, str]) -> bool:
    return name not in reads or (name in READERS and READERS[name] in reads[name])


_LIGHTNINGS: Final = (RANK, LOCAL_RANK, "SLURM_PROCID", "JSM_NAMESPACE_RANK")

RANK_READERS: Final[Mapping[str, tuple[str, ...]]] = {
    "torchmetrics.utilities.prints": (LOCAL_RANK,),
    "lightning.fabric.utilities.rank_zero": _LIGHTNINGS,
    "lightning_fabric.utilities.rank_zero": _LIGHTNINGS,
}
"""Modules that ask for the rank while they are imported, only to set `rank_zero_only.rank` to the
first of these variables that there is, else to 0; a rank does that again."""


@contextlib.contextmanager
def environment_watch() -> Iterator[dict[str, str]]:
    """The reads of os.environ in this block: name -> file that read it.

    A walk over the whole environment (tqdm looks for names that begin with TQDM_) is no interest
    in every name and is not recorded.
    """
    cls: Any = type(os.environ)
    original = cls.__getitem__
    reads: dict[str, str] = {}

    def watched(environ: Any, name: Any) -> Any:
        if isinstance(name, str) and _is_news(name, reads):
            reader = _reader(sys._getframe(1))
            if reader is not None and not _is_renewed(reader, name):
                reads[name] = reader
        return original(environ, name)

    cls.__getitem__ = watched
    try:
        yield reads
    finally:
        cls.__getitem__ = original


def _is_renewed(reader: str, variable: str) -> bool:
    return any(
        variable in variables and reader.endswith(f"{os.sep}{name.replace('.', os.sep)}.py")
        for name, variables in RANK_READERS.items()
    )


def renew_ranks(packages: Collection[str]) -> None:
    """In a rank that has just imported these: what RANK_READERS set is its own rank."""
    for name, variables in RANK_READERS.items():
        if name.partition(".")[0] in packages and name in sys.modules:
            module: Any = sys.modules[name]
            rank = next((os.environ[one] for one in variables if one in os.environ), "0")
            module.rank_zero_only.rank = int(rank)


def _reader(frame: FrameType | None) -> str | None:
    """The file that wanted to know, or None where a view of the whole environment asked."""
    while frame is not None:
        code = frame.f_code
        plain = code.co_filename.removesuffix(">").removeprefix("<frozen ")
        name = os.path.basename(plain)
        looks_up = name in _LOOKUP_FILES or plain in ("os", "_collections_abc")
        if not looks_up and code.co_name not in _FOR_OTHERS:
            return code.co_filename
        if code.co_name in ("__iter__", "copy"):
            return None
        frame = frame.f_back
    return None


# fmt: off
C_READS: Final[Mapping[str, frozenset[str]]] = {
    "numpy": frozenset(
        {
            "GOTO_NUM_THREADS", "NPY_DISABLE_CPU_FEATURES", "NPY_ENABLE_CPU_FEATURES",
            "NUMPY_WARN_IF_NO_MEM_POLICY", "OPENBLAS_BLOCK_FACTOR", "OPENBLAS_CORETYPE",
            "OPENBLAS_DEFAULT_NUM_THREADS", "OPENBLAS_L2_SIZE", "OPENBLAS_NUM_THREADS",
            "OPENBLAS_THREAD_TIMEOUT", "OPENBLAS_VERBOSE",
        }
    ),
    "torch": frozenset(
        {
            "ACC_DEVICE_NUM", "ACC_DEVICE_TYPE", "DNNL_DEFAULT_FPMATH_MODE", "GOMP_CPU_AFFINITY",
            "GOMP_DEBUG", "GOMP_OPENACC_DIM", "GOMP_SPINCOUNT", "GOMP_STACKSIZE",
            "INTEL_LIBITTNOTIFY64", "I_MPI_NUMBER_OF_MPI_PROCESSES_PER_NODE", "I_MPI_PIN_MAPPING",
            "I_MPI_THREAD_LEVEL", "KINETO_USE_DAEMON", "KMP_AFFINITY", "KMP_BLOCKTIME",
            "MKLDNN_CPU_ISA_HINTS", "MKLDNN_DEFAULT_FPMATH_MODE", "MKLDNN_ITT_TASK_LEVEL",
            "MKLDNN_JIT_PROFILE", "MKLDNN_MAX_CPU_ISA", "MKLDNN_PRIMITIVE_CACHE_CAPACITY",
            "MKLDNN_SC_SOFT_STACK_LIMIT", "MKLDNN_SC_STACK_SIZE", "MKLDNN_VERBOSE",
            "MKLDNN_VERBOSE_TIMESTAMP", "MKL_DISABLE_FAST_MM", "MKL_DOMAIN_NUM_THREADS",
            "MKL_DYNAMIC", "MKL_FAST_MEMORY_LIMIT", "MKL_MPI_PPN", "MKL_NUM_STRIPES",
            "MKL_NUM_THREADS", "MPI_LOCALNRANKS", "OMPI_COMM_WORLD_LOCAL_SIZE", "OMP_ADAPTIVE",
            "OMP_AFFINITY_FORMAT", "OMP_CANCELLATION", "OMP_DEFAULT_DEVICE", "OMP_DISPLAY_AFFINITY",
            "OMP_DISPLAY_ENV", "OMP_DYNAMIC", "OMP_MAX_ACTIVE_LEVELS", "OMP_MAX_TASK_PRIORITY",
            "OMP_NESTED", "OMP_NUM_THREADS", "OMP_PLACES", "OMP_PROC_BIND", "OMP_SCHEDULE",
            "OMP_STACKSIZE", "OMP_THREAD_LIMIT", "OMP_WAIT_POLICY", "ONEDNN_DEFAULT_FPMATH_MODE",
            "PYTORCH_API_USAGE_STDERR", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE",
            "TORCH_BLAS_PREFER_CUBLASLT", "TORCH_BLAS_PREFER_HIPBLASLT", "TORCH_CPP_LOG_LEVEL",
            "TORCH_CUSTOM_TERMINATE", "TORCH_DISTRIBUTED_DEBUG", "TORCH_LINALG_PREFER_CUSOLVER",
            "TORCH_LINALG_PREFER_HIPSOLVER", "TORCH_ROCM_FA_PREFER_CK",
            "TORCH_SHOW_CPP_STACKTRACES", "TORCH_SYMMMEM",
        }
    ),
}
# fmt: on
"""What C code reads while torch 2.13.0 (CPU) and numpy 2 are imported, seen by interposing
getenv; a test does so again for the installed torch and says which names are new."""

C_READS_OF_NO_INTEREST: Final = ("GFORTRAN_", "OPENSSL_", "PYTHON")
"""Beginnings of further names it reads: Fortran's own I/O, OpenSSL's files, the interpreter's."""


def _set_threads(value: str | None) -> None:
    import torch

    first = (value or "").split(",")[0]
    count = int(first) if first.isdigit() and int(first) > 0 else len(os.sched_getaffinity(0))
    torch.set_num_threads(count)
    _set_openblas_threads(value)


def _set_openblas_threads(value: str | None) -> None:
    import ctypes

    limit = len(os.sched_getaffinity(0))
    count = min(int(value), limit) if value and value.isdigit() and int(value) > 0 else limit
    for path in _mapped_libraries("openblas"):
        library = ctypes.CDLL(path)
        for name in (
            "scipy_openblas_set_num_threads64_",
            "scipy_openblas_set_num_threads",
            "openblas_set_num_threads64_",
            "openblas_set_num_threads",
        ):
            if hasattr(library, name):
                getattr(library, name)(count)
                break


def _mapped_libraries(word: str) -> set[str]:
    with open("/proc/self/maps", encoding="utf-8", errors="surrogateescape") as maps:
        paths = {line.rstrip("\n").partition("/")[2] for line in maps if "/" in line}
    return {"/" + path for path in paths if word in os.path.basename(path)}


def _set_debug_level(_: str | None) -> None:
    import torch.distributed as dist

    if dist.is_available():
        dist.set_debug_level_from_env()  # type: ignore[attr-defined]


def _set_tf32(value: str | None) -> None:
    import torch

    torch.set_float32_matmul_precision("high" if value == "1" else "highest")


def _set_logs(_: str | None) -> None:
    import torch._logging._internal as internal

    internal._init_logs()


def _set_levels(value: str | None) -> None:
    import logging

    torchs = ("torch.distributed.elastic.", "torch.distributed.launcher.", "torch.distributed.run")
    for name, each in [*logging.root.manager.loggerDict.items()]:
        # others of torch.distributed have their levels from TORCH_LOGS
        if name.startswith(torchs) and isinstance(each, logging.Logger) and each.level:
            each.setLevel("WARNING" if value is None else value)


def _set_width(_: str | None) -> None:
    import shutil

    with contextlib.suppress(KeyError, AttributeError):  # the rank has it from its own import
        commands: Any = sys.modules["accelerate"].commands  # that itself may not be back yet
        commands.menu.helpers.TERMINAL_WIDTH = shutil.get_terminal_size()[0]


REREAD: Final[Mapping[str, Callable[[str | None], None]]] = {
    "OMP_NUM_THREADS": _set_threads,
    "MKL_NUM_THREADS": _set_threads,
    "OPENBLAS_NUM_THREADS": _set_openblas_threads,
    "TORCH_DISTRIBUTED_DEBUG": _set_debug_level,
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE": _set_tf32,
    "TORCH_LOGS": _set_logs,
    "TORCH_LOGS_OUT": _set_logs,
    "TORCH_LOGS_FORMAT": _set_logs,
    "TORCH_LOGS_TRACE_ID_FILTER": _set_logs,
    "TORCH_TRACE": _set_logs,
    "TORCH_DTRACE": _set_logs,
    "LOGLEVEL": _set_levels,
    "COLUMNS": _set_width,
    "LINES": _set_width,
}
"""What can be taken over after the import, and how."""


def can_be_read_again(name: str, reads: Mapping[str, str], value: str | None) -> bool:
    """Whether a variable can be taken over with this value. torch's import raises on a LOGLEVEL
    that is no level of `logging`, which nobody can do afterwards."""
    if name == "LOGLEVEL" and value is not None:
        import logging

        if not logging.getLevelNamesMapping().get(value):  # NOTSET: as if it was never set
            return False
    return name in REREAD and READERS.get(name, "") in reads.get(name, "")


FORBIDDEN_IN_TEXT: Final = frozenset(
    name
    for names in C_READS.values()
    for name in names
    if name not in REREAD and not name.startswith(("ACC_", "I_MPI_", "MPI_", "OMPI_"))
) | {"cudaMallocAsync"}
"""A script whose text has one of these words is exec'd from the start."""


@dataclass
class EnvironmentCheck:
    """Compares the environment at the script's first import with that of the server's import."""

    reads: Mapping[str, str]  # names that Python code read, with the file
    first: Mapping[str, str]  # what it saw
    made: Mapping[str, str]
    """What the imports themselves put there (torch._inductor names its cache folder)."""
    checked: set[str] = field(default_factory=set)

    def changed(self, packages: Iterable[str]) -> list[str]:
        """Names that these packages read and that now have another value; each told once."""
        names: set[str] = set()
        for package in packages:
            names |= C_READS.get(package, frozenset())
            part, file = f"{os.sep}{package}{os.sep}", f"{os.sep}{package}.py"
            names |= {n for n, by in self.reads.items() if part in by or by.endswith(file)}
        names -= self.checked
        self.checked |= names
        now = {name: os.environ.get(name) for name in sorted(names)}
        changed = [n for n, value in now.items() if value != self.first.get(n)]
        return [n for n in changed if now[n] is None or now[n] != self.made.get(n)]

    def take_over(self, names: Iterable[str]) -> list[str]:
        """Read again what can be; the names of the rest."""
        left = []
        done: set[Any] = set()
        for name in names:
            again = REREAD.get(name)
            early = again is _set_threads and "torch" not in sys.modules
            if early or not can_be_read_again(name, self.reads, os.environ.get(name)):
                left.append(name)
            elif again is not None and again not in done:
                done.add(again)
                again(os.environ.get(name))
        return left


_NANOBIND = "nanobind"


def prepare_end(modules: Iterable[Any]) -> None:
    """Called in the server when all is imported. Ranks inherit what is registered here; what they
    register themselves runs before it."""
    types = list(_types())
    if types:
        owners = [each for each in modules if isinstance(each, ModuleType) and _functions(each)]
        atexit.register(_drop_functions, [*types, *owners])


def _drop_functions(owners: Iterable[Any]) -> None:
    for owner in owners:
        for name in _functions(owner):
            with contextlib.suppress(AttributeError, TypeError):  # a type that cannot be changed
                delattr(owner, name)


def _functions(owner: Any) -> list[str]:
    return [name for name, value in [*vars(owner).items()] if type(value).__module__ == _NANOBIND]


def _types() -> Iterator[type]:
    """All classes that are bound with nanobind. Its metaclasses tell whether there are any."""
    if not any(each.__module__ == _NANOBIND for each in type.__subclasses__(type)):
        return
    waiting = [each for each in object.__subclasses__() if _is_bound(each)]
    while waiting:
        each = waiting.pop()
        yield each
        waiting += [below for below in type.__subclasses__(each) if _is_bound(below)]


def _is_bound(each: type) -> bool:
    return type(type(each)).__module__ == _NANOBIND
