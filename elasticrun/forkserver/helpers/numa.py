"""`--numa-binding`: torch chooses the cores of a rank (torch.numa, torch 2.9 and newer).

torch queries CUDA for the location of the GPU. torchrun does that in its launcher, so CUDA is still
uninitialized when the script starts. Here a child of the new rank does it, for the same reason.
Ranks that run a function call `bound`, because torch binds their process itself.
"""

from __future__ import annotations

import inspect
import json
import os
import signal
import sys
from collections.abc import Callable
from typing import Any

from elasticrun.host.system import processes

CORES, WHY = "cores", "why"

ANSWER_LIMIT = 120
"""Seconds for torch's answer. CUDA takes several on a host with eight GPUs, and a driver that hangs
never answers."""


class NotBound(Exception):
    """torch found no cores for this rank; the text is one sentence."""


def bound(function: Callable[..., Any], mode: str, local_rank: int, *, may_fail: bool) -> Any:
    """Wrap the function so that torch binds its process first. With `may_fail` it runs unbound if
    binding fails. Imports torch. Raises NotBound if torch is too old."""
    import torch

    try:
        from torch.numa import binding
    except ModuleNotFoundError:
        words = f"--numa-binding needs torch 2.9 or newer, not torch {torch.__version__}"
        raise NotBound(words) from None
    # torch 2.9 names it without the underscore
    name = "maybe_wrap_with_numa_binding"
    wrap = getattr(binding, f"_{name}", None) or getattr(binding, name)
    options = binding.NumaOptions(binding.AffinityMode(mode), may_fail)
    # torch 2.14 renamed gpu_index
    names = inspect.signature(wrap).parameters
    index = "gpu_index" if "gpu_index" in names else "device_index"
    return wrap(function, numa_options=options, **{index: local_rank})


def cores(mode: str, local_rank: int, *, may_fail: bool) -> set[int]:
    """The cores to which torch binds this local rank. Raises NotBound. torch's error output goes to
    this process's stderr. Blocks while torch is imported and CUDA is initialized."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            processes.die_with_parent(signal.SIGKILL)
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(ANSWER_LIMIT)
            os.write(writing, json.dumps(_answer(mode, local_rank, may_fail)).encode())
        finally:
            os._exit(0)
    os.close(writing)
    with open(reading, "rb") as pipe:
        output = pipe.read()
    _, status = os.waitpid(pid, 0)
    if not output:
        how = os.waitstatus_to_exitcode(status)
        if how == -signal.SIGALRM:
            raise NotBound(f"--numa-binding={mode}: torch has no answer after {ANSWER_LIMIT} s")
        raise NotBound(f"--numa-binding={mode}: the process that queries torch exited with {how}")
    answer = json.loads(output)
    if WHY in answer:
        raise NotBound(answer[WHY])
    return set(answer[CORES])


def _answer(mode: str, local_rank: int, may_fail: bool) -> dict[str, Any]:
    try:
        find = bound(lambda: os.sched_getaffinity(0), mode, local_rank, may_fail=may_fail)
        return {CORES: sorted(find())}
    except NotBound as error:
        return {WHY: str(error)}
    except Exception as error:
        return {WHY: f"--numa-binding={mode}: {type(error).__name__}: {error}"[:500]}
    finally:
        sys.stderr.flush()
