"""kill -9 of the master in running jobs: it is back on its port, and nobody has noticed.

"No step lost": the puppets' `steps` are all-reduces in a row; they end on every rank of the same
processes only if each of them was done by the whole world.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from inotify_simple import INotify, flags

from elasticrun.host import user_folder as published
from elasticrun.host.system.processes import start_time
from elasticrun.host.user_folder import PREFIX
from tests import needs
from tests.certificates import Authority
from tests.compat.live import agents, allreduce, finish, job
from tests.further import cases, further
from tests.harness import (
    ELASTICRUN,
    LIMIT,
    Launched,
    Peer,
    World,
    await_exit,
    await_true,
    free_port,
)
from tests.hooked import hooked, warmed

pytestmark = pytest.mark.slow

KINDS = ("standalone", "static", "elastic")

NO_HOST = "--rdzv-conf=is_host=0,heartbeat_timeout=60"
"""As patient as other jobs here (tests.compat.live)."""

UNHURRIED = f"""
import sys

if {{"elasticrun.master", "master"}} & set(sys.orig_argv):
    from elasticrun.master import records, file_store

    records.FOLDER_LIMIT = records.TRACE_END = {LIMIT}
    file_store.LOAD_LIMIT = file_store.GIVEN_UP = {LIMIT}
"""


@pytest.fixture(scope="module", autouse=True)
def _warm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with warmed(tmp_path_factory.mktemp("warm")):
        yield


def unhurried(code: str = "", **env: str) -> dict[str, str]:
    """Have this code run in every Python of a job, before all else; and no master gives its record
    up because its disk, or itself, stands still for a while."""
    return hooked(UNHURRIED + code, **env)


def user_folder(world: World) -> Path:
    return world.scratch / "run" / "elasticrun"


def records(world: World) -> list[str]:
    """Folders of records that are left."""
    return [path.name for path in user_folder(world).glob(f"{PREFIX}*")]


def records_left(world: World) -> list[str]:
    """Those that are still there when every process of the job has gone."""
    world.nothing_left()
    return records(world)


def next_master(world: World, old: published.Published | None = None) -> published.Published:
    """The master that serves, another one than `old`; waits for it, and removes nothing, since an
    heir needs what a killed one left."""
    folder = user_folder(world)
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    end = time.monotonic() + LIMIT
    with INotify() as watcher:
        watcher.add_watch(folder, flags.MOVED_TO | flags.DELETE)
        while True:
            files = folder.glob("master-*.json")
            listed = [published._read(path) for path in files]
            found = [m for m in listed if m is not None and (old is None or m.pid != old.pid)]
            found = [m for m in found if start_time(m.pid) == m.process.started]
            if found:
                return found[0]
            rest = end - time.monotonic()
            assert rest > 0, "no master came back"
            watcher.read(timeout=int(rest * 1000) + 1)


def killed(world: World, master: published.Published) -> published.Published:
    """Kill this master at once; the one that follows."""
    began = time.monotonic()
    psutil.Process(master.pid).kill()
    following = next_master(world, master)
    print(f"a master serves again {time.monotonic() - began:.2f} s after the last was killed")
    return following


def started(
    world: World, kind: str, *more: str, code: str = ""
) -> tuple[list[Launched], list[Peer]]:
    """A job of this kind with two ranks; `code`: as in `unhurried`."""
    env = unhurried(code)
    if kind == "standalone":
        jobs = [job(world, ELASTICRUN, "--nproc-per-node=2", *more, env=env)]
    else:
        # of two, not one or two: who comes late must not make the first round a smaller one
        static = kind == "static"
        jobs = agents(world, ELASTICRUN, 2, "2", free_port(), *more, static=static, env=env)
    return jobs, world.hub.ranks(2, world_size=2)


@pytest.mark.parametrize("kind", cases(KINDS, kept=["elastic"]))
def test_three_times_in_a_row_while_it_trains(world: World, kind: str) -> None:
    jobs, peers = started(world, kind, "--max-restarts=1")
    master = next_master(world)
    port = master.port
    for peer in peers:
        peer.order("steps", count=300)
    for _ in range(3):
        master = killed(world, master)
        if kind == "elastic":  # others have any port, which another process may take meanwhile
            assert master.port == port
    for peer in peers:
        world.hub.word(peer, "done", what="steps")
    peers[1].order("exit", code=3)  # the last one has the job in hand
    again = world.hub.ranks(2, restart=1)
    assert allreduce(world, again) == [2, 2]
    finish(again)
    assert [j.wait() for j in jobs] == [0] * len(jobs)
    assert len(world.hub.peers) == 4  # two lives, no more
    assert records_left(world) == []


@further("test_three_times_in_a_row_while_it_trains")
def test_while_nodes_gather(world: World) -> None:
    """And who wants the trace of it, keeps it: two lives of the master, one after the other."""
    port, kept = free_port(), world.scratch / "kept"
    env = unhurried(ELASTICRUN_TRACE_DIR=str(kept))
    jobs = agents(world, ELASTICRUN, 1, "2", port, env=env)
    jobs[0].until_text("waiting for nodes")
    master = killed(world, next_master(world))
    assert master.port == port
    jobs += agents(world, ELASTICRUN, 1, "2", port, env=env)
    peers = world.hub.ranks(2)
    assert allreduce(world, peers) == [2, 2]
    finish(peers)
    assert [j.wait() for j in jobs] == [0, 0]
    assert (len(world.hub.peers), records_left(world)) == (2, [])
    (trace,) = kept.iterdir()
    assert trace.name.startswith("agents-")
    replayed = world.launch(ELASTICRUN, "replay", str(trace))
    assert replayed.wait() == 0, replayed.stdout
    assert replayed.stdout.count("== job 'agents', a master of term") == 2
    assert "the job is over with 0" in replayed.stdout


@further(
    "sim/test_restore::test_killed_at_every_moment",
    "test_a_master_by_hand_goes_on_where_it_was_and_remembers_the_end",
)
def test_between_a_death_and_the_next_start_and_what_it_cost_is_remembered(world: World) -> None:
    """Killed while the survivor still stops: one restart is charged, not two, and it is still known
    when the next failure comes, two masters later."""
    jobs, peers = started(world, "elastic", "--max-restarts=1", "--restart-backoff=0")
    master = next_master(world)
    saved = str(world.scratch / "saved")
    peers[0].order("trap", signums=[int(signal.SIGTERM)], how="save", path=saved)
    world.hub.word(peers[0], "done", what="trap")
    peers[1].order("exit", code=3)
    world.hub.word(peers[0], "signal")  # told to stop: 0.4 s until it has saved
    master = killed(world, master)
    again = world.hub.ranks(2, restart=1)
    assert allreduce(world, again) == [2, 2]
    assert (world.scratch / "saved").read_text().endswith("whole\n")
    killed(world, master)
    again[1].order("exit", code=4)
    assert [j.wait() for j in jobs] == [1, 1]
    assert len(world.hub.peers) == 4
    assert records_left(world) == []


IMPATIENT = """
import sys

if sys.orig_argv[1:3] == ["-m", "elasticrun"]:
    from elasticrun.agent.link import master_process

    master_process.PING_EVERY, master_process.ANSWER_LIMIT = 0.1, 10.0
"""
"""A master that gets no CPU time for a while is not replaced."""


@pytest.mark.parametrize("kind", cases(KINDS, kept=["standalone"]))
def test_one_that_stands_still_is_replaced(world: World, kind: str) -> None:
    """Its agent kills it and starts the next one, which takes up its record."""
    jobs, peers = started(world, kind, "--max-restarts=1", code=IMPATIENT)
    master = next_master(world)
    for peer in peers:
        peer.order("steps", count=300)
    psutil.Process(master.pid).suspend()
    following = next_master(world, master)
    assert not await_exit([master.pid])
    for peer in peers:
        world.hub.word(peer, "done", what="steps")
    peers[1].order("exit", code=3)  # the last one has the job in hand
    finish(world.hub.ranks(2, restart=1))
    assert [j.wait() for j in jobs] == [0] * len(jobs)
    said = "".join(j.stderr for j in jobs)
    assert "it is stopped (SIGSTOP, a debugger); killing it" in said
    assert said.count("starting a new one") == 1, said
    assert following.pid != master.pid
    assert (len(world.hub.peers), records_left(world)) == (4, [])


@further("test_one_that_stands_still_is_replaced")
def test_one_whose_cgroup_is_frozen_is_replaced(world: World) -> None:
    """As one that a signal has stopped: SIGKILL ends it, frozen as it is."""
    (launched,), peers = started(world, "standalone", code=IMPATIENT)
    master = next_master(world)
    with needs.freezer() as freeze:
        freeze(master.pid)
        following = next_master(world, master)
        assert not await_exit([master.pid])
    assert allreduce(world, peers) == [2, 2]
    finish(peers)
    assert launched.wait() == 0
    assert "its cgroup is frozen; killing it" in launched.stderr
    assert (following.pid != master.pid, records_left(world)) == (True, [])


def test_an_agent_that_stands_still_itself_replaces_none(world: World) -> None:
    """Silence counts only while the agent runs: a whole host that was frozen goes on as it was."""
    (launched,), peers = started(world, "standalone", code=IMPATIENT)
    master = next_master(world)
    both = [psutil.Process(pid) for pid in (launched.pid, master.pid)]
    for process in both:
        process.suspend()
    over = time.monotonic() + 11.0
    await_true(lambda: time.monotonic() > over, "end of the limit")
    used = both[0].cpu_times()
    both[0].resume()
    await_true(lambda: both[0].cpu_times() != used, "agent that runs again before its master")
    both[1].resume()
    assert allreduce(world, peers) == [2, 2]
    finish(peers)
    assert launched.wait() == 0
    assert "starting a new one" not in launched.stderr


@pytest.mark.parametrize("wrong", cases(["folder", "certificate"], kept=["folder"]))
def test_what_is_looked_at_before_a_job_starts_does_not_end_one_that_runs(
    world: World, wrong: str
) -> None:
    """The run folder and the certificate are gone when the next master starts. It does without the
    folder, and has it again once it is there; without a certificate none can serve, and the ranks
    go on until it is back."""
    folder = world.scratch / "mine"
    files = Authority(world.scratch).create().sign("node", "IP:127.0.0.1", "DNS:localhost")
    tls = (f"--tls-ca={files.ca}", f"--tls-cert={files.cert}", f"--tls-key={files.key}")
    kind = "standalone" if wrong == "folder" else "elastic"
    jobs, peers = started(world, kind, f"--run-dir={folder}", *tls)
    master = next_master(world)
    hosts: list[Launched] = []
    await_true(lambda: hosts.extend(j for j in jobs if "serving job" in j.stderr) or hosts, "host")
    launched = hosts[0]
    at = folder if wrong == "folder" else Path(files.cert)
    aside = at.rename(at.with_suffix(".aside"))
    at.symlink_to(at / "nowhere")
    psutil.Process(master.pid).kill()
    for peer in peers:
        peer.order("steps", count=100)
    if wrong == "folder":
        launched.until_text("cannot write to the run folder of this job: ")
        next_master(world, master)
    else:
        launched.until_text("no job master can be started here: ")
    at.unlink()
    if wrong == "certificate":  # the folder is made again by the master
        aside.rename(at)
    next_master(world, master)
    for peer in peers:
        world.hub.word(peer, "done", what="steps")
    finish(peers)
    assert [each.wait() for each in jobs] == [0] * len(jobs)
    assert (folder / "result.json").exists()
    assert "Traceback" not in launched.stderr
    assert (len(world.hub.peers), records_left(world)) == (2, [])


@further(
    "core/scripts/failure_while_no_master_serves.txt",
    "test_three_times_in_a_row_while_it_trains",
)
def test_a_failure_while_there_is_no_master(world: World) -> None:
    """It stands still, and is killed only when a rank has died and its node has said so."""
    jobs, peers = started(world, "elastic", "--max-restarts=1", "--restart-backoff=0")
    master = next_master(world)
    psutil.Process(master.pid).suspend()
    peers[1].order("exit", code=3)
    world.hub.lost([peers[1]])
    killed(world, master)
    again = world.hub.ranks(2, restart=1)
    assert allreduce(world, again) == [2, 2]
    finish(again)
    assert [j.wait() for j in jobs] == [0, 0]
    assert (len(world.hub.peers), records_left(world)) == (4, [])


def test_a_master_that_outlives_its_agent_takes_its_record_with_it(world: World) -> None:
    """An agent that comes back attaches to it, and should it be killed then, an agent of this host
    starts the next one."""
    port = free_port()
    # a stall shorter than this is no death, but that of the agent that is killed waits for it
    words, env = ("--grow=now", "--rdzv-conf=heartbeat_timeout=10"), unhurried()
    jobs = agents(world, ELASTICRUN, 1, "1:2", port, *words, env=env)
    world.hub.ranks(1)  # so that this agent has the master
    master = next_master(world)
    jobs += agents(world, ELASTICRUN, 1, "1:2", port, *words, env=env)
    peers = world.hub.ranks(2, world_size=2)
    assert allreduce(world, peers) == [2, 2]
    jobs[0].process.kill()
    (alone,) = world.hub.ranks(1, world_size=1, pid=lambda pid: pid not in _pids(world, 3))
    assert records(world) != []
    back = agents(world, ELASTICRUN, 1, "1:2", port, *words, env=env)
    known = _pids(world, 4)
    both = world.hub.ranks(2, world_size=2, pid=lambda pid: pid not in known)
    assert allreduce(world, both) == [2, 2]
    assert [m.pid for m in published.published(user_folder(world))] == [master.pid]
    assert alone.gone
    for peer in both:
        peer.order("steps", count=300)
    heir = killed(world, master)  # nobody is left whose child it was
    assert heir.port == port
    for peer in both:
        world.hub.word(peer, "done", what="steps")
    finish(both)
    assert [jobs[1].wait(), back[0].wait()] == [0, 0]
    assert not await_exit([heir.pid])
    assert records_left(world) == []
    assert len(world.hub.peers) == 6


def _pids(world: World, count: int) -> set[int]:
    """The first so many ranks that ever were."""
    return {peer.pid for peer in world.hub.peers[:count]}


@further(
    "e2e/test_run_folder::test_the_same_folder_again",
    "test_three_times_in_a_row_while_it_trains",
)
def test_a_second_launch_knows_nothing_of_one_that_was_killed(world: World) -> None:
    """The same port and id after kill -9 of everything: it begins anew, and sweeps."""
    port, env = free_port(), unhurried()
    agents(world, ELASTICRUN, 1, "1", port, "--max-restarts=1", env=env)
    (peer,) = world.hub.ranks(1)
    next_master(world)
    (left,) = records(world)
    peer.order("exit", code=3)
    world.hub.ranks(1, restart=1)
    world.kill_all()
    assert records(world) == [left]
    jobs = agents(world, ELASTICRUN, 1, "1", port, "--max-restarts=1", env=env)
    (fresh,) = world.hub.ranks(1, restart=0, pid=lambda pid: pid != peer.pid)
    next_master(world)
    finish([fresh])
    assert jobs[0].wait() == 0
    assert records_left(world) == []


DEADLY = """
import os, sys

if "elasticrun.master" in sys.orig_argv:
    from elasticrun.master.file_store import FileStore

    flag = os.environ["DEADLY_FLAG"]
    write = FileStore.write

    def die(facts):
        last = facts.rendezvous
        wanted = {
            "over": bool(last.over),
            "formed": last.round is not None and last.round.name.number == 2,
            "outcome": facts.outcome is not None,
        }
        if wanted[os.environ["DEADLY_FACT"]] and not os.path.exists(flag):
            open(flag, "w").close()
            os.kill(os.getpid(), 9)

    def deadly(store, facts, done):
        if os.environ["DEADLY_MOMENT"] == "before":
            die(facts)
        write(store, facts, lambda: (die(facts), done()))

    FileStore.write = deadly
"""


def deadly(world: World, fact: str, moment: str) -> tuple[Path, dict[str, str]]:
    """A master that dies by its own hand, once, right before or after this fact is durable; the
    file that shows that it did."""
    flag = world.scratch / "flag"
    words = {"DEADLY_FLAG": str(flag), "DEADLY_FACT": fact, "DEADLY_MOMENT": moment}
    return flag, unhurried(DEADLY, **words)


@further("sim/test_restore::test_killed_at_every_moment", "master/test_record")
@pytest.mark.parametrize("fact", ["over", "formed"])
@pytest.mark.parametrize("moment", ["before", "after"])
def test_between_a_fact_and_its_order(world: World, fact: str, moment: str) -> None:
    """That the round is over, or that the next one was formed and charged, has (not) become
    durable, and nobody has been told: the next master goes on from there, and one restart is
    charged."""
    flag, env = deadly(world, fact, moment)
    flags = ("--max-restarts=1", "--restart-backoff=0")
    jobs = agents(world, ELASTICRUN, 2, "2", free_port(), *flags, env=env)
    peers = world.hub.ranks(2, world_size=2)
    peers[1].order("exit", code=3)
    again = world.hub.ranks(2, restart=1, world_size=2)
    assert flag.exists()
    assert allreduce(world, again) == [2, 2]
    again[0].order("exit", code=4)
    assert [j.wait() for j in jobs] == [1, 1]
    assert (len(world.hub.peers), records_left(world)) == (4, [])


@further("sim/test_restore::test_killed_at_every_moment", "master/test_record")
@pytest.mark.parametrize("moment", ["before", "after"])
def test_between_the_outcome_and_its_telling(world: World, moment: str) -> None:
    """The next master tells it to whoever dials, and ends."""
    flag, env = deadly(world, "outcome", moment)
    jobs = agents(world, ELASTICRUN, 2, "2", free_port(), env=env)
    peers = world.hub.ranks(2)
    finish(peers)
    assert [j.wait() for j in jobs] == [0, 0]
    assert flag.exists()
    assert (len(world.hub.peers), records_left(world)) == (2, [])


POISONED = """
import os, sys

if "elasticrun.master" in sys.orig_argv:
    from elasticrun.core.events import Tick
    from elasticrun.core.job.job import Job

    begin, step = Job.__init__, Job.step

    def __init__(job, spec, term, mint, facts=None):
        begin(job, spec, term, mint, facts)
        job.poisoned = facts is not None

    def poisoned(job, event, now):
        if job.poisoned and (os.environ["POISON"] == "at once" or not isinstance(event, Tick)):
            raise KeyError("a defect that this state shows")
        return step(job, event, now)

    Job.__init__, Job.step = __init__, poisoned
"""


@further(
    "master/test_record::test_three_masters_that_fail_on_one_state_within_a_minute",
    "master/test_record::test_a_record_that_cannot_be_used_is_set_aside",
)
@pytest.mark.parametrize("poison", cases(["at once", "later"], kept=["at once"]))
def test_a_state_on_which_masters_fail_is_set_aside(world: World, poison: str) -> None:
    """No crash loop. The agents bring the round back, nothing is restarted."""
    env = unhurried(POISONED, POISON=poison)
    launched = job(world, ELASTICRUN, "--nproc-per-node=2", "--max-restarts=1", env=env)
    peers = world.hub.ranks(2)
    master = next_master(world)
    for peer in peers:
        peer.order("steps", count=200)
    psutil.Process(master.pid).kill()
    if poison == "later":
        launched.until_text("3 masters have failed on it")
    launched.until_text("set aside")
    launched.until_text(", which is already running")
    for peer in peers:
        world.hub.word(peer, "done", what="steps")
    peers[1].order("exit", code=3)
    again = world.hub.ranks(2, restart=1)
    assert allreduce(world, again) == [2, 2]
    finish(again)
    assert launched.wait() == 0
    assert (len(world.hub.peers), records_left(world)) == (4, [])


# ---------------------------------------------------------------- elasticrun master --state-dir


def by_hand(world: World, port: int, folder: Path) -> Launched:
    """A master with a folder of its own, serving."""
    words = ("master", "--host=127.0.0.1", f"--port={port}", "--rdzv-id=agents")
    env = unhurried(LOGLEVEL="INFO", ELASTICRUN_STATE_DIR=str(folder))
    launched = world.launch(ELASTICRUN, *words, env=env)
    launched.until_text("serving job")
    return launched


def test_a_master_by_hand_goes_on_where_it_was_and_remembers_the_end(world: World) -> None:
    port, folder = free_port(), world.scratch / "state"
    master = by_hand(world, port, folder)
    more = (NO_HOST, "--max-restarts=1", "--restart-backoff=0")
    jobs = agents(world, ELASTICRUN, 2, "2", port, *more)
    peers = world.hub.ranks(2)
    peers[0].order("exit", code=3)
    again = world.hub.ranks(2, restart=1)
    for peer in again:
        peer.order("steps", count=200)
    master.process.kill()
    master.wait()
    master = by_hand(world, port, folder)
    master.until_text("the record says that round 2")
    for peer in again:
        world.hub.word(peer, "done", what="steps")
    again[1].order("exit", code=4)  # the budget was spent two masters ago
    assert [j.wait() for j in jobs] == [1, 1]
    assert master.wait() == 1
    assert len(world.hub.peers) == 4

    master = by_hand(world, port, folder)
    master.until_text("the job is over")
    for _ in range(2):  # whoever comes, and as often as he comes
        (late,) = agents(world, ELASTICRUN, 1, "2", port, *more)
        assert late.wait() == 1
        assert f"remove {folder}" in late.stderr
        assert "Traceback" not in late.stderr
    assert len(world.hub.peers) == 4
    master.signal(signal.SIGTERM)
    assert master.wait() == 128 + signal.SIGTERM
    assert (folder / "record").exists()
    replayed = world.launch(ELASTICRUN, "replay", str(folder))
    assert replayed.wait() == 0, replayed.stdout
    assert "the job is over" in replayed.stdout


@further("test_a_master_by_hand_goes_on_where_it_was_and_remembers_the_end", "master/test_record")
def test_a_folder_of_another_master_or_job_is_refused(world: World) -> None:
    folder = world.scratch / "state"
    master = by_hand(world, free_port(), folder)
    words = ("master", "--host=127.0.0.1", "--port=0", f"--state-dir={folder}")
    second = world.launch(ELASTICRUN, *words, "--rdzv-id=agents")
    assert second.wait() == 2
    assert "has the record of a running master" in second.stderr
    agent = agents(world, ELASTICRUN, 1, "1", _port(master), NO_HOST)
    finish(world.hub.ranks(1))
    assert agent[0].wait() == 0
    assert master.wait() == 0
    other = world.launch(ELASTICRUN, *words, "--rdzv-id=another")
    assert other.wait() == 2
    assert "belongs to job 'agents'" in other.stderr
    for refused in (second, other):
        assert refused.stderr.count("\n") == 1, refused.stderr


def _port(master: Launched) -> int:
    """Where it serves, as it said."""
    said = master.until_text("serving job")
    return int(said.split("on 127.0.0.1:")[1].split()[0])
