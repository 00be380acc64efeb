"""`elasticrun submit --hosts`: a job that others' hosts run, managed from a host that has none of
its ranks, with real sshds."""

from __future__ import annotations

import json

import pytest

from tests.compat.live import PUPPET, allreduce, summing
from tests.further import further
from tests.harness import World, await_true
from tests.jobs.hosts.town import Town

pytestmark = pytest.mark.slow


def typed(town: Town, words: str) -> str:
    done = town.types_hosts(words)
    assert done.wait() == 0, (words, done.stdout, done.stderr)
    return done.stdout


@further("jobs/test_local::test_a_job_from_submit_to_delete", "jobs/hosts/test_hosts")
def test_a_job_on_hosts_from_submit_to_delete(town: Town, world: World) -> None:
    def row() -> dict[str, object]:
        (found,) = json.loads(typed(town, "list -o json"))
        return dict(found)

    said = typed(town, f"submit --hosts h1,h2 --name tr -- {PUPPET}")
    assert "job tr has started on h1 and h2" in said
    peers = summing(world, 2, world_size=2)
    assert [town.host_of(peer) for peer in peers] == ["h1", "h2"]
    await_true(lambda: row()["nodes"] == 2, "two nodes in the list")
    assert (row()["where"], row()["state"]) == ("ssh", "running")
    assert "/h2/" in typed(town, "exec tr --node h2 -- printenv XDG_STATE_HOME")
    assert "the job now uses at most 1 node" in typed(town, "scale tr 1")
    (peer,) = summing(world, 1, world_size=1)
    assert allreduce(world, [peer]) == [1]
    assert "no step was saved" in typed(town, "suspend tr")
    town.until_nothing_runs("h1", "h2")
    assert row()["state"] != "running"
    typed(town, "resume tr")
    known = {one.pid for one in (*peers, peer)}
    world.hub.ranks(2, world_size=2, pid=lambda pid: pid not in known)
    typed(town, "delete tr")
    town.until_nothing_runs("h1", "h2")
    assert typed(town, "list -o json").strip() == "[]"
