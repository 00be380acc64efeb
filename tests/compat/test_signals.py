"""Signals to the launcher: forwarded, waited for, and what is left behind, beside torchrun."""

from __future__ import annotations

import signal

import pytest

from tests.compat.live import job, trapping
from tests.further import TORCHRUN as ALONE, cases, further
from tests.harness import ELASTICRUN, TORCHRUN, World, free_port

pytestmark = pytest.mark.slow

DEATH = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
BOTH = cases((TORCHRUN, ELASTICRUN), soaked=[TORCHRUN])


@further("test_a_group_signal_reaches_a_handler_that_saves")
@pytest.mark.parametrize("launcher", BOTH)
@pytest.mark.parametrize("signum", cases(DEATH, kept=[signal.SIGHUP]))
def test_ranks_that_obey(theirs_or_ours: World, launcher: str, signum: int) -> None:
    """Every rank gets the very signal; the launcher ends with 1 when they have gone."""
    world = theirs_or_ours
    launched, peers = trapping(world, launcher, 2, signums=DEATH)
    launched.signal(signum)
    for peer in peers:
        assert world.hub.word(peer, "signal")["signum"] == signum
        peer.order("exit", code=0)
    assert launched.wait() == 1
    world.hub.lost(peers)


@further("test_a_group_signal_reaches_a_handler_that_saves")
@pytest.mark.parametrize("launcher", BOTH)
@pytest.mark.parametrize("signum", cases(DEATH, kept=[signal.SIGQUIT]))
def test_ranks_without_a_handler(theirs_or_ours: World, launcher: str, signum: int) -> None:
    world = theirs_or_ours
    launched = job(world, launcher, "--nproc-per-node=2")
    peers = world.hub.ranks(2)
    launched.signal(signum)
    assert launched.wait() == 1
    world.hub.lost(peers)
    assert "SignalException" not in launched.stderr or launcher == TORCHRUN
    name = signal.Signals(signum).name
    assert f"Received {int(signum)} death signal" in launched.stderr, (name, launched.stderr)


@pytest.mark.parametrize("launcher", BOTH)
@pytest.mark.parametrize("by", cases(["flag", "environment"], kept=["environment"]))
def test_ranks_that_ignore_are_killed_after_the_timeout(
    theirs_or_ours: World, launcher: str, by: str
) -> None:
    """TORCH_ELASTIC_SHUTDOWN_TIMEOUT where the flag is not given."""
    world = theirs_or_ours
    flags = ["--shutdown-timeout=1"] if by == "flag" else []
    env = {} if by == "flag" else {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "1"}
    launched, peers = trapping(world, launcher, 2, *flags, how="ignore", env=env)
    launched.signal(signal.SIGTERM)
    world.hub.lost(peers, 29)  # the default would be 30
    assert launched.wait() == 1
    assert "forcefully exiting via" in launched.stderr


@further(
    "core/scripts/second_signal_keeps_the_deadline.txt",
    "jobs/test_hosts::test_the_second_signal_kills",
)
@pytest.mark.parametrize("launcher", BOTH)
def test_a_second_signal(theirs_or_ours: World, launcher: str) -> None:
    """It does not make the launcher leave its ranks behind."""
    world = theirs_or_ours
    launched, peers = trapping(world, launcher, 2, "--shutdown-timeout=5")
    launched.signal(signal.SIGTERM)
    for peer in peers:
        launched.until_text(f"Sending process {peer.pid} closing signal SIGTERM")
    launched.signal(signal.SIGTERM)
    assert launched.wait() == 1
    world.hub.lost(peers)


@further("test_sigusr1_does_not_kill_the_launcher", "cli/test_resolve")
@pytest.mark.parametrize("launcher", BOTH)
def test_the_list_of_signals_is_replaced(theirs_or_ours: World, launcher: str) -> None:
    """`--signals-to-handle=SIGUSR1` makes SIGUSR1 a death signal."""
    world = theirs_or_ours
    flag = "--signals-to-handle=SIGUSR1,SIGTERM"
    launched, (peer,) = trapping(world, launcher, 1, flag, signums=[signal.SIGUSR1])
    launched.signal(signal.SIGUSR1)
    assert world.hub.word(peer, "signal")["signum"] == signal.SIGUSR1
    peer.order("exit", code=0)
    assert launched.wait() == 1


@pytest.mark.parametrize("launcher", BOTH)
@pytest.mark.parametrize("signum", cases([signal.SIGINT, signal.SIGTERM], kept=[signal.SIGINT]))
def test_a_group_signal_reaches_a_handler_that_saves(
    theirs_or_ours: World, launcher: str, signum: int
) -> None:
    """Ctrl-C goes to the whole foreground group; the script's save is finished."""
    world = theirs_or_ours
    launched = job(world, launcher, "--nproc-per-node=2")
    peers = world.hub.ranks(2)
    saves = [world.scratch / f"save-{peer.rank}" for peer in peers]
    for peer, path in zip(peers, saves, strict=True):
        peer.order("trap", signums=[int(signum)], how="save", path=str(path))
        world.hub.word(peer, "done")
    launched.signal_group(signum)
    assert launched.wait() == 1
    assert [path.read_text().splitlines()[-1] for path in saves] == ["whole"] * 2


@further(why=ALONE)
def test_torchrun_dies_of_sigusr1(torchrun_world: World) -> None:
    """Defect: the launcher dies of it (138) and its ranks stay behind."""
    theirs = job(torchrun_world, TORCHRUN)
    (orphan,) = torchrun_world.hub.ranks(1)
    theirs.signal(signal.SIGUSR1)
    assert theirs.wait() == -signal.SIGUSR1
    orphan.order("print", text="still here")
    torchrun_world.hub.word(orphan, "done")


def test_sigusr1_does_not_kill_the_launcher(world: World) -> None:
    both = (signal.SIGUSR1, signal.SIGUSR2)
    ours, (peer,) = trapping(world, ELASTICRUN, 1, signums=both)
    for signum in both:
        ours.signal(signum)
        world.hub.word(peer, "signal", signum=signum)
    peer.order("exit", code=0)
    assert ours.wait() == 0


GATHERING = ("--nnodes=2", "--rdzv-backend=c10d", "--rdzv-id=x", "--local-addr=127.0.0.1")


@pytest.mark.parametrize("launcher", BOTH)
def test_a_signal_before_the_first_start(theirs_or_ours: World, launcher: str) -> None:
    """One sentence and 1. Defect (M:546): torchrun installs its handlers with the first ranks, so
    in rendezvous it dies of the signal without a clean-up."""
    endpoint = f"--rdzv-endpoint=127.0.0.1:{free_port()}"
    launched = job(theirs_or_ours, launcher, *GATHERING, endpoint)
    launched.until_text("Rendezvous'ing worker group" if launcher == TORCHRUN else "wait")
    launched.signal(signal.SIGTERM)
    assert launched.wait() == (-signal.SIGTERM if launcher == TORCHRUN else 1)
    assert launcher == TORCHRUN or "Traceback" not in launched.stderr
