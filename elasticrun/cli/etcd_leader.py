"""Which master leads a job, asked of etcd; for `elasticrun status`."""

from __future__ import annotations

from elasticrun.config import ETCD_CALL_LIMIT, Tls
from elasticrun.wire.etcd_place import Keys, PlaceError, leader_from_bytes, parse_place
from elasticrun.wire.ids import Endpoint


class NoLeader(Exception):
    """Nobody leads; the text is a sentence."""


async def leading(store: str, job_id: str, files: Tls | None) -> Endpoint:
    """The endpoint of the master that leads `job_id`. NoLeader."""
    # Late: grpc takes longer to import than everything else here together.
    from elasticrun.wire import codec, etcd
    from elasticrun.wire.messages import End

    tls = files or Tls()
    keys = Keys(job_id)
    try:
        client = etcd.Etcd(
            parse_place(store), ca=tls.ca, cert=tls.cert, key=tls.key, limit=ETCD_CALL_LIMIT
        )
        try:
            there = {item.key: item.value for item in (await client.read(keys.lead)).items}
        finally:
            await client.close()
    except (PlaceError, etcd.EtcdError) as wrong:
        raise NoLeader(str(wrong)) from None
    leader = leader_from_bytes(there.get(keys.master, b""))
    if leader is not None:
        return leader.endpoint
    if keys.outcome in there:
        try:
            end = codec.order_from_wire(there[keys.outcome])
        except codec.WireError:
            end = None
        if isinstance(end, End):
            raise NoLeader(f"job {job_id!r} is over: {end.reason}")
    raise NoLeader(f"no master leads a job {job_id!r} in {store} now")
