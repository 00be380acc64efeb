"""Real containers: `runc` with this machine's own root as the file system, so that no image is
needed. Each has a network, processes, /dev/shm, /tmp and limits of its own; its command is process
1.

What it writes to its root goes with it. The folders of the test are volumes, at the paths that they
have outside. A container does not outlive the process of the tests: a keeper ends what is in its
cgroup.
"""

from __future__ import annotations

import json
import os
import select
import shutil
import signal
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pytest

from elasticrun.testing import cgroups, processes
from elasticrun.testing.hosts import Impossible
from tests import needs
from tests.harness import LIMIT, MARK, PATIENT, SOCKET, Launched, World, passed, until_file

PATH: Final = f"{Path(sys.executable).parent}:/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin"
MIB: Final = 1 << 20
PROGRAMS: Final = sorted({Path(sys.prefix), Path(sys.base_prefix), Path(__file__).parents[2]})
"""Where everything is that a job runs."""

ENTER: Final = (
    "bundle=$1 name=$2; shift 2; "
    'mount -t overlay overlay -o "lowerdir=/,upperdir=$bundle/upper,workdir=$bundle/work" '
    '"$bundle/rootfs" && for closed; do chmod o+x "$bundle/rootfs/$closed" || exit; done && '
    'exec runc --root "$bundle/state" run --bundle "$bundle" --pid-file "$bundle/pid" "$name"'
)
"""Run in a mount namespace of its own, which takes the overlay with it. Arguments: bundle, name,
and folders that users must be able to go through, for which the real ones are not touched."""

CAPABILITIES: Final = ("CHOWN", "DAC_OVERRIDE", "FOWNER", "KILL", "SETGID", "SETUID", "SYS_CHROOT")
"""What container engines give to a container's root, as far as it matters here."""


@dataclass(frozen=True)
class Wanted:
    """How a container shall be."""

    memory: int | None = None
    """Bytes, beyond which the kernel kills."""
    cpus: float | None = None
    """Cores' worth of time."""
    shm: int = 64 * MIB
    """Bytes of /dev/shm; 64 MiB is what engines give if nobody asks."""
    shm_volume: Path | None = None
    """A folder that is /dev/shm instead, and outlives the container as a pod's emptyDir does."""
    read_only: bool = False
    """Whether the root cannot be written."""
    user: int = 0
    home: str | None = "/root"
    """$HOME; None: there is no such variable."""


class Container:
    """One that was started by `start`."""

    def __init__(self, world: World, wanted: Wanted) -> None:
        self._world = world
        self._wanted = wanted
        self.name = processes.new_name("container")
        self.bundle = world.scratch / self.name
        self._keeper = processes.start_keeper(cgroups.__name__, self.name)
        self.launched: Launched

    def start(self, command: list[str], env: dict[str, str]) -> None:
        """Returns when process 1 was started."""
        for folder in ("upper", "work", "rootfs", "state"):
            (self.bundle / folder).mkdir(parents=True)
        self.bundle.chmod(0o755)
        (self.bundle / "hosts").write_text(f"127.0.0.1 localhost\n127.0.1.1 {self.hostname}\n")
        described = self._config(command, env)
        (self.bundle / "config.json").write_text(json.dumps(described))
        closed = {str(p) for program in PROGRAMS for p in program.parents if not _open(p)}
        enter = ("unshare", "--mount", "sh", "-c", ENTER, "sh", str(self.bundle), self.name)
        self.launched = self._world.command((*enter, *sorted(closed)), env={"PATH": PATH})

    @property
    def hostname(self) -> str:
        return "box"

    def _config(self, command: list[str], env: dict[str, str]) -> dict[str, Any]:
        wanted = self._wanted
        told = {
            "PATH": PATH,
            MARK: self._world.marker,
            SOCKET: self._world.hub.path,
            **({"HOME": wanted.home} if wanted.home is not None else {}),
            **env,
        }
        capabilities = [f"CAP_{name}" for name in CAPABILITIES] if wanted.user == 0 else []
        spaces = ("pid", "ipc", "uts", "mount", "network")
        resources: dict[str, Any] = {}
        if wanted.memory is not None:
            resources["memory"] = {"limit": wanted.memory}
        if wanted.cpus is not None:
            resources["cpu"] = {
                "quota": int(wanted.cpus * cgroups.PERIOD_US),
                "period": cgroups.PERIOD_US,
            }
        return {
            "ociVersion": "1.0.2",
            "hostname": self.hostname,
            "root": {"path": "rootfs", "readonly": wanted.read_only},
            "process": {
                "user": {"uid": wanted.user, "gid": wanted.user},
                "args": command,
                "env": [f"{name}={value}" for name, value in told.items()],
                "cwd": "/",
                "noNewPrivileges": True,
                "capabilities": dict.fromkeys(("bounding", "effective", "permitted"), capabilities),
            },
            "mounts": [*self._mounts(), *self._volumes()],
            "linux": {
                "namespaces": [{"type": kind} for kind in spaces],
                "cgroupsPath": f"/{self.name}",
                "resources": resources,
            },
        }

    def _mounts(self) -> list[dict[str, Any]]:
        kept = self._wanted.shm_volume
        shm = _mount("tmpfs", "/dev/shm", "mode=1777", f"size={self._wanted.shm}")
        return [
            _mount("proc", "/proc"),
            _mount("tmpfs", "/dev", "nosuid", "mode=755"),
            shm if kept is None else _bind(str(kept), "/dev/shm"),
            _mount("sysfs", "/sys", "ro"),
            _mount("cgroup", "/sys/fs/cgroup", "ro"),
            _mount("tmpfs", "/tmp", "mode=1777"),
            _bind(str(self.bundle / "hosts"), "/etc/hosts", "ro"),
        ]

    def _volumes(self) -> list[dict[str, Any]]:
        """The folders of the test, and those of the programs that the container's /tmp hides or
        that are on another file system than the root."""
        own = [self._world.scratch, Path(self._world.hub.folder)]
        root = os.stat("/").st_dev
        hidden = [p for p in PROGRAMS if Path("/tmp") in p.parents or p.stat().st_dev != root]
        return [
            *(_bind(str(path), str(path)) for path in own),
            *(_bind(str(path), str(path), "ro") for path in hidden),
        ]

    # ------------------------------------------------------------ while it runs

    @property
    def pid(self) -> int:
        """Process 1, as this machine numbers it; waits until it is there."""
        return int(until_file(self.bundle / "pid", str.strip))

    def pids(self) -> list[int]:
        """All processes in it, zombies aside."""
        return cgroups.members(self.name)

    def signal(self, signum: int) -> None:
        """What `docker stop` and a kubelet send."""
        os.kill(self.pid, signum)

    def stop(self, grace: float) -> int:
        """A kubelet's end of a pod: SIGTERM to process 1, SIGKILL `grace` seconds later where it is
        still there. The exit code."""
        process = os.pidfd_open(self.pid)
        signal.pidfd_send_signal(process, signal.SIGTERM)
        if not select.select([process], [], [], grace)[0]:
            signal.pidfd_send_signal(process, signal.SIGKILL)
        os.close(process)
        return self.launched.wait()

    def run(self, *command: str) -> str:
        """Start a command in it beside process 1, as `kubectl exec` does; what it prints."""
        words = ("runc", "--root", str(self.bundle / "state"), "exec", self.name, *command)
        done = subprocess.run(
            words,
            env={"PATH": PATH},
            capture_output=True,
            text=True,
            timeout=LIMIT,
            check=True,
        )
        return done.stdout.strip()

    # ------------------------------------------------------------ the end

    def close(self) -> None:
        """Kill what is left in it and remove it."""
        processes.kill_all(self.pids, LIMIT)
        self.launched.wait()
        cgroups.remove(self.name)
        self._keeper.communicate()
        shutil.rmtree(self.bundle)


def _mount(kind: str, where: str, *options: str) -> dict[str, Any]:
    return {"destination": where, "type": kind, "source": kind, "options": list(options)}


def _bind(source: str, where: str, *options: str) -> dict[str, Any]:
    told = ["bind", *options]
    return {"destination": where, "type": "bind", "source": source, "options": told}


def _open(folder: Path) -> bool:
    """Whether everybody may go through it."""
    return bool(folder.stat().st_mode & stat.S_IXOTH)


Box = Callable[..., Container]


@pytest.fixture(scope="session")
def why_none(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Why there can be no containers here, "" if there can: found out by one that does nothing."""
    if os.geteuid() != 0:
        return "that needs root"
    if shutil.which("runc", path=PATH) is None:
        return "there is no runc (Debian: runc)"
    try:
        cgroups.require()
    except Impossible as why:
        return str(why)
    world = World(tmp_path_factory.mktemp("container"))
    first = Container(world, Wanted(memory=64 * MIB, cpus=1.0))
    try:
        first.start(["true"], {})
        return first.launched.stderr.strip() or "runc fails" if first.launched.wait() else ""
    finally:
        first.close()
        world.close(strict=False)


@pytest.fixture
def box(world: World, why_none: str, request: pytest.FixtureRequest) -> Iterator[Box]:
    """Starts `elasticrun` with the given words in a container; `Wanted`'s fields say how it is."""
    if why_none:
        needs.lacking(f"no containers here: {why_none}")
    started: list[Container] = []

    def start(
        *words: str,
        program: tuple[str, ...] = ("elasticrun",),
        env: dict[str, str] | None = None,
        **wanted: Any,
    ) -> Container:
        made = Container(world, Wanted(**wanted))
        started.append(made)
        made.start([*program, *words], {"LOGLEVEL": "INFO", **PATIENT, **(env or {})})
        return made

    yield start
    for one in started:
        one.close()
        if not passed(request):
            print(f"--- {one.launched.stdout}\n--- {one.launched.stderr}")
