"""Access control of the page: who may see all of it, including stacks, settings and output.

Whoever has opened a link with a key may see all of it. In a job without a token, so may everybody
who connects from the master's host.

The key in a link is valid once, and for 15 minutes. Its visitor gets a cookie that is valid for
this master's lifetime. Other visitors are strangers (`stream.for_strangers`).
"""

from __future__ import annotations

import hmac
import ipaddress
import secrets
import time
from typing import Any, Final
from urllib.parse import parse_qs

from elasticrun.wire.auth import PAGE_KEY_LIFE, key_expiry, page_key
from elasticrun.wire.types import Endpoint

MAX_SPENT: Final = 1024
"""Maximum number of used keys that are remembered until they expire; at the limit, no further key
is accepted. Strangers cannot reach it, because only holders of the secret can create keys."""

NO_KEY: Final = (
    "this link has been used, or is older than 15 minutes or than the job's master; for a new one "
    "run on the master's host: elasticrun status\n"
)


class Readers:
    """Decides which visitors may see everything. `secret`: signs the keys (`auth.operator_token`);
    `guarded`: the job has a token, so local visitors need a link too."""

    def __init__(self, secret: str = "", *, guarded: bool = False) -> None:
        self._secret = secret or secrets.token_hex(32)
        self._guarded = guarded
        self._spent: dict[str, float] = {}
        self._began = int(time.time())  # older keys are refused: they may be used already
        self._address: tuple[str, int] | None = None
        # The cookie has a random name, because a browser may view several jobs, and all ports of a
        # host share its cookies.
        self._cookie = f"elasticrun-{secrets.token_hex(4)}={secrets.token_urlsafe(16)}"

    def key(self, host: str) -> str:
        """A new key for a page that listens on `host`; "" if every visitor of that page may see
        everything."""
        is_open = is_loopback(host) and not self._guarded
        return "" if is_open else page_key(self._secret, time.time())

    def set_address(self, host: str, port: int) -> None:
        """Set the address on which the page listens."""
        self._address = host, port

    def link(self) -> str:
        """The page's URL for people, with a new key if visitors need one; "" without a page."""
        return "" if self._address is None else page_url(*self._address, self.key(self._address[0]))

    def trusts(self, scope: dict[str, Any]) -> bool:
        """Whether this visitor may see everything."""
        peer = scope.get("client")
        if peer is not None and is_loopback(peer[0]) and not self._guarded:
            return True
        given = [value for name, value in scope["headers"] if name == b"cookie"]
        parts = (part.strip() for value in given for part in value.split(b";"))
        return any(hmac.compare_digest(part, self._cookie.encode()) for part in parts)

    def enter(self, scope: dict[str, Any]) -> str:
        """The Set-Cookie header for a visitor whose link has a key; "" if the key is invalid. If
        the visitor is already trusted, the key is not used up, because people open a link twice."""
        if not self.trusts(scope) and not self._redeem(query(scope).get("key", [""])[0]):
            return ""
        return f"{self._cookie}; Path=/; HttpOnly; SameSite=Strict"

    def _redeem(self, key: str) -> bool:
        now = time.time()
        until = key_expiry(self._secret, key)
        self._spent = {one: end for one, end in self._spent.items() if end > now}
        fresh = until > now and until - PAGE_KEY_LIFE >= self._began
        if not fresh or key in self._spent or len(self._spent) >= MAX_SPENT:
            return False
        self._spent[key] = until
        return True


def query(scope: dict[str, Any]) -> dict[str, list[str]]:
    """The parameters of the URL's query."""
    return parse_qs(scope["query_string"].decode("latin-1"), keep_blank_values=True)


def is_loopback(host: str) -> bool:
    """Whether an address is a loopback address: its connections come from this host, or through a
    tunnel to it."""
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return False
    inner = getattr(address, "ipv4_mapped", None)
    return (inner or address).is_loopback


def page_url(host: str, port: int, key: str = "") -> str:
    """The URL of the page for people; with a key, a link that gives full access."""
    return f"http://{Endpoint(reachable(host), port)}/" + (f"?key={key}" if key else "")


def reachable(host: str) -> str:
    """The address at which this host reaches a listener on `host`: loopback if that is a
    wildcard."""
    return {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}.get(host, host)
