"""Who hosts the master: the bind test with real sockets."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from elasticrun.agent.rendezvous import place as places
from elasticrun.config import Place
from elasticrun.host.system.network import routed_address
from elasticrun.wire.types import Endpoint
from tests.agent.configs import launched
from tests.harness import free_port


@pytest.fixture
def taken() -> Iterator[int]:
    """A port of loopback where somebody listens, with SO_REUSEPORT as gRPC's default has it."""
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield listener.getsockname()[1]


def test_a_free_port_is_ours_and_stays_free() -> None:
    port = free_port()
    mapped = ["::ffff:127.0.0.1"] if socket.has_dualstack_ipv6() else []
    for address in ("127.0.0.1", "127.0.0.1", *mapped):
        assert places.bind_test(address, port) is places.Bind.OURS


def test_a_listening_port_is_taken_even_with_reuseport(taken: int) -> None:
    assert places.bind_test("127.0.0.1", taken) is places.Bind.TAKEN


def test_an_address_of_another_host_is_elsewhere() -> None:
    assert places.bind_test("192.0.2.1", free_port()) is places.Bind.ELSEWHERE


def test_an_address_is_ours_when_our_own_nonce_answers_there() -> None:
    assert places.reaches_this_host("127.0.0.1")
    assert places.reaches_this_host("127.0.1.1")
    assert not places.reaches_this_host("192.0.2.1")
    routed = routed_address()
    if routed:
        assert places.reaches_this_host(routed)


def test_an_address_at_which_somebody_else_answers_is_not_ours(monkeypatch) -> None:
    """What is dialled comes out at a stranger: a rule of the firewall, or the same private address
    on two hosts."""
    with socket.create_server(("127.0.0.1", 0)) as stranger:

        class Misled(socket.socket):
            def connect(self, address: object) -> None:
                super().connect(stranger.getsockname())
                with stranger.accept()[0] as answering:
                    answering.sendall(b"some sixteen char")

        def misled(address: str) -> socket.socket:
            made = Misled()
            made.settimeout(0.2)
            return made

        monkeypatch.setattr(places, "is_loopback", lambda address: False)
        assert places.reaches_this_host("127.0.0.1")
        monkeypatch.setattr(places, "_socket_for", misled)
        assert not places.reaches_this_host("127.0.0.1")


def test_a_name_is_asked_for_more_and_more_rarely() -> None:
    waits = [places.retry_delay(tries) for tries in range(1, 2000)]
    assert waits[:4] == [1.0, 2.0, 4.0, 5.0]
    assert set(waits[3:]) == {5.0}


def test_the_first_of_several_agents_hosts_and_the_second_dials(taken: int) -> None:
    several = {"max_nodes": 2}
    free = free_port()
    first = places.settle(launched(several), Place("elastic", "localhost", free))
    assert first.bind == Endpoint("127.0.0.1", free)
    second = places.settle(launched(several), Place("elastic", "localhost", taken))
    assert second.bind is None
    assert second.dial == Endpoint("127.0.0.1", taken)


@pytest.mark.parametrize(
    ("host", "is_host", "bind"),
    [
        ("localhost", False, None),  # it never hosts
        ("192.0.2.1", True, "::"),  # it hosts although the address is not ours
        ("192.0.2.1", None, None),
    ],
)
def test_what_is_host_says(host: str, is_host: bool | None, bind: str | None) -> None:
    where = Place("elastic", host, free_port(), is_host=is_host)
    expected = None if bind is None else Endpoint(bind, where.port)
    assert places.settle(launched(), where).bind == expected


def test_a_name_of_ours_on_loopback_is_hosted_where_others_reach_it(monkeypatch) -> None:
    routed = routed_address()
    if not routed:
        pytest.skip("this host has no address beyond loopback")
    # Debian writes `127.0.1.1 hostname` into /etc/hosts; this host's resolver is given that line.
    ask = socket.getaddrinfo
    monkeypatch.setattr(socket, "getaddrinfo", lambda host, *a, **k: ask("127.0.1.1", *a, **k))
    where = Place("elastic", "debian-host", free_port())
    place = places.settle(launched({"max_nodes": 2}), where)
    assert place.bind == Endpoint(routed, where.port)
    alone = places.settle(launched(), where)
    assert alone.bind == Endpoint("127.0.1.1", where.port)


def test_a_name_that_does_not_resolve_may_yet() -> None:
    with pytest.raises(places.NotYet, match=r"no-such-host\.invalid"):
        places.resolve("no-such-host.invalid", 1)


def test_static_rank_0_has_a_proxy_and_the_others_dial_it() -> None:
    where = Place("static", "127.0.0.1", free_port())
    head = places.settle(launched({"max_nodes": 2}, node_rank=0), where)
    assert head.proxy == Endpoint("127.0.0.1", where.port)
    assert head.bind == Endpoint("127.0.0.1", 0)
    other = places.settle(launched({"max_nodes": 2}, node_rank=1), where)
    assert (other.proxy, other.bind) == (None, None)
    assert other.dial == Endpoint("127.0.0.1", where.port)


def test_a_taken_proxy_port_is_a_sentence(taken: int) -> None:
    with pytest.raises(places.HostError, match=f"{taken}: another process listens there"):
        places.listen_proxy(Endpoint("127.0.0.1", taken))
