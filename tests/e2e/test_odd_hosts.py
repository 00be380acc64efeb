"""Launchers that nohup has started, and hosts on which something is missing: they work, or end at
once with one sentence."""

from __future__ import annotations

import signal

import pytest

from tests import needs
from tests.compat.live import PUPPET
from tests.harness import COLD, COMMANDS, ELASTICRUN, LIMIT, World

pytestmark = pytest.mark.slow


def test_nohup_outlives_the_terminal(world: World) -> None:
    words = (*COMMANDS[ELASTICRUN], "--standalone", PUPPET)
    launched = world.command(words, env=COLD, ignoring="HUP")
    (rank,) = world.hub.ranks(1)
    launched.signal_group(signal.SIGHUP)
    for process in launched.below():
        process.send_signal(signal.SIGHUP)
    rank.order("exit", code=0)
    assert launched.wait() == 0


def test_no_home_and_no_entry_in_passwd(world: World) -> None:
    """A container with a uid of its own choosing."""
    nobody = ("unshare", "--user", "--map-user=54321", "--map-group=54321")
    needs.namespaces(*nobody[1:])
    without = ("env", "-u", "HOME", "-u", "XDG_RUNTIME_DIR", "-u", "ELASTICRUN_RUNS", "-u")
    bare = (*nobody, *without, "XDG_STATE_HOME", *COMMANDS[ELASTICRUN])
    launched = world.command((*bare, "--standalone", "--no-python", "true"), env=COLD)
    assert launched.wait() == 0
    assert "Traceback" not in launched.stderr
    listed = world.command((*bare, "list"))
    assert listed.wait() == 1
    assert "this user has no home (HOME is not set, nor is one in passwd)" in listed.stderr
    assert "Traceback" not in listed.stderr


def test_a_loopback_that_is_down_is_a_sentence(world: World) -> None:
    needs.namespaces("--net")
    words = ("unshare", "--net", *COMMANDS[ELASTICRUN], "--standalone", PUPPET)
    launched = world.command(words, env=COLD)
    assert launched.wait(LIMIT) == 1
    (line,) = launched.stderr.splitlines()
    assert line.startswith("elasticrun: 127.0.0.1 cannot be reached on this host (Network is unr")
    assert "`ip link set lo up`" in line
