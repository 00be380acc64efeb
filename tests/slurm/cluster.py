"""A real Slurm on machines made of network namespaces: `login`, where the controller is and users
type, and the compute nodes `n1`, `n2`, ... Each node has a /dev/shm and a local disk of its own,
which go with it; the folder of the test is what all share.

`SlurmdTimeout` is Slurm's own default of five minutes, so that what happens "before Slurm notices"
can be told from what happens because it has. Its shorter times are longer here than by default, for
these machines stand still now and then. `cred_expire` alone is less than its 120 s: a job that was
requeued does not begin before. What a pytest that was killed leaves is removed by the lab's keeper:
every process of the cluster is in one of its networks.
"""

from __future__ import annotations

import contextlib
import secrets
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from elasticrun.testing import processes
from elasticrun.testing.hosts import Host, Lab
from tests.harness import LIMIT, PATIENT, await_true, clean_environment, until_file

LOGIN: Final = "login"
CPUS: Final = 4
"""Cores of a node as Slurm counts them; they are this machine's."""

PROGRAMS: Final = ("munged", "munge", "slurmctld", "slurmd", "srun", "sbatch", "scontrol")

BOOT: Final = (
    'mount -t tmpfs -o size=1g shm /dev/shm && mount -t tmpfs -o size=64m disk "$1" '
    '&& mkdir -m 700 "$1/tmp" "$1/run" "$1/spool" && shift && exec "$@"'
)
"""Arguments: the mount point of the local disk, then a command."""

CONF: Final = """
ClusterName=elasticrun
SlurmctldHost={login}({address})
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=10
StateSaveLocation={folder}/state
SlurmdSpoolDir={disk}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={disk}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
SlurmctldPort=16817
SlurmctldDebug=info
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=bf_interval=1,sched_interval=1,batch_sched_delay=0,sched_min_interval=0
SlurmdParameters=config_overrides
ReturnToService=2
SlurmdTimeout=300
MessageTimeout=30
BatchStartTimeout=60
KillWait=120
JobRequeue=1
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
NodeName=n[1-{nodes}] Port=16818 CPUs={cpus} RealMemory=4000 State=UNKNOWN
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP PriorityTier=1 GraceTime=120
PartitionName=urgent Nodes=ALL MaxTime=INFINITE State=UP PriorityTier=2
"""


def missing() -> list[str]:
    return [name for name in PROGRAMS if _program(name) is None]


class Cluster:
    """Started by `start`, whatever became of it ended by `close`."""

    def __init__(self, folder: Path, nodes: int) -> None:
        self.folder = folder
        self.disk = folder / "disk"
        self.nodes = [f"n{number}" for number in range(1, nodes + 1)]
        self._conf = folder / "slurm.conf"
        self._daemons: list[subprocess.Popen[bytes]] = []
        self._slurmds: dict[str, subprocess.Popen[bytes]] = {}
        self._off: list[str] = []
        self._drained = False
        self.lab = Lab(folder)

    def start(self) -> None:
        """Returns when every node has run something."""
        login = self.lab.add(LOGIN)
        for name in self.nodes:
            self.lab.add(name)
        for name in ("state", "disk"):
            (self.folder / name).mkdir()
        self._conf.write_text(
            CONF.format(
                login=LOGIN,
                address=login.address,
                folder=self.folder,
                disk=self.disk,
                nodes=len(self.nodes),
                cpus=CPUS,
            )
        )
        self._munge()
        (self.folder / "slurmctld.log").touch()
        self._daemon(LOGIN, "slurmctld", "-D", "-i", "-f", str(self._conf))
        for name in self.nodes:
            self._slurmd(name)
        until_file(self.folder / "slurmctld.log", lambda text: "primary controller" in text)
        self.run("srun", f"-N{len(self.nodes)}", "true")

    def _munge(self) -> None:
        key = self.folder / "munge.key"
        key.write_bytes(secrets.token_bytes(1024))
        key.chmod(0o600)
        self.folder.chmod(0o755)  # or munged takes its socket's place for unsafe
        files = ("key-file", "socket", "pid-file", "seed-file", "log-file")
        told = [f"--{name}={self.folder}/munge.{name.removesuffix('-file')}" for name in files]
        self._daemon(LOGIN, "munged", "--foreground", "--force", *told)
        asks = ("munge", "-n", f"--socket={self.folder}/munge.socket")
        await_true(lambda: self._short(*asks).returncode == 0, "munged that answers")

    def _slurmd(self, name: str) -> None:
        command = ("sh", "-c", BOOT, "sh", str(self.disk))
        self._slurmds[name] = self._daemon(
            name, *command, "slurmd", "-D", "-N", name, "-f", str(self._conf)
        )

    def _daemon(self, host: str, *command: str) -> subprocess.Popen[bytes]:
        """All that stands before the daemon's name becomes it by exec: the pid is its own."""
        with (self.folder / f"{host}.console").open("ab") as console:
            daemon = subprocess.Popen(
                [*self.lab.prefix(host), *command],
                stdin=subprocess.DEVNULL,
                stdout=console,
                stderr=console,
                env=self.environment(),
                start_new_session=True,
            )
        self._daemons.append(daemon)
        return daemon

    # ------------------------------------------------------------ what users do

    def environment(self) -> dict[str, str]:
        """Of a user who has logged in; jobs inherit it."""
        env = clean_environment()
        path = [str(Path(sys.executable).parent), env.get("PATH", ""), "/usr/sbin:/sbin"]
        return {
            **env,
            **PATIENT,
            "PATH": ":".join(filter(None, path)),
            "SLURM_CONF": str(self._conf),
            "TMPDIR": str(self.disk / "tmp"),
            "XDG_RUNTIME_DIR": str(self.disk / "run"),
        }

    def typed(self, *command: str) -> list[str]:
        """What runs a command on the login machine."""
        return [*self.lab.prefix(LOGIN), *command]

    def run(self, *command: str) -> str:
        """What a short command on the login machine prints."""
        done = self._short(*command)
        assert done.returncode == 0, f"{command}: {done.returncode}: {done.stderr}\n{self.tail()}"
        return done.stdout.strip()

    def _short(self, *command: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            self.typed(*command),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            env=self.environment(),
            timeout=LIMIT,
            check=False,
        )

    def jobs(self) -> list[str]:
        """Numbers of all jobs that run or wait; not of those that are just being ended, on which
        scancel would wait."""
        return self.run("squeue", "-h", "-o", "%i", "--states=PD,R").split()

    def state(self, node: str) -> str:
        """What Slurm believes of a node: `idle`, `mixed`, `down*` ..."""
        return self.run("sinfo", "-h", "-N", "-n", node, "-o", "%T")

    def tail(self) -> str:
        """The last words of the controller, for a test that fails."""
        log = self.folder / "slurmctld.log"
        return log.read_text(errors="replace")[-3000:] if log.exists() else ""

    # ------------------------------------------------------------ what befalls machines

    def host(self, name: str) -> Host:
        return self.lab.hosts[name]

    def power_off(self, name: str) -> None:
        """From one moment to the next, without a word to anybody."""
        self._off.append(name)
        self.lab.cut(name)  # else the kernel would hang up for those that are killed
        left = processes.kill_all(self.host(name).pids, LIMIT)
        assert not left, f"not killed on {name}: {left}"

    def power_on_all(self) -> None:
        """The machines that are off boot; returns when Slurm has them back."""
        off, self._off = self._off, []
        for name in off:
            self.lab.plug(name)
            self._slurmd(name)
        if off:
            self.run("srun", f"-N{len(self.nodes)}", "true")

    def drain(self, *, lift: bool) -> None:
        """Let no further job begin on any machine; or let jobs begin again."""
        state = ("State=RESUME",) if lift else ("State=DRAIN", "Reason=test")
        self.run("scontrol", "update", f"NodeName={','.join(self.nodes)}", *state)
        self._drained = not lift

    def empty_memory(self) -> list[str]:
        """Remove what is in the shared memory of all machines; what that was."""
        found = []
        for name in self.nodes:
            folder = Path(f"/proc/{self._slurmds[name].pid}/root/dev/shm")
            for path in folder.iterdir():
                found.append(f"{name}: {path.name}")
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        return found

    # ------------------------------------------------------------ the end

    @contextlib.contextmanager
    def clean(self) -> Iterator[None]:
        """No job of this block outlives it."""
        try:
            yield
        finally:
            if self._drained:
                self.drain(lift=True)
            if left := self.jobs():  # some may end by themselves meanwhile
                self._short("scancel", "--signal=KILL", "--full", *left)
                self._short("scancel", *left)

    def close(self) -> None:
        self.lab.close()
        for daemon in self._daemons:
            daemon.wait(LIMIT)


def _program(name: str) -> str | None:
    return shutil.which(name) or shutil.which(name, path="/usr/sbin:/sbin")
