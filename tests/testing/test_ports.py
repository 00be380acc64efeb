"""Ports for jobs of tests, also of those that run side by side."""

from __future__ import annotations

import pytest

from elasticrun.testing import node


def residues(monkeypatch, worker: str, count: str) -> set[int]:
    monkeypatch.setenv("PYTEST_XDIST_WORKER", worker)
    monkeypatch.setenv("PYTEST_XDIST_WORKER_COUNT", count)
    ports = [node.free_port() for _ in range(60)]
    assert min(ports) >= node.LOWEST_PORT
    return {(port - node.LOWEST_PORT) % 3 for port in ports}


def test_processes_of_xdist_have_ports_of_their_own(monkeypatch) -> None:
    assert [residues(monkeypatch, f"gw{number}", "3") for number in range(3)] == [{0}, {1}, {2}]


@pytest.mark.parametrize(("worker", "count"), [("", ""), ("master", "3"), ("gw3", "3"), ("gw", "")])
def test_the_only_process_has_all(monkeypatch, worker: str, count: str) -> None:
    assert residues(monkeypatch, worker, count) == {0, 1, 2}
