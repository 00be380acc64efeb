"""Records which environment variables imports read, and cleans up at the exit of a rank.

- Reads by Python code during an import are recorded (`environment_watch`). Reads by C code are
  known by name prefixes (`FAMILIES`).
- A rank must not use the server's import if its variables differ from those at that import
  (`Environment.changed`). This is checked at the script's own first import of the package.
- A preloaded module is shared by all ranks and is never freed: freeing it would touch, and so copy,
  all its pages, which takes one second of a core for torch with its compiler. Only
  libraries that count leaks notice: nanobind (used by triton) prints every bound object that is
  alive after the interpreter has ended, if any is an *instance* of a bound class. Default arguments
  of bound functions are such instances, so `prepare_end` deletes the functions at exit.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from types import FrameType, ModuleType
from typing import Any, Final

_STANDARD: Final = os.path.dirname(os.__file__) + os.sep
_OURS: Final = os.path.dirname(__file__) + os.sep
_INSTALLED: Final = f"{os.sep}site-packages{os.sep}"

WALKERS: Final = {f"{os.sep}tqdm{os.sep}": "TQDM_"}
"""Path parts of files that iterate over the whole environment at import, and the prefix of the
names that they look for.
"""

NUMPYS: Final = ("GFORTRAN_", "GOTO_", "NPY_", "NUMPY_", "OMP_", "OPENBLAS_")
"""Prefixes of names that numpy's C libraries read when they are loaded."""

FAMILIES: Final = (
    *(*NUMPYS, "ACC_", "AS_SECURE_", "BLIS_", "CASK_", "CUBLAS", "CUDA", "CUDNN", "DNNL_"),
    *("GLIBCXX_", "GOMP_", "HIP_", "HSA_", "INTEL_", "I_MPI_", "KINETO_", "KMP_", "LIBNVVM_"),
    *("LLVM_", "MKL", "MPI_", "NVRTC_", "NV_", "OMPI_", "ONEAPI_", "ONEDNN_", "OPENSSL_"),
    *("PYTORCH_", "ROC", "SYCL_", "TORCH", "VECLIB_", "XLA_", "ZE_"),
)
"""Prefixes of names that the C libraries of torch (2.8 to 2.15, with and without CUDA) and its
dependencies read when they are loaded: found by interposing getenv, which a test repeats for the
installed torch. A prefix also covers names that no torch is known to read, so that an unknown torch
errs on the safe side.
"""

READ_LATER: Final = (
    *("CUBLAS_WORKSPACE_CONFIG", "CUDA_CACHE_", "CUDA_DEVICE_", "CUDA_HOME", "CUDA_MODULE_LOADING"),
    *("CUDA_PATH", "CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "MKL_THREADING_LAYER"),
    *("TORCHDYNAMO_", "TORCHELASTIC_", "TORCHINDUCTOR_", "TORCH_CUDA_ARCH_LIST", "TORCH_DIST_INIT"),
    *("TORCH_ELASTIC_", "TORCH_EXTENSIONS_DIR", "TORCH_FR_", "TORCH_GLOO_", "TORCH_HOME"),
    *("PYTORCH_NVML_BASED_CUDA_CHECK", "TORCH_NCCL_", "TORCH_SHOW_DISPATCH_TRACE"),
)
"""Name prefixes within a family that C code does not read before the library is used, as observed.
If Python code reads one of them at import, that is recorded.
"""


def read_by_c(name: str, families: tuple[str, ...] = FAMILIES) -> bool:
    """Whether C code may read this variable at the import of torch (or of numpy, with `NUMPYS`)."""
    return name.startswith(families) and not name.startswith(READ_LATER)


class Walked(Exception):
    """An import has iterated over the whole environment, so its reads are unknown."""


@contextlib.contextmanager
def environment_watch() -> Iterator[dict[str, str]]:
    """The reads of os.environ in this block: name -> file that read it. Raises Walked at the end if
    a file not in WALKERS has iterated over all names."""
    cls: Any = type(os.environ)
    original, walk = cls.__getitem__, cls.__iter__
    reads: dict[str, str] = {}
    walkers: list[str] = []

    def watched(environ: Any, name: Any) -> Any:
        if isinstance(name, str) and name not in reads:
            reader = _reader(sys._getframe(1))
            if not any(part in reader for part in WALKERS):
                reads[name] = reader
        return original(environ, name)

    def walked(environ: Any) -> Any:
        walkers.append(_reader(sys._getframe(1)))
        return walk(environ)

    cls.__getitem__, cls.__iter__ = watched, walked
    try:
        yield reads
    finally:
        cls.__getitem__, cls.__iter__ = original, walk
    for walker in walkers:
        if not any(part in walker for part in WALKERS):
            raise Walked(f"{walker} reads the whole environment while it is imported")


def _reader(frame: FrameType | None) -> str:
    """The file that reads: that of the innermost frame outside the standard library."""
    innermost = ""
    while frame is not None:
        name = frame.f_code.co_filename
        if not name.startswith(("<frozen ", _OURS)):
            innermost = innermost or name
            if not name.startswith(_STANDARD) or _INSTALLED in name:
                return name
        frame = frame.f_back
    return innermost


@dataclass
class Environment:
    """The environment as the server's imports saw it."""

    saw: Mapping[str, str]
    reads: dict[str, str] = field(default_factory=dict)  # names read by Python code, and the file
    made: Mapping[str, str] = field(default_factory=dict)
    """Variables that the imports themselves have set."""

    def changed(self, packages: Collection[str], now: Mapping[str, str]) -> list[str]:
        """Names that the import of these packages reads and whose value has changed."""
        families: tuple[str, ...] = FAMILIES if "torch" in packages else ()
        if not families and "numpy" in packages:
            families = NUMPYS
        parts = tuple(f"{os.sep}{package}{os.sep}" for package in packages)
        ends = tuple(f"{os.sep}{package}.py" for package in packages)
        walks = tuple(begin for part, begin in WALKERS.items() if part in parts)

        def counts(name: str) -> bool:
            file = self.reads.get(name, "")
            read = any(part in file for part in parts) or file.endswith(ends)
            return read or name.startswith(walks) or read_by_c(name, families)

        return sorted(
            name
            for name in self.saw.keys() | now.keys()
            if now.get(name) != self.saw.get(name)
            and counts(name)
            and (name not in now or now[name] != self.made.get(name))
        )


_NANOBIND = "nanobind"


def prepare_end(modules: Iterable[Any], register: Callable[..., object]) -> None:
    """Register the cleanup at exit; called in the server after all imports. Ranks inherit the
    registration; their own atexit functions run first."""
    types = list(_types())
    if types:
        owners = [each for each in modules if isinstance(each, ModuleType) and _functions(each)]
        register(_drop_functions, [*types, *owners])


def _drop_functions(owners: Iterable[Any]) -> None:
    for owner in owners:
        for name in _functions(owner):
            with contextlib.suppress(AttributeError, TypeError):  # an immutable type
                delattr(owner, name)


def _functions(owner: Any) -> list[str]:
    return [name for name, value in [*vars(owner).items()] if type(value).__module__ == _NANOBIND]


def _types() -> Iterator[type]:
    """All classes bound with nanobind. Without one of nanobind's metaclasses there are none."""
    if not any(each.__module__ == _NANOBIND for each in type.__subclasses__(type)):
        return
    waiting = [each for each in object.__subclasses__() if _is_bound(each)]
    while waiting:
        each = waiting.pop()
        yield each
        waiting += [below for below in type.__subclasses__(each) if _is_bound(below)]


def _is_bound(each: type) -> bool:
    return type(type(each)).__module__ == _NANOBIND
