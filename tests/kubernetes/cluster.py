"""A cluster for tests: a stand-in for a Kubernetes API server, on a real socket on loopback.

`kubectl` and lightkube talk to it as to a real one. What it leaves out: field managers (a
server-side apply merges and owns nothing), conversion between versions of a CRD (all are served
as they were written), admission webhooks, quotas, `kubectl explain`, SPDY, limits of CEL's cost,
rules of built-in kinds beyond their schemas and what `server/schema.py` says of pods, Jobs and
CRDs; lists in pages are not of one version.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import copy
import ssl
import subprocess
import sys
import threading
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, TypeVar

import yaml
from aiohttp import web

from tests.certificates import Authority
from tests.harness import LIMIT, clean_environment
from tests.kubernetes.nodes.garbage import Garbage
from tests.kubernetes.server import rbac
from tests.kubernetes.server.apiserver import ApiServer
from tests.kubernetes.server.kinds import Obj
from tests.kubernetes.server.registry import Registry
from tests.kubernetes.server.store import Store, place_of

T = TypeVar("T")
IN_LAB = "192.0.2.254"
"""Where hosts of a lab find the server."""

KUBECTL = str(Path(sys.executable).with_name("kubectl"))


class Client:
    """A user of a cluster, real or not, who types kubectl."""

    def __init__(self, kubeconfig: Path, scratch: Path, namespace: str = "default") -> None:
        self.kubeconfig, self.namespace = kubeconfig, namespace
        self._env = {
            **clean_environment(),
            "KUBECONFIG": str(kubeconfig),
            "KUBECACHEDIR": str(scratch / "kubecache"),
        }

    @property
    def environment(self) -> dict[str, str]:
        """Of a process that is to find the cluster."""
        return self._env

    def command(self, *words: str) -> list[str]:
        return [KUBECTL, "-n", self.namespace, *words]

    def run(self, *words: str, given: str = "") -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            self.command(*words),
            env=self._env,
            input=given,
            capture_output=True,
            text=True,
            timeout=LIMIT,
            check=False,
        )

    def __call__(self, *words: str, given: str = "") -> str:
        """What a kubectl that ends well prints."""
        done = self.run(*words, given=given)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def refused(self, *words: str, given: str = "") -> str:
        """What a kubectl that fails says."""
        done = self.run(*words, given=given)
        assert done.returncode != 0, done.stdout
        return done.stderr.strip()


class StandIn:
    """The cluster: an event loop in a thread of its own. `close` it."""

    def __init__(self, scratch: Path, *, seed: int = 0) -> None:
        self.scratch = scratch
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="stand-in", daemon=True)
        self._thread.start()
        self.url = ""
        self.call(self._start(seed))

    async def _start(self, seed: int) -> None:
        self.store = Store()
        self.registry = Registry(self.store, seed)
        self.server = ApiServer(self.registry)
        self._runner = web.AppRunner(self.server.app(), access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        self._watchers = asyncio.create_task(self._see())
        site = web.TCPSite(self._runner, "127.0.0.1", 0, ssl_context=self._certified())
        await site.start()
        host, port = self._runner.addresses[0][:2]
        self.url = f"https://{host}:{port}"

    async def _see(self) -> None:
        """The controllers hear of each change, one after the other."""
        version = 0
        garbage = Garbage(self.registry)
        while True:
            for change in self.store.since(version or self.store.oldest):
                version = change.version
                garbage.see(change)
            if version == self.store.version:
                await self.store.changed()

    def _certified(self) -> ssl.SSLContext:
        """kubectl sends no token to a server without TLS."""
        authority = Authority(self.scratch, "kube-ca").create()
        self.authority = authority.cert
        tls = authority.sign("kube", "IP:127.0.0.1", f"IP:{IN_LAB}", "DNS:kubernetes.default.svc")
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(tls.cert, tls.key)
        return context

    def call(self, work: Coroutine[Any, Any, T]) -> T:
        """Done on the cluster's loop."""
        done = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return done.result(LIMIT)
        except concurrent.futures.TimeoutError:
            done.cancel()
            raise

    # ------------------------------------------------------------ users

    def client(self, user: str = "admin", namespace: str = "default") -> Client:
        """Who is called `admin` may do all; others what their roles say; with a colon
        (`default:operator`) it is a service account."""
        if user == "admin":
            who = rbac.Who(user, (rbac.MASTERS,))
        else:
            who = rbac.account(*user.split(":")) if ":" in user else rbac.Who(user)
        cluster = {"server": self.url, "certificate-authority": self.authority}
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "it",
            "contexts": [
                {"name": "it", "context": {"cluster": "it", "user": "me", "namespace": namespace}}
            ],
            "clusters": [{"name": "it", "cluster": cluster}],
            "users": [{"name": "me", "user": {"token": self.server.token(who)}}],
        }
        path = self.scratch / f"kubeconfig-{user.replace(':', '-')}-{namespace}"
        path.write_text(yaml.safe_dump(config))
        path.chmod(0o600)
        return Client(path, self.scratch, namespace)

    def used(self, user: str) -> set[tuple[str, str, str]]:
        """Verb, group and resource of what somebody has asked for."""
        return {(verb, group, what) for who, verb, group, what in self.server.used if who == user}

    # ------------------------------------------------------------ objects, past the API

    def objects(self, plural: str, group: str = "", namespace: str = "") -> list[Obj]:
        async def read() -> list[Obj]:
            return copy.deepcopy(list(self.store.all((group, plural), namespace)))

        return self.call(read())

    def until(
        self,
        plural: str,
        holds: Callable[[list[Obj]], Any],
        *,
        group: str = "",
        limit: float = LIMIT,
    ) -> list[Obj]:
        """Wait until this is true of the objects of a kind; TimeoutError shows them."""

        async def wait() -> list[Obj]:
            while not holds(found := copy.deepcopy(list(self.store.all((group, plural))))):
                await self.store.changed()
            return found

        async def bounded() -> list[Obj]:
            try:
                return await asyncio.wait_for(wait(), limit)
            except TimeoutError:
                seen = {place_of(one): one.get("status") for one in self.store.all((group, plural))}
                raise TimeoutError(f"{plural}: {seen}") from None

        return self.call(bounded())

    def do(self, what: Callable[[Registry], T]) -> T:
        """Something done to the registry, on its loop."""

        async def done() -> T:
            return what(self.registry)

        return self.call(done())

    def cut_watches(self) -> int:
        async def cut() -> int:
            return self.server.cut_watches()

        return self.call(cut())

    def forget(self) -> None:
        """Every version before now is 410 Gone to a watch."""

        async def forget() -> None:
            self.store.forget()

        self.call(forget())

    # ------------------------------------------------------------ the end

    async def _end(self) -> None:
        """What the controllers have run into is raised here."""
        self._watchers.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._watchers
        await self._runner.cleanup()
        rest = asyncio.all_tasks() - {asyncio.current_task()}
        for task in rest:  # requests whose clients have been cut off
            task.cancel()
        await asyncio.gather(*rest, return_exceptions=True)

    def close(self) -> None:
        self.cut_watches()
        self.call(self._end())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(LIMIT)
        self._loop.close()
