"""Host names, with a resolver that knows what a child's own /etc/hosts says and no more."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace

from elasticrun.host.doctor import names
from elasticrun.wire.types import Finding, Level
from tests.host.doctor.child import found, one
from tests.master.people import status

LOOK = """
from elasticrun.host.doctor.names import examine, reverse
found = [*examine({several}, {environ}), *reverse()]
"""

APART = """
mount --bind '{hosts}' /etc/hosts
mount --bind '{resolv}' /etc/resolv.conf
hostname node-7
ip link set lo up
ip link add eth0 type veth peer name far
ip link set far up
ip addr add 192.0.2.7/24 dev eth0
ip link set eth0 up
ip route add default via 192.0.2.1
"""
"""A host node-7 at 192.0.2.7, which has a default route and no name server."""

OWN = "192.0.2.7 node-7\n"


def look(
    folder: Path, hosts: str, several: bool = True, environ: dict[str, str] | None = None
) -> list[Finding]:
    """The findings on a host with this /etc/hosts."""
    (folder / "hosts").write_text(f"127.0.0.1 localhost\n{hosts}")
    (folder / "resolv").write_text("nameserver 127.0.0.1\n")
    return found(
        LOOK.format(several=several, environ=environ or {}),
        setup=APART.format(hosts=folder / "hosts", resolv=folder / "resolv"),
        apart=("--mount", "--uts", "--net"),
    )


@pytest.mark.parametrize(
    ("hosts", "several", "state", "said"),
    [
        (OWN, True, Level.OK, "node-7 resolves to 192.0.2.7"),
        ("", True, Level.WARNING, "the name of this host, node-7, does not resolve; gloo"),
        ("", False, Level.OK, "does not resolve"),
        ("127.0.1.1 node-7\n", True, Level.WARNING, "127.0.1.1, which is only loopback; gloo"),
        ("127.0.1.1 node-7\n", False, Level.OK, "node-7 resolves to 127.0.1.1"),
        (
            "198.51.100.9 node-7\n",
            False,
            Level.WARNING,
            "198.51.100.9 is not an address of this host",
        ),
    ],
    ids=["well", "unknown", "unknown-alone", "debian", "debian-alone", "foreign"],
)
def test_the_own_name(tmp_path: Path, hosts: str, several: bool, state: Level, said: str) -> None:
    only = one(look(tmp_path, hosts, several), names.CHECK)
    assert only.state is state, only
    assert said in only.seen
    assert ("GLOO_SOCKET_IFNAME" in only.todo) is (state is Level.WARNING)


def test_gloo_that_is_told_its_interface_asks_for_no_name(tmp_path: Path) -> None:
    findings = look(tmp_path, "127.0.1.1 node-7\n", True, {"GLOO_SOCKET_IFNAME": "eth0"})
    assert one(findings, names.CHECK).state is Level.OK


@pytest.mark.parametrize(
    ("hosts", "state", "said"),
    [
        (OWN, Level.OK, "192.0.2.7 has the name node-7"),
        ("", Level.OK, "192.0.2.7 has no name"),
    ],
    ids=["well", "none"],
)
def test_the_way_back(tmp_path: Path, hosts: str, state: Level, said: str) -> None:
    only = one(look(tmp_path, hosts), names.REVERSE)
    assert (only.state, only.seen) == (state, said)


def test_directions_that_disagree(monkeypatch: pytest.MonkeyPatch) -> None:
    """No hosts file can say this: it takes a name server whose two zones are kept by hand."""
    monkeypatch.setattr(names, "routed_address", lambda: "192.0.2.7")
    monkeypatch.setattr(names.socket, "gethostbyaddr", lambda _: ("old-name", [], []))
    monkeypatch.setattr(names, "resolve", lambda _: ["198.51.100.9"])
    (only,) = names.reverse()
    assert only.state is Level.WARNING
    assert "old-name, which resolves to 198.51.100.9" in only.seen


def test_a_second_host_of_our_name() -> None:
    (node,) = status().nodes
    ours, theirs = "127.0.0.1", "198.51.100.9"
    page = status(nodes=(replace(node, host="a", address=ours),))
    assert names.duplicate_name(page, ("a",))[0].state is Level.OK  # it is this very node
    page = status(nodes=(*page.nodes, replace(node, host="a", address=theirs)))
    (only,) = names.duplicate_name(page, ("a", "a.example"))
    assert only.state is Level.WARNING
    assert f"a is also the name of the host at {theirs}" in only.seen
    assert names.duplicate_name(page, ("b",))[0].state is Level.OK
    # What --local-addr gave: a name of ours, and one that nobody knows.
    for word in ("localhost", "no-such-host.invalid", ""):
        page = status(nodes=(replace(node, host="a", address=word),))
        assert names.duplicate_name(page, ("a",))[0].state is Level.OK
    gone = status(nodes=(replace(node, host="a", address=theirs, state="dead"),))
    assert names.duplicate_name(gone, ("a",))[0].state is Level.OK
