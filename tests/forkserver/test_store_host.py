"""Which store a torch is asked for."""

from __future__ import annotations

from elasticrun.forkserver.store_host import libuv_takes_sockets


def test_no_torch_is_asked_for_what_it_writes_an_error_about() -> None:
    old = ["2.4.1+cu121", "2.5.0", "2.6.0+cu124"]
    new = ["2.7.0", "2.10.0+cu128", "2.13.0+cpu", "2.15.0a0+git1234", "3.0.0"]
    assert not any(libuv_takes_sockets(version) for version in old)
    assert all(libuv_takes_sockets(version) for version in new)
