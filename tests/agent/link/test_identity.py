"""Node ids and the address offered."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from elasticrun.agent.link import identity
from elasticrun.agent.link.identity import host_id, identify, offered_address
from elasticrun.host.system.network import routed_address
from elasticrun.wire.env import CLUSTER_NODE


def test_a_given_id_is_taken(tmp_path: Path) -> None:
    found = identify("node-7", "job", {"XDG_RUNTIME_DIR": str(tmp_path)})
    assert found.text == "node-7"
    assert list(tmp_path.iterdir()) == []


def test_agents_of_one_job_get_different_slots_and_the_lowest_free_one(tmp_path: Path) -> None:
    environ = {"XDG_RUNTIME_DIR": str(tmp_path)}
    first, second, other = (identify("", job, environ) for job in ("a", "a", "b"))
    assert first.text.endswith("-0")
    assert second.text.endswith("-1")
    assert other.text.endswith("-0")
    first.release()
    again = identify("", "a", environ)
    assert again.text == host_id(environ) + "-0"
    for each in (second, other, again):
        each.release()
    assert list((tmp_path / "elasticrun" / "slots").iterdir()) == []


def test_a_pod_is_known_by_its_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """And not by what its image says, which its successor elsewhere has as well."""
    (tmp_path / "id").write_text("of-an-image")
    monkeypatch.setattr(identity, "MACHINE_ID", str(tmp_path / "id"))
    bare, pod = host_id({}), host_id({"KUBERNETES_SERVICE_HOST": "10.0.0.1"})
    assert bare != pod
    (tmp_path / "id").unlink()
    assert host_id({}) == pod
    assert host_id({CLUSTER_NODE: "n1"}) != host_id({CLUSTER_NODE: "n2"}), "of one kernel"


def test_a_killed_agent_gives_its_slot_back(tmp_path: Path) -> None:
    environ = {"XDG_RUNTIME_DIR": str(tmp_path)}
    script = (
        "import sys, os; from elasticrun.agent.link.identity import identify;"
        "print(identify('', 'a', dict(os.environ)).text, flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script],
        env={**os.environ, **environ},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as holder:
        name = holder.stdout.readline().strip()
        ours = identify("", "a", environ)
        assert ours.text != name
        holder.kill()
        holder.wait()
    again = identify("", "a", environ)
    assert again.text == name
    ours.release()
    again.release()


def test_without_a_folder_the_id_holds_for_one_life_and_says_so(tmp_path: Path) -> None:
    blocked = tmp_path / "elasticrun"
    blocked.write_text("a file in the way")
    found = identify("", "a", {"XDG_RUNTIME_DIR": str(tmp_path)})
    assert found.note.endswith("this node gets a new id at each start")
    assert found.text != identify("", "a", {"XDG_RUNTIME_DIR": str(tmp_path)}).text


def test_the_folder_is_the_users_alone(tmp_path: Path) -> None:
    identify("", "a", {"XDG_RUNTIME_DIR": str(tmp_path)}).release()
    assert (tmp_path / "elasticrun").stat().st_mode & 0o777 == 0o700


ROUTED = routed_address()
routed = pytest.mark.skipif(not ROUTED, reason="this host has no address beyond loopback")


@pytest.mark.parametrize(
    ("local_addr", "endpoint", "master", "offered"),
    [
        ("10.9.8.7", "head", "127.0.0.1", "10.9.8.7"),
        (None, "localhost", "127.0.0.1", "127.0.0.1"),
        # a name that resolves to loopback here is another host's to others
        pytest.param(None, "debian-host", "127.0.1.1", ROUTED, marks=routed),
        # the address of the way to the master
        pytest.param(None, "head", ROUTED, ROUTED, marks=routed),
    ],
)
def test_the_address_offered(
    local_addr: str | None, endpoint: str, master: str, offered: str
) -> None:
    assert offered_address(local_addr, endpoint, master) == offered
