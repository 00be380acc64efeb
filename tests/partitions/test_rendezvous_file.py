"""Machines that nobody told where they meet: the first line of use, typed on hosts.

A folder of this machine is what the hosts share; `ELASTICRUN_SHARED` says so, as statfs would on a
network file system. How such a folder shows what others did too late is in
`tests/agent/claims/test_claim_file.py`."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import shutil
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from elasticrun.testing import processes
from elasticrun.testing.hosts import Lab
from tests.further import further
from tests.harness import SCRIPTS, Launched, World, await_true, own_folders, world_in

pytestmark = pytest.mark.slow

TYPED = ("--nnodes=1:3",)
QUICK = {"ELASTICRUN_RDZV_CONF": "last_call_timeout=10", "LOGLEVEL": "INFO"}


class Machines:
    """Hosts with a folder that all of them have."""

    def __init__(self, lab: Lab, world: World) -> None:
        self.lab, self.world = lab, world
        self.folder = world.scratch / "shared"
        self.folder.mkdir()
        for name in ("puppet.py", "stage.py"):
            shutil.copy(SCRIPTS / name, self.folder / name)

    def type(
        self, name: str, *words: str, shared: bool = True, cwd: Path | None = None
    ) -> Launched:
        """Have a person type the command on this machine."""
        if name not in self.lab.hosts:
            self.lab.add(name)
        env = {
            **QUICK,
            **own_folders(self.world.scratch / name),
            **({"ELASTICRUN_SHARED": str(self.folder)} if shared else {}),
        }
        argv = [*self.lab.prefix(name), sys.executable, "-m", "elasticrun"]
        argv += words or [*TYPED, "puppet.py"]
        return self.world.command(argv, env=env, cwd=cwd or self.folder)

    def power_off(self, name: str) -> None:
        """The host goes at once, with all that runs there."""
        self.lab.cut(name)
        processes.kill_all(self.lab.hosts[name].pids, 60)

    def files(self) -> list[Path]:
        """What is in the folder beside the scripts."""
        kept = ("puppet.py", "stage.py", "__pycache__")
        return [path for path in self.folder.iterdir() if path.name not in kept]

    def end(self, *jobs: Launched, world_size: int) -> None:
        """All ranks of this world are done, and so is the job."""
        for peer in self.world.hub.ranks(world_size, world_size=world_size, **self.living()):
            peer.order("exit")
        assert [job.wait() for job in jobs] == [0] * len(jobs), jobs[0].stderr
        assert self.files() == [], "the file is gone with its job"

    def living(self) -> dict[str, object]:
        """For `hub.ranks`: of ranks that are still there."""
        peers = self.world.hub.peers
        return {"pid": lambda pid: any(p.pid == pid and not p.gone for p in peers)}


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[Machines]:
    with world_in(tmp_path) as world:
        lab = Lab(tmp_path)
        try:
            yield Machines(lab, world)
        finally:
            lab.close()


def test_typed_on_three_machines_at_one_moment_it_is_one_job_that_outlives_its_host(
    machines: Machines,
) -> None:
    """When the host of the master goes, one of the others takes the file and the mastership over,
    and the first finds it there when it is back. (They hold more than half of the ranks: with less
    the next master waits for those who may be in a later round, core/rendezvous.)"""
    for name in "abc":
        machines.lab.add(name)
    jobs = {name: machines.type(name) for name in "abc"}
    machines.world.hub.ranks(3, world_size=3)
    [file] = machines.files()
    assert file.name.startswith(".elasticrun-")
    assert file.stat().st_mode & 0o777 == 0o600
    hosts: list[str] = []

    def told() -> bool:
        hosts[:] = [name for name, job in jobs.items() if "serving job" in job.stderr]
        return bool(hosts)

    await_true(told, "line of the agent that serves the job")
    [host] = hosts
    typed = "to join, on a machine with this folder: elasticrun --nnodes=1:3 puppet.py"
    jobs[host].until_text(typed)
    machines.power_off(host)
    del jobs[host]
    machines.world.hub.ranks(2, world_size=2, **machines.living())
    assert sum("this agent starts one" in job.stderr for job in jobs.values()) == 1
    machines.lab.plug(host)
    jobs[host] = machines.type(host)
    machines.world.hub.ranks(3, world_size=3, **machines.living())
    assert "joined job" in jobs[host].stderr
    machines.end(*jobs.values(), world_size=3)


@further("test_typed_on_three_machines_at_one_moment_it_is_one_job_that_outlives_its_host")
def test_typed_in_a_row_the_second_finds_the_first(machines: Machines) -> None:
    one = machines.type("a")
    machines.world.hub.ranks(1, world_size=1)
    one.until_text("to join, on a machine with this folder: elasticrun --nnodes=1:3 puppet.py")
    two = machines.type("b")
    machines.world.hub.ranks(2, world_size=2)
    assert "joined job" in two.stderr
    machines.end(one, two, world_size=2)


@further(
    "agent/rendezvous/test_registries::test_only_a_killed_masters_address_is_taken_once_one_has_answered",
    "core/scripts/agent_killed_and_back.txt",
)
def test_an_agent_killed_with_its_master_is_started_again_by_the_same_line(
    machines: Machines,
) -> None:
    """Nobody is left to remove the file: its address is tried, and then it is taken over, with the
    job's name, so that memory of the killed agent is found again. Its holder was a process of this
    very host, so that nobody waits to see whether it is renewed."""
    file = machines.world.scratch / "meet"
    words = ("--nnodes=1:2", f"--rdzv-endpoint=file://{file}", "puppet.py")
    machines.type("a", *words)
    machines.world.hub.ranks(1, world_size=1)
    before = json.loads(file.read_text().splitlines()[0])
    machines.power_off("a")
    machines.lab.plug("a")
    again = machines.type("a", *words)
    again.until_text("does not answer, and that file is no longer renewed: this node takes over")
    assert "which does not answer this node" not in again.stderr, "it is not asked again"
    machines.world.hub.ranks(1, world_size=1, **machines.living())
    after = json.loads(file.read_text().splitlines()[0])
    assert after["words"]["job"] == before["words"]["job"]
    assert after["holder"] != before["holder"]
    again.signal(signal.SIGTERM)
    again.wait()
    assert not file.exists()


@further(
    "agent/rendezvous/test_finding::test_a_file_that_is_renewed_is_not_taken_over",
    "test_typed_on_three_machines_at_one_moment_it_is_one_job_that_outlives_its_host",
)
def test_a_split_makes_no_second_job(machines: Machines) -> None:
    """The folder is there for both, and the network is not: the file is renewed, so nobody takes
    it over; when they see each other it is one job."""
    for name in "ab":
        machines.lab.add(name)
    one = machines.type("a")
    machines.world.hub.ranks(1, world_size=1)
    [file] = machines.files()
    machines.lab.cut("b")
    two = machines.type("b")
    two.until_text("until its host stops renewing that file")
    holder = json.loads(file.read_text().splitlines()[0])["holder"]
    renewals = file.read_text().splitlines()[1]
    machines.world.hub.until(lambda: True, "a word")
    while file.read_text().splitlines()[1] == renewals:
        signal.sigtimedwait([], 0.2)
    machines.lab.plug("b")
    machines.world.hub.ranks(2, world_size=2)
    assert json.loads(file.read_text().splitlines()[0])["holder"] == holder
    machines.end(one, two, world_size=2)


@further(
    "agent/rendezvous/test_registries::test_whose_file_was_taken_over_follows",
    "test_typed_on_three_machines_at_one_moment_it_is_one_job_that_outlives_its_host",
)
def test_a_host_that_stood_still_follows_the_one_that_took_over(machines: Machines) -> None:
    """Its agent and master were stopped for so long that another host took the file. When they go
    on, the agent sees that, ends its own master, and its node is one of the other master's."""
    one = machines.type("a")
    machines.world.hub.ranks(1, world_size=1)
    two = machines.type("b")
    machines.world.hub.ranks(2, world_size=2)
    frozen = machines.lab.hosts["a"].pids()

    def send(signum: int) -> None:
        for pid in frozen:
            with contextlib.suppress(ProcessLookupError):  # the agent, awake, ends its master
                os.kill(pid, signum)

    send(signal.SIGSTOP)
    try:
        two.until_text("this agent starts one")
        two.until_text("serving job")
    finally:
        send(signal.SIGCONT)
    one.until_text("has taken this job over")
    host = machines.lab.hosts["a"]
    await_true(lambda: not any(map(processes.is_master, host.pids())), "end of its master")
    machines.end(one, two, world_size=2)
    assert one.stderr.count("serving job") == 1


@further("e2e/test_join::test_a_pasted_line_makes_this_machine_a_node")
def test_the_printed_lines_are_what_other_machines_type(machines: Machines) -> None:
    """No folder is shared: one machine pastes the line with the join code, on another one a person
    copies the token and types the long form."""
    one = machines.type("a", *TYPED, "puppet.py", shared=False)
    lines = one.until_text("or, with the job's token (").splitlines()
    pasted = next(line for line in lines if line.startswith("    elasticrun join "))
    assert pasted.split()[2] == "192.0.2.1:29400"
    two = machines.type("b", *shlex.split(pasted)[1:], shared=False)
    machines.world.hub.ranks(2, world_size=2)
    found = next(line for line in lines if "or, with the job's token (" in line)
    token, _, typed = found.partition("token (")[2].partition(") on it: ")
    assert typed.startswith("elasticrun --grow=now --nnodes=1:3 --rdzv-endpoint=192.0.2.1:29400 ")
    copied = machines.world.scratch / "job.token"
    shutil.copy(token, copied)
    flag = f"--token-file={copied}"
    three = machines.type("c", flag, *shlex.split(typed)[1:], shared=False)
    machines.world.hub.ranks(3, world_size=3)
    machines.end(one, two, three, world_size=3)
