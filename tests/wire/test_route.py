"""What the kernel's routes say of an address, and what an endpoint's host says by itself."""

from __future__ import annotations

import pytest

from elasticrun.host.system.network import (
    is_loopback,
    is_ours,
    mtu_to,
    names_this_host_only,
    routed_address,
    source_of,
)

HERE = "127.0.0.1"
ELSEWHERE = "198.51.100.9"


def test_the_kernels_routes() -> None:
    assert mtu_to(HERE) > 1000
    assert mtu_to("no address") == 0
    assert source_of(HERE) == HERE


def test_addresses_of_ours() -> None:
    assert is_ours(HERE)
    assert is_ours("127.0.1.1")
    assert not is_ours(ELSEWHERE)
    assert not is_ours("")


def test_the_default_routes_address_is_ours() -> None:
    routed = routed_address()
    if not routed:
        pytest.skip("this host has no address beyond loopback")
    assert is_ours(routed)
    assert not is_loopback(routed)


@pytest.mark.parametrize(
    ("host", "only"),
    [
        ("localhost", True),
        ("LOCALHOST.", True),
        ("127.0.0.1", True),
        ("::1", True),
        ("head", False),
        ("10.0.0.1", False),
    ],
)
def test_names_of_this_host(host: str, only: bool) -> None:
    assert names_this_host_only(host) is only
