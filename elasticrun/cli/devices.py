"""How many accelerators and cores this node has, found out without importing torch here.

Drivers are asked in a throw-away child with a time limit: loading libcuda or torch into the agent
would cost memory for the life of the job, and a driver that hangs would hang it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Final, NamedTuple

from elasticrun.cli.values import UsageError

NVML_LIMIT: Final = 20.0
"""Seconds for asking NVML; a node of eight GPUs without persistence mode takes about ten."""

TORCH_LIMIT: Final = 120.0
"""Seconds for importing torch in a child and asking it; shared file systems are slow."""

_NVML_CHILD: Final = """
import json, pynvml
pynvml.nvmlInit()
uuids, mig = [], False
for index in range(pynvml.nvmlDeviceGetCount()):
    handle = pynvml.nvmlDeviceGetHandleByIndex(index)
    uuid = pynvml.nvmlDeviceGetUUID(handle)
    uuids.append(uuid if isinstance(uuid, str) else uuid.decode())
    try:
        mig = mig or pynvml.nvmlDeviceGetMigMode(handle)[0] == 1
    except pynvml.NVMLError:
        pass
print(json.dumps({"uuids": uuids, "mig": mig}))
"""

_TORCH_CHILD: Final = """
import json, sys, torch
word = sys.argv[1]
if word == "auto":
    accelerator = getattr(torch, "accelerator", None)
    if accelerator is None:
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    else:
        count = accelerator.device_count() if accelerator.is_available() else 0
    known = True
else:
    module = getattr(torch, {"gpu": "cuda"}.get(word, word), None)
    private = torch._C._get_privateuse1_backend_name()
    known = word in ("gpu", "xpu") or word == private
    count = module.device_count() if known and module and module.is_available() else 0
print(json.dumps({"known": known, "count": count}))
"""


class Machine(NamedTuple):
    """What resolving needs to know of this machine; tests hand in one of their own.

    `cores()` counts the cores this process may use. `accelerators(word)` counts the devices that
    `gpu`, `xpu`, `auto` or a private backend's name means, and returns None for a word that no
    installed torch knows; `say` hears one sentence when that takes long.
    """

    cores: Callable[[], int]
    accelerators: Callable[[str], int | None]
    entry_points: Callable[[str], Iterable[str]]  # names in a group


class Build(NamedTuple):
    """What the installed torch was built for; "" where it was not (or where there is no torch)."""

    cuda: str = ""
    hip: str = ""
    xpu: str = ""


def this_machine(
    environ: Mapping[str, str] | None = None,
    say: Callable[[str], None] = lambda sentence: None,
) -> Machine:
    """The machine we run on; nothing is asked of it before it is needed."""
    variables = os.environ if environ is None else environ
    return Machine(
        cores=cores,
        accelerators=lambda word: count_accelerators(word, variables, say),
        entry_points=entry_points,
    )


def cores() -> int:
    """Cores that this process may be scheduled on, as torch counts them."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def entry_points(group: str) -> list[str]:
    """Names of the installed plug-ins of a group."""
    import importlib.metadata

    return [point.name for point in importlib.metadata.entry_points(group=group)]


def torch_build(folder: str | None = None) -> Build:
    """What torch was built for, read from its version.py without importing it."""
    if folder is None:
        import importlib.util

        spec = importlib.util.find_spec("torch")
        if spec is None or spec.origin is None:
            return Build()
        folder = os.path.dirname(spec.origin)
    import ast

    words: dict[str, str] = {}
    try:
        with open(os.path.join(folder, "version.py"), encoding="utf-8") as file:
            tree = ast.parse(file.read())
    except (OSError, SyntaxError, ValueError):
        return Build()
    for node in tree.body:
        target = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", None)
        value = getattr(node, "value", None)
        if isinstance(target, ast.Name) and isinstance(value, ast.Constant):
            words[target.id] = value.value if isinstance(value.value, str) else ""
    return Build(words.get("cuda", ""), words.get("hip", ""), words.get("xpu", ""))


def count_accelerators(
    word: str, environ: Mapping[str, str], say: Callable[[str], None]
) -> int | None:
    """How many devices `word` (gpu, xpu, auto, a private backend) means on this node.

    None where no torch knows the word. CUDA devices are counted by NVML; everything else by a
    child that imports torch, which takes seconds and is said.
    """
    build = torch_build()
    common = word in ("gpu", "xpu", "auto")
    plugins = word not in ("gpu", "xpu") and bool(entry_points("torch.backends"))
    if word in ("gpu", "auto") and build.cuda and not plugins:
        counted = _cuda_devices(environ)
        if counted is not None:
            return counted
    possible = {
        "gpu": bool(build.cuda or build.hip),
        "xpu": bool(build.xpu),
        "auto": bool(plugins or build.cuda or build.hip or build.xpu) or sys.platform == "darwin",
    }
    if not possible.get(word, plugins):  # a plug-in of torch.backends names a private backend
        return 0 if common else None
    return _ask_torch(word, environ, say)


def visible(listed: str | None, uuids: list[str]) -> int | None:
    """How many of these GPUs CUDA_VISIBLE_DEVICES leaves, as CUDA reads it.

    The list ends at the first entry that names no device, and a device named twice empties it.
    None where it names MIG instances, which NVML's list of GPUs does not have.
    """
    if listed is None:
        return len(uuids)
    seen: list[int] = []
    for entry in (item.strip() for item in listed.split(",")):
        if entry.startswith("MIG-"):
            return None
        index = _device_index(entry, uuids)
        if index is None:
            break
        if index in seen:
            return 0
        seen.append(index)
    return len(seen)


def _device_index(entry: str, uuids: list[str]) -> int | None:
    """The GPU that one entry names: by the number it begins with, or the start of its UUID."""
    if entry.startswith("GPU-"):
        matches = [index for index, uuid in enumerate(uuids) if uuid.startswith(entry)]
        return matches[0] if len(matches) == 1 else None
    sign = entry[:1] in ("+", "-")
    digits = ""
    for letter in entry[sign:]:
        if letter not in "0123456789":
            break
        digits += letter
    if not digits or entry.startswith("-"):
        return None
    return int(digits) if int(digits) < len(uuids) else None


def _cuda_devices(environ: Mapping[str, str]) -> int | None:
    """Visible CUDA devices by NVML; 0 without a driver, None where only CUDA itself can tell."""
    listed = environ.get("CUDA_VISIBLE_DEVICES")
    if listed is not None and not listed.strip():
        return 0
    answer = _child([sys.executable, "-P", "-c", _NVML_CHILD], environ, NVML_LIMIT)
    if answer is None:
        return 0 if not _has_nvidia_driver() else None
    uuids = answer.get("uuids")
    if not isinstance(uuids, list) or answer.get("mig"):
        return None
    return visible(listed, [str(uuid) for uuid in uuids])


def _has_nvidia_driver() -> bool:
    return any(os.path.exists(path) for path in ("/proc/driver/nvidia/version", "/dev/nvidiactl"))


def _ask_torch(word: str, environ: Mapping[str, str], say: Callable[[str], None]) -> int | None:
    say(f"--nproc-per-node={word}: asking torch in a process of its own, which takes a while")
    answer = _child([sys.executable, "-P", "-c", _TORCH_CHILD, word], environ, TORCH_LIMIT)
    if answer is None:
        raise UsageError(
            f"--nproc-per-node={word}: torch could not be asked for its devices; give a number"
        )
    count = answer.get("count")
    return count if answer.get("known") and isinstance(count, int) else None


def _child(
    command: list[str], environ: Mapping[str, str], limit: float
) -> dict[str, object] | None:
    """One JSON object from a throw-away child, None where it fails or takes longer than `limit`."""
    import json
    import subprocess

    try:
        done = subprocess.run(
            command, env=dict(environ), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL, timeout=limit, check=True, start_new_session=True,
        )  # fmt: skip
        answer = json.loads(done.stdout.splitlines()[-1])
    except (OSError, subprocess.SubprocessError, ValueError, IndexError):
        return None
    return answer if isinstance(answer, dict) else None
