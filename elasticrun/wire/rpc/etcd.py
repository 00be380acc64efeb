"""A minimal client of etcd (v3): read, transactions, leases, watch.

Every call goes to one server of the list and, if that one does not answer in time, to the next. A
failed call may have been carried out anyway (its answer was lost), so callers use conditional
transactions, which are harmless when repeated. Servers without a majority do not answer
(`hasleader`), so no stale data is ever read.

One event loop owns an `Etcd`; nothing here blocks it.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from elasticrun.wire.pb import etcd_pb2 as pb
from elasticrun.wire.rpc.channel import grpc, in_words
from elasticrun.wire.rpc.etcd_place import EtcdPlace
from elasticrun.wire.types import Endpoint

CALL_LIMIT: Final = 2.0
"""Seconds for one server to answer before the next one is tried."""

FIRST_BACKOFF: Final = 0.1
MAX_BACKOFF: Final = 1.0
"""Seconds before servers are tried again when none has answered: doubled each time, and
jittered."""

OPTIONS: Final[Mapping[str, int]] = {
    "grpc.enable_http_proxy": 0,
    "grpc.dns_min_time_between_resolutions_ms": 500,
    "grpc.initial_reconnect_backoff_ms": 100,
    "grpc.max_reconnect_backoff_ms": 1000,
    "grpc.use_local_subchannel_pool": 1,
    # A watcher must notice that its server's host has vanished. etcd disconnects clients that ping
    # more often than every 5 s.
    "grpc.keepalive_time_ms": 6000,
    "grpc.keepalive_timeout_ms": 2000,
    "grpc.http2.ping_timeout_ms": 2000,
    "grpc.http2.max_pings_without_data": 0,
    "grpc.max_receive_message_length": 8 * 1024 * 1024,
}

_REQUIRE_LEADER: Final = (("hasleader", "true"),)

_FINAL: Final = (
    *("INVALID_ARGUMENT", "NOT_FOUND", "PERMISSION_DENIED", "UNAUTHENTICATED", "UNIMPLEMENTED"),
    "FAILED_PRECONDITION",
)
"""gRPC's status codes for answers that a retry does not change."""


class EtcdError(Exception):
    """The call failed; the text is a sentence."""


class EtcdSilent(EtcdError):
    """No server answered: the call may have been carried out or not, and may be retried."""


class EtcdRefused(EtcdError):
    """etcd refused: retrying is useless."""


@dataclass(frozen=True, slots=True)
class KeyValue:
    """A key with its value. `created` is the create_revision, which no other creation of any key
    ever has."""

    key: str
    value: bytes
    created: int
    lease: int


@dataclass(frozen=True, slots=True)
class TxnResult:
    """The result of a transaction; `items` are the results of its reads."""

    succeeded: bool
    revision: int
    items: tuple[KeyValue, ...] = ()


# ---------------------------------------------------------------- parts of a transaction


def created_at(key: str, revision: int) -> pb.Compare:
    """The condition that the key exists with this create_revision; 0: that it does not exist."""
    return pb.Compare(result=0, target=1, key=key.encode(), create_revision=revision)


def put(key: str, value: bytes, lease: int = 0) -> pb.RequestOp:
    """Write a key; with a lease it is deleted when the lease ends."""
    return pb.RequestOp(request_put=pb.PutRequest(key=key.encode(), value=value, lease=lease))


def delete(key: str) -> pb.RequestOp:
    """Remove a key."""
    return pb.RequestOp(request_delete_range=pb.DeleteRangeRequest(key=key.encode()))


def get(key: str) -> pb.RequestOp:
    """Read one key."""
    return pb.RequestOp(request_range=pb.RangeRequest(key=key.encode()))


def get_all(prefix: str) -> pb.RequestOp:
    """Read every key with this prefix."""
    return pb.RequestOp(
        request_range=pb.RangeRequest(key=prefix.encode(), range_end=_end_of(prefix))
    )


def _end_of(prefix: str) -> bytes:
    """The first key after all that start with `prefix`, which ends with "/"."""
    raw = prefix.encode()
    return raw[:-1] + bytes([raw[-1] + 1])


# ---------------------------------------------------------------- the client


class Etcd:
    """One client of one etcd; `close` it in the event loop that used it."""

    def __init__(
        self,
        place: EtcdPlace,
        *,
        ca: str = "",
        cert: str = "",
        key: str = "",
        limit: float = CALL_LIMIT,
        options: Mapping[str, int] = OPTIONS,
    ) -> None:
        """`ca`, `cert`, `key`: files (PEM) for `etcds://`, read here. Raises EtcdRefused."""
        self.place = place
        self._limit = limit
        self._options = tuple(options.items())
        self._credentials = _credentials(ca, cert, key) if place.secure else None
        self._channels: dict[Endpoint, Any] = {}
        self._first = 0  # index of the server to try first, modulo their number

    async def close(self) -> None:
        """Close all connections; calls in progress end."""
        channels = list(self._channels.values())
        self._channels.clear()
        for channel in channels:
            await channel.close()

    # ------------------------------------------------------------ calls

    async def txn(
        self,
        conditions: tuple[pb.Compare, ...],
        then: tuple[pb.RequestOp, ...],
        otherwise: tuple[pb.RequestOp, ...] = (),
        *,
        limit: float | None = None,
    ) -> TxnResult:
        """If all conditions hold do `then`, else `otherwise`, atomically. Raises EtcdError."""
        request = pb.TxnRequest(compare=conditions, success=then, failure=otherwise)
        answer = await self._ask("KV/Txn", request, pb.TxnResponse, limit)
        found = [_item(kv) for part in answer.responses for kv in part.response_range.kvs]
        return TxnResult(answer.succeeded, answer.header.revision, tuple(found))

    async def read(self, prefix: str) -> TxnResult:
        """Every key with this prefix, as of now (a linearizable read). Raises EtcdError."""
        return await self.txn((), (get_all(prefix),))

    async def grant(self, seconds: int) -> int:
        """Create a lease of `seconds` seconds, and return its id. Raises EtcdError."""
        request = pb.LeaseGrantRequest(TTL=seconds)
        answer = await self._ask("Lease/LeaseGrant", request, pb.LeaseGrantResponse)
        if answer.error:
            raise EtcdRefused(f"etcd grants no lease: {answer.error[:200]}")
        return int(answer.ID)

    async def revoke(self, lease: int) -> None:
        """End a lease now, with every key attached to it; a no-op if it does not exist. Raises
        EtcdError."""
        request = pb.LeaseRevokeRequest(ID=lease)
        with contextlib.suppress(EtcdRefused):
            await self._ask("Lease/LeaseRevoke", request, pb.LeaseRevokeResponse)

    async def renew(self, lease: int, limit: float | None = None) -> bool:
        """Renew a lease; False if it does not exist any more. Raises EtcdError."""
        request = pb.LeaseKeepAliveRequest(ID=lease)
        # A stream in etcd's API, but one request and one answer work like a unary call.
        answer = await self._ask("Lease/LeaseKeepAlive", request, pb.LeaseKeepAliveResponse, limit)
        return int(answer.TTL) > 0

    async def follow(
        self, prefix: str, trouble: Callable[[str], None] = lambda sentence: None
    ) -> AsyncGenerator[dict[str, KeyValue], None]:
        """All items under `prefix` by key: now, and after each change, forever.

        Never fails when etcd is unavailable: `trouble(sentence)` is called when no server answers
        and `trouble("")` when one answers again. Changes in between are caught up by a new read, so
        quick changes may appear as one. Raises EtcdRefused."""
        pause = FIRST_BACKOFF
        while True:
            try:
                answer = await self.read(prefix)
                trouble("")
                there = {item.key: item for item in answer.items}
                yield dict(there)
                async for events in self._watch(prefix, answer.revision + 1):
                    pause = FIRST_BACKOFF
                    for event in events:
                        item = _item(event.kv)
                        there[item.key] = item
                        if event.type == 1:
                            del there[item.key]
                    if events:
                        yield dict(there)
            except EtcdSilent as silent:
                trouble(str(silent))
            await asyncio.sleep(pause * random.uniform(0.5, 1.0))
            pause = min(MAX_BACKOFF, 2 * pause)

    async def _watch(self, prefix: str, revision: int) -> AsyncIterator[list[Any]]:
        """Changes from `revision` on, while one server sends them; the first list is empty and
        confirms the watch. Raises EtcdSilent or EtcdRefused when the stream breaks; ends when the
        revision is compacted away: then read again."""
        call = self._channel().stream_stream(
            "/etcdserverpb.Watch/Watch",
            request_serializer=pb.WatchRequest.SerializeToString,
            response_deserializer=pb.WatchResponse.FromString,
        )(metadata=_REQUIRE_LEADER, wait_for_ready=False)
        create = pb.WatchCreateRequest(
            key=prefix.encode(), range_end=_end_of(prefix), start_revision=revision
        )
        try:
            begin = call.write(pb.WatchRequest(create_request=create))
            await asyncio.wait_for(begin, self._limit)
            # Until `created` arrives the outcome is open; from then on silence is normal, and the
            # transport's pings detect a dead server.
            answer = await asyncio.wait_for(call.read(), self._limit)
            while answer is not grpc.aio.EOF and not answer.canceled:
                yield list(answer.events)
                answer = await call.read()
        except (TimeoutError, grpc.aio.AioRpcError, asyncio.InvalidStateError) as broken:
            self._first += 1
            if isinstance(broken, TimeoutError):
                raise EtcdSilent(f"{self.place} does not answer") from None
            if isinstance(broken, grpc.aio.AioRpcError):
                raise _error(broken, self.place) from None
            # InvalidStateError is grpc.aio's error for a stream that ended during a write.
            raise EtcdSilent(f"{self.place} ended the stream") from None
        finally:
            call.cancel()

    # ------------------------------------------------------------ choosing a server

    def _channel(self) -> Any:
        """The channel to the current server."""
        server = self.place.servers[self._first % len(self.place.servers)]
        if server not in self._channels:
            target = f"dns:///{server}"
            if self._credentials is None:
                made = grpc.aio.insecure_channel(target, options=self._options)
            else:
                made = grpc.aio.secure_channel(target, self._credentials, options=self._options)
            self._channels[server] = made
        return self._channels[server]

    async def _ask(
        self, method: str, request: Any, answer: type[Any], limit: float | None = None
    ) -> Any:
        """Call the servers in turn until one answers, starting with the one that was used last.
        Raises EtcdRefused at once, or the error of the last server if all were silent."""
        error: EtcdError | None = None
        for _ in self.place.servers:
            ask = self._channel().unary_unary(
                f"/etcdserverpb.{method}",
                request_serializer=type(request).SerializeToString,
                response_deserializer=answer.FromString,
            )
            how = {"timeout": limit or self._limit, "wait_for_ready": False}
            try:
                return await ask(request, metadata=_REQUIRE_LEADER, **how)
            except grpc.aio.AioRpcError as broken:
                error = _error(broken, self.place)
            if not isinstance(error, EtcdSilent):
                raise error
            self._first += 1
        assert error is not None
        raise error


def _item(kv: Any) -> KeyValue:
    return KeyValue(kv.key.decode(errors="replace"), kv.value, kv.create_revision, kv.lease)


def _error(broken: Any, place: EtcdPlace) -> EtcdError:
    """EtcdRefused if a retry is useless, else EtcdSilent, also for a server that is stopping or has
    no majority."""
    code = broken.code().name
    text = in_words(code, broken.details())
    if code in _FINAL:
        return EtcdRefused(f"{place} refuses: {text}")
    why = "" if code == "DEADLINE_EXCEEDED" else f": {text}"
    return EtcdSilent(f"{place} does not answer{why}")


def _credentials(ca: str, cert: str, key: str) -> Any:
    """TLS to etcd with these files; without `ca` the system's CAs are trusted."""
    try:
        parts = [Path(path).read_bytes() if path else None for path in (ca, key, cert)]
    except OSError as wrong:
        raise EtcdRefused(f"{wrong.filename} cannot be read: {wrong.strerror}") from None
    return grpc.ssl_channel_credentials(*parts)
