"""Counts this node's accelerators and cores without importing torch in this process.

The counts resolve the words of --nproc-per-node. `host.accelerators` counts GPUs; what only torch
knows comes from a short-lived child with a time limit. Torch in the agent would take memory for as
long as the job runs.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Final

from elasticrun.cli.detection.found import Machine
from elasticrun.cli.rendezvous import SHARED_VARIABLE
from elasticrun.cli.settings import NotHere
from elasticrun.host.accelerators.base import cores as all_cores, torch_build
from elasticrun.host.accelerators.child_output import NoAnswer, json_of
from elasticrun.host.accelerators.nvidia import Nvidia
from elasticrun.host.system.processes import user_name
from elasticrun.host.user_folder import network_file_system

if TYPE_CHECKING:
    from elasticrun.cli.detection.found import HostFacts

TORCH_LIMIT: Final = 120.0
"""Seconds for a child to import torch and count; shared file systems are slow."""

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


def this_machine(
    environ: Mapping[str, str] | None = None,
    notify: Callable[[str], None] = lambda sentence: None,
) -> Machine:
    """This machine; facts that take time are determined only when they are used. `notify` prints a
    line for the user if one takes seconds."""
    variables = os.environ if environ is None else environ
    return Machine(
        cores=lambda: cores(notify),
        accelerators=lambda word: count_accelerators(word, variables, notify),
        entry_points=entry_points,
        shared=lambda folder: shared_folder(folder, variables),
        user=user_name(),
    )


def shared_folder(folder: str, environ: Mapping[str, str]) -> str:
    """The name of the network file system that contains the folder, "" if there is none or it
    cannot be determined. Folders in $ELASTICRUN_SHARED always count as shared."""
    where = os.path.realpath(folder)
    for named in filter(None, environ.get(SHARED_VARIABLE, "").split(":")):
        top = os.path.realpath(named)
        if os.path.commonpath([top, where]) == top:
            return f"${SHARED_VARIABLE}"
    try:
        return network_file_system(Path(where))
    except OSError:
        return ""


def facts(environ: Mapping[str, str]) -> HostFacts:
    """Facts that detection needs besides the environment. The full host name is looked up only in
    pods, where the kubelet has written it to /etc/hosts: elsewhere DNS may be slow."""
    from elasticrun.cli.detection.found import HostFacts

    try:
        terminal = sys.stdin is not None and sys.stdin.isatty()
    except ValueError:  # stdin is closed
        terminal = False
    name = socket.gethostname()
    pod = "KUBERNETES_SERVICE_HOST" in environ or "JOB_COMPLETION_INDEX" in environ
    return HostFacts(terminal, name, socket.getfqdn(name) if pod else name)


def cores(notify: Callable[[str], None], quota: float | None = None) -> int:
    """The number of cores for ranks, at least 1: all that torch counts, or fewer if the container's
    CPU quota allows only these, which the user is notified of. `quota`: in cores; None: look it
    up."""
    from elasticrun.host.doctor.resources import cpu_quota

    counted = all_cores()
    quota = quota or cpu_quota()
    if quota is None or quota >= counted:
        return counted
    enough = max(1, int(quota))
    notify(
        f"this host has {counted} cores, but this container has CPU time for {quota:.4g}: "
        f"counting {enough}"
    )
    return enough


def entry_points(group: str) -> list[str]:
    """Names of the installed plug-ins of a group."""
    import importlib.metadata

    return [point.name for point in importlib.metadata.entry_points(group=group)]


def count_accelerators(
    word: str, environ: Mapping[str, str], notify: Callable[[str], None]
) -> int | None:
    """The number of devices that `word` (gpu, xpu, auto, a private backend) means on this node.

    None if torch does not know the word. NVML counts CUDA devices; for everything else a child
    imports torch, which takes seconds and is announced. Raises NotHere if the child fails.
    """
    build = torch_build()
    common = word in ("gpu", "xpu", "auto")
    plugins = word not in ("gpu", "xpu") and bool(entry_points("torch.backends"))
    if word in ("gpu", "auto") and build.cuda and not plugins:
        counted = Nvidia().count(environ)
        if counted is not None:
            return counted
    possible = {
        "gpu": bool(build.cuda or build.hip),
        "xpu": bool(build.xpu),
        "auto": bool(plugins or build.cuda or build.hip or build.xpu) or sys.platform == "darwin",
    }
    if not possible.get(word, plugins):  # a plug-in of torch.backends names a private backend
        return 0 if common else None
    return _query_torch(word, environ, notify)


def _query_torch(
    word: str, environ: Mapping[str, str], notify: Callable[[str], None]
) -> int | None:
    notify(
        f"--nproc-per-node={word}: asking torch in a separate process, which takes a few seconds"
    )
    command = [sys.executable, "-P", "-c", _TORCH_CHILD, word]
    try:
        answer = json_of(command, environ, TORCH_LIMIT)
    except NoAnswer as why:
        raise NotHere(
            f"--nproc-per-node={word}: torch could not count its devices ({why}); use a number"
        ) from None
    count = answer.get("count")
    return count if answer.get("known") and isinstance(count, int) else None
