"""The page's listening socket and its HTTP server: / (for people), /picture and /events (data of
the page), /status (JSON), /healthz, /metrics.

The socket listens from the start, so that agents can get its address. The HTTP server is imported
at the first connection, in a thread, and the metrics library at the first request for /metrics.
Most jobs are never viewed, and spend neither memory nor time on this.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import functools
import hashlib
import ipaddress
import json
import logging
import socket
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any, Final

import msgspec

from elasticrun import __version__
from elasticrun.master.loop import Loop
from elasticrun.master.page.metrics import metrics_writer
from elasticrun.master.page.readers import NO_KEY, Readers, query
from elasticrun.master.page.stream import Receive, Send, Watchers, status_for_strangers
from elasticrun.wire.messages import JobStatus

MAX_CONNECTIONS: Final = 64
"""Maximum number of connections; one more closes the connection that has been silent longest."""

CONNECTION_LIFE: Final = 30.0
"""Seconds after which a connection is closed, whatever its state: against slow clients."""

MAX_HEAD: Final = 16 * 1024
"""Bytes of request line and headers; longer ones are answered with 400."""

CLOSE_LIMIT: Final = 1.0
"""Seconds for each of two waits when the page closes: for its event streams, and for the server."""

PRIVATE_NAMES: Final = (".localhost", ".local", ".internal", ".svc")
"""Suffixes of names that no public name server resolves."""

PATHS: Final = ("/", "/picture", "/events", "/status", "/healthz", "/metrics")

HEADERS: Final = {
    "cache-control": "no-store",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
}

logger = logging.getLogger("elasticrun")


class StatusPage:
    """The listening socket, and the HTTP server after the first connection."""

    def __init__(self, loop: Loop, readers: Readers | None = None) -> None:
        self._loop = loop
        self._readers = readers or Readers()
        self._socket: socket.socket | None = None
        self._server: Any = None
        self._serving: asyncio.Task[None] | None = None
        self._body: tuple[JobStatus, bytes] | None = None
        self._render: Callable[[], bytes] | None = None
        self._names = {socket.gethostname().lower()}
        self._streams = Watchers(loop)

    def listen(self, host: str, port: int) -> int:
        """Bind and listen; returns the port. The HTTP server starts at the first connection. Raises
        OSError if the port is not available."""
        self._names.add(host.lower())
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.socket(family, socket.SOCK_STREAM)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((host, port))
            listener.listen(MAX_CONNECTIONS)
            listener.setblocking(False)
        except OSError:
            listener.close()
            raise
        self._socket = listener
        asyncio.get_running_loop().add_reader(listener, self._on_first_connection)
        bound = int(listener.getsockname()[1])
        self._readers.set_address(host, bound)
        return bound

    def _on_first_connection(self) -> None:
        assert self._socket is not None
        asyncio.get_running_loop().remove_reader(self._socket)
        self._serving = asyncio.ensure_future(self._serve(self._socket))

    async def _serve(self, listener: socket.socket) -> None:
        try:
            self._server = await asyncio.to_thread(_http_server, self._answer)
            await self._server.serve(sockets=[listener])
        except Exception as wrong:
            logger.warning("the status page stopped: %s", wrong)

    async def close(self) -> None:
        """Stop listening and close every connection."""
        if self._socket is None:
            return
        asyncio.get_running_loop().remove_reader(self._socket)
        if self._serving is not None:
            if self._server is None:
                self._serving.cancel()
            else:
                await self._streams.close(CLOSE_LIMIT)
                self._server.shut_down()
            await asyncio.wait((self._serving,), timeout=CLOSE_LIMIT)
        self._socket.close()
        self._socket = None

    # ------------------------------------------------------------ the application (ASGI)

    async def _answer(self, scope: dict[str, Any], receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        code, headers, body = self._refusal(scope)
        if code == 200 and scope["path"] == "/events" and scope["method"] == "GET":
            await send(_start(200, {"content-type": "text/event-stream; charset=utf-8"}))
            whole = self._readers.trusts(scope)
            samples = whole and "hidden" not in query(scope)
            await self._streams.serve(receive, send, whole=whole, samples=samples)
            return
        if code == 200 and scope["path"] == "/metrics" and self._render is None:
            self._render = await asyncio.to_thread(metrics_writer, self._loop)  # it imports
        if code == 200:
            headers, body = self._content(scope)
        headers["content-length"] = str(len(body))
        await send(_start(code, headers))
        body = b"" if scope["method"] == "HEAD" else body
        await send({"type": "http.response.body", "body": body})

    def _refusal(self, scope: dict[str, Any]) -> tuple[int, dict[str, str], bytes]:
        """Code, headers and body of a refusal or redirect; code 200 and an empty body if the
        request is accepted."""
        headers = {"content-type": "text/plain; charset=utf-8"}
        host = next((value for name, value in scope["headers"] if name == b"host"), b"")
        name = host_of(host.decode("latin-1"))
        if not (name in self._names or is_private(name)):
            body = "unknown Host header: use the host's name or address\n"
            return 421, headers, body.encode()
        if scope["path"] not in PATHS:
            return 404, headers, f"not found; available: {', '.join(PATHS)}\n".encode()
        if scope["method"] not in ("GET", "HEAD"):
            return 405, {**headers, "allow": "GET, HEAD"}, b"read only\n"
        if scope["path"] == "/" and scope["method"] == "GET" and "key" in query(scope):
            cookie = self._readers.enter(scope)
            if not cookie:
                return 403, headers, NO_KEY.encode()
            # redirect to the URL without the key, which is valid only once
            return 303, {**headers, "location": "./", "set-cookie": cookie}, b""
        return 200, headers, b""

    def _content(self, scope: dict[str, Any]) -> tuple[dict[str, str], bytes]:
        """Headers and body of the requested path."""
        match scope["path"]:
            case "/":
                policy, body = html()
                headers = {
                    "content-type": "text/html; charset=utf-8",
                    "content-security-policy": policy,
                }
                return headers, body
            case "/status":
                return {"content-type": "application/json"}, self._json(
                    whole=self._readers.trusts(scope)
                )
            case "/picture":
                body = self._streams.picture(whole=self._readers.trusts(scope))
                return {"content-type": "application/json"}, body
            case "/metrics":
                assert self._render is not None
                kind = "text/plain; version=0.0.4; charset=utf-8"
                return {"content-type": kind}, self._render()
            case "/events":  # HEAD
                return {"content-type": "text/event-stream; charset=utf-8"}, b""
            case _:
                return {"content-type": "text/plain; charset=utf-8"}, b"ok\n"

    def _json(self, *, whole: bool) -> bytes:
        status = self._loop.status()
        if status.verdict and not whole:
            return status_json(status_for_strangers(status))
        if self._body is None or self._body[0] is not status:
            self._body = (status, status_json(status))
        return self._body[1]


@functools.cache
def html() -> tuple[str, bytes]:
    """The Content-Security-Policy and the page. The policy permits only the page's own style and
    script, and requests to this server."""
    body = (Path(__file__).parent / "page.html").read_bytes()
    style, script = (
        base64.b64encode(hashlib.sha256(_inside(body, tag)).digest()).decode()
        for tag in (b"style", b"script")
    )
    policy = (
        f"default-src 'none'; style-src 'sha256-{style}'; script-src 'sha256-{script}'; "
        "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; "
        "frame-ancestors 'none'"
    )
    return policy, body


def _inside(body: bytes, tag: bytes) -> bytes:
    return body.partition(b"<%s>" % tag)[2].partition(b"</%s>" % tag)[0]


def _start(code: int, headers: dict[str, str]) -> dict[str, Any]:
    pairs = [(name.encode(), value.encode()) for name, value in {**HEADERS, **headers}.items()]
    return {"type": "http.response.start", "status": code, "headers": pairs}


def host_of(header: str) -> str:
    """The name in a Host header, without port and brackets, in lower case."""
    text = header.strip().lower()
    if text.startswith("["):
        return text[1:].partition("]")[0]
    return text.partition(":")[0].rstrip(".")


def is_private(name: str) -> bool:
    """Whether no public name server can have directed the browser here by this name. True for an
    address, a name without a dot ("" too: HTTP/1.0 may omit it), and a name of a private zone. If
    other names were accepted, a web page whose name resolves to 127.0.0.1 could read this page (DNS
    rebinding)."""
    if "." not in name or name.endswith(PRIVATE_NAMES):
        return True
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def status_json(status: JobStatus) -> bytes:
    """The status as JSON: the fields of JobStatus, the round's name, and the version of
    elasticrun."""
    fields = {**msgspec.to_builtins(status), "version": __version__}
    if status.round is not None:
        fields["round"]["name"] = str(status.round)
    return json.dumps(fields, indent=1).encode() + b"\n"


def _bounded_protocol() -> Any:
    from uvicorn.protocols.http.h11_impl import H11Protocol

    class Bounded(H11Protocol):
        """Adds limits that uvicorn lacks: total time per connection, and number of connections with
        the most silent one closed instead of the new one refused."""

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            self._active_at = self.loop.time()
            others: list[Any] = [one for one in self.server_state.connections if one is not self]
            open_ = [one for one in others if not one.transport.is_closing()]
            if len(open_) >= MAX_CONNECTIONS:
                min(open_, key=lambda one: one._active_at).transport.abort()
            self._life_timer = self.loop.call_later(CONNECTION_LIFE, transport.abort)

        def data_received(self, data: bytes) -> None:
            self._active_at = self.loop.time()
            super().data_received(data)

        def connection_lost(self, exc: Exception | None) -> None:
            if life := getattr(self, "_life_timer", None):
                life.cancel()
            super().connection_lost(exc)

    return Bounded


def _http_server(app: Callable[..., Awaitable[None]]) -> Any:
    """Import and create the HTTP server. Runs in a thread, because the import is slow."""
    import uvicorn

    class Quiet(uvicorn.Server):
        """Leaves signals to the master, and sleeps until `shut_down` instead of polling ten times a
        second."""

        def __init__(self, config: uvicorn.Config) -> None:
            super().__init__(config)
            self._ended = asyncio.Event()

        def shut_down(self) -> None:
            self.force_exit = True
            self._ended.set()

        @contextlib.contextmanager
        def capture_signals(self) -> Iterator[None]:
            yield

        async def main_loop(self) -> None:
            await self._ended.wait()

    config = uvicorn.Config(
        app,
        interface="asgi3",
        http=_bounded_protocol(),
        ws="none",
        lifespan="off",
        loop="none",
        log_config=None,
        log_level="critical",
        access_log=False,
        server_header=False,
        date_header=False,
        proxy_headers=False,
        timeout_keep_alive=5,
        backlog=MAX_CONNECTIONS,
        h11_max_incomplete_event_size=MAX_HEAD,
    )
    return Quiet(config)
