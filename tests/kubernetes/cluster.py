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
import ctypes
import socket
import ssl
import subprocess
import sys
import threading
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, TypeVar

import yaml
from aiohttp import web

from elasticrun.testing.hosts import Lab
from tests import needs
from tests.certificates import Authority
from tests.harness import LIMIT, clean_environment
from tests.kubernetes.nodes.garbage import Garbage
from tests.kubernetes.nodes.kubelet import Ground, PodRun, PodsOfAllNodes
from tests.kubernetes.nodes.scheduler import Scheduler
from tests.kubernetes.nodes.streams import Streams
from tests.kubernetes.nodes.workloads import Workloads
from tests.kubernetes.server import rbac
from tests.kubernetes.server.apiserver import ApiServer, disrupt
from tests.kubernetes.server.kinds import Obj
from tests.kubernetes.server.registry import FINAL, Registry
from tests.kubernetes.server.store import Store, place_of

CLONE_NEWNET = 0x40000000
T = TypeVar("T")
KUBECTL = str(Path(sys.executable).with_name("kubectl"))


def listener(address: str, netns: str) -> socket.socket:
    """A socket that listens in another network, which it stays in; for a thread of its own."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open("/proc/thread-self/ns/net") as own:
        try:
            if netns:
                with open(netns) as other:
                    assert libc.setns(other.fileno(), CLONE_NEWNET) == 0, ctypes.get_errno()
            return socket.create_server((address, 0), backlog=1024)
        finally:
            libc.setns(own.fileno(), CLONE_NEWNET)


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
    """The cluster: an event loop in a thread of its own. `close` it.

    `lab`: each pod is a host of it, and so is the API server (`inside`), beside its socket on
    loopback; without one pods share the machine's network, at loopback addresses of their own.
    `env`: variables that each pod has. `hollow`: pods have no processes; `finish` ends them.
    `pause`: seconds until a Job replaces a pod that has failed. `workloads`: whether anybody makes
    the pods of Jobs and Deployments."""

    def __init__(
        self,
        scratch: Path,
        *,
        lab: Lab | None = None,
        env: dict[str, str] | None = None,
        hollow: bool = False,
        pause: float = 10.0,
        workloads: bool = True,
        seed: int = 0,
    ) -> None:
        self.scratch = scratch
        self.namespace = "default"
        self.url = self.inside = ""
        self.has_workloads = workloads
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="stand-in", daemon=True)
        self._thread.start()
        self.call(self._start(lab, dict(env or {}), hollow, pause, seed))

    async def _start(
        self, lab: Lab | None, env: dict[str, str], hollow: bool, pause: float, seed: int
    ) -> None:
        self.store = Store()
        self.registry = Registry(self.store, seed)
        self.server = ApiServer(self.registry)
        self.faults = self.server.faults
        ground = Ground(self.server, self.scratch, lab, env, hollow)
        self.kubelet = PodsOfAllNodes(ground)
        self._streams = streams = Streams(self.kubelet)
        self.server.pods |= {"log": streams.log, "exec": streams.execute}
        self._runner = web.AppRunner(self.server.app(), access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        sockets = [await ground.off(lambda: listener("127.0.0.1", ""))]
        if lab is not None:
            host = await ground.off(lambda: lab.add("kube-apiserver"))
            sockets.append(await ground.off(lambda: listener(host.address, host.netns)))
        addresses = [one.getsockname() for one in sockets]
        context = self._certified([host for host, _ in addresses])
        for one in sockets:
            await web.SockSite(self._runner, one, ssl_context=context).start()
        self.url, self.inside = (
            f"https://{host}:{port}" for host, port in (addresses[0], addresses[-1])
        )
        host, port = addresses[-1]
        env |= {"KUBERNETES_SERVICE_HOST": host, "KUBERNETES_SERVICE_PORT": str(port)}
        ground.authority = self.authority
        self._watchers = asyncio.create_task(self._see(pause))

    async def _see(self, pause: float) -> None:
        """The controllers hear of each change, one after the other."""
        version = 0
        garbage, scheduler = Garbage(self.registry), Scheduler(self.registry)
        workloads = Workloads(self.registry, pause)
        while True:
            for change in self.store.since(version):
                version = change.version
                garbage.see(change)
                self.kubelet.see(change)
                workloads.see(change)
            if self.has_workloads:
                workloads.look()
            scheduler.look()
            if version == self.store.version:
                await self.store.changed()

    def _raise(self) -> None:
        """What a controller or a kubelet has run into."""
        if self._watchers.done():
            self._watchers.result()
        if self.kubelet.errors:
            raise self.kubelet.errors[0]

    def _certified(self, addresses: list[str]) -> ssl.SSLContext:
        """kubectl sends no token to a server without TLS."""
        authority = Authority(self.scratch, "kube-ca").create()
        self.authority = authority.cert
        tls = authority.sign("kube", *(f"IP:{one}" for one in sorted(set(addresses))))
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(tls.cert, tls.key)
        return context

    def call(self, work: Coroutine[Any, Any, T]) -> T:
        """Done on the cluster's loop."""
        done = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return done.result(LIMIT + 10)  # `until` shows first what it waits for
        except concurrent.futures.TimeoutError:
            done.cancel()
            raise

    # ------------------------------------------------------------ users

    def client(
        self, user: str = "admin", namespace: str = "default", *, inside: bool = False
    ) -> Client:
        """Who is called `admin` may do all; others what their roles say; with a colon
        (`default:operator`) it is a service account. `inside`: on a host of the lab."""
        if user == "admin":
            who = rbac.Who(user, (rbac.MASTERS,))
        else:
            who = rbac.account(*user.split(":")) if ":" in user else rbac.Who(user)
        cluster = {
            "server": self.inside if inside else self.url,
            "certificate-authority": self.authority,
        }
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
        path = self.scratch / f"kubeconfig-{user.replace(':', '-')}-{namespace}{'-inside' * inside}"
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
                self._raise()
            return found

        async def bounded() -> list[Obj]:
            try:
                return await asyncio.wait_for(wait(), limit)
            except TimeoutError:
                seen = {place_of(one): one.get("status") for one in self.store.all((group, plural))}
                self._raise()
                raise TimeoutError(f"{plural}: {seen}") from None

        return self.call(bounded())

    def do(self, what: Callable[[Registry], T]) -> T:
        """Something done to the registry, on its loop."""

        async def done() -> T:
            return what(self.registry)

        return self.call(done())

    # ------------------------------------------------------------ nodes and pods

    def node(self, name: str, *, gpus: int = 0, cpu: int = 64, labels: Obj | None = None) -> None:
        """A node that is ready; its pods are processes in namespaces, which takes root."""
        needs.namespaces("--mount", "--uts")
        needs.program("setpriv", package="util-linux")
        needs.program("nsenter", package="util-linux")
        room = {"cpu": str(cpu), "memory": "256Gi", "pods": "110", "nvidia.com/gpu": str(gpus)}
        labels = {"kubernetes.io/hostname": name, **(labels or {})}
        ready = {"type": "Ready", "status": "True", "reason": "KubeletReady"}
        status = {"capacity": room, "allocatable": room, "conditions": [ready]}

        def made(registry: Registry) -> None:
            kind = registry.kind("nodes")
            registry.create(kind, "", {"metadata": {"name": name, "labels": labels}})
            registry.edit(kind, ("", name), lambda obj: obj.update(status=status), "status")

        self.do(made)

    def lose_node(self, name: str) -> None:
        """It loses its power: what ran there says nothing more, and its pods are being deleted for
        as long as the node stands in the API (`kubectl delete node` ends that)."""

        def lost(registry: Registry) -> None:
            self.kubelet.lose(name)
            kind, pods = registry.kind("nodes"), registry.kind("pods")
            unreachable = {"key": "node.kubernetes.io/unreachable", "effect": "NoExecute"}
            registry.edit(kind, ("", name), lambda obj: obj.update(spec={"taints": [unreachable]}))
            unknown = {"type": "Ready", "status": "Unknown", "reason": "NodeStatusUnknown"}
            registry.edit(
                kind, ("", name), lambda obj: obj["status"].update(conditions=[unknown]), "status"
            )
            for pod in list(self.store.all(("", "pods"))):
                if pod["spec"].get("nodeName") == name and pod["status"]["phase"] not in FINAL:
                    told = "Taint manager: deleting due to NoExecute taint"
                    disrupt(registry, place_of(pod), "DeletionByTaintManager", told)
                    registry.delete(pods, place_of(pod), {})

        self.do(lost)

    def kill(self, pod: str, namespace: str = "default", *, reason: str = "") -> None:
        """SIGKILL to a pod's containers; `reason`: as `OOMKilled`."""
        self.do(lambda registry: self._run(registry, namespace, pod).kill(reason))

    def finish(self, pod: str, code: int, namespace: str = "default") -> None:
        """A hollow pod ends by itself."""
        self.do(lambda registry: self._run(registry, namespace, pod).codes.put_nowait(code))

    def log(self, pod: str, namespace: str = "default") -> str:
        """What a pod has printed, also one that is no more."""
        found = self.kubelet.printed[namespace, pod].values()
        return b"".join(line for one in found for _, line in one.lines).decode()

    def preempt(self, pod: str, namespace: str = "default") -> None:
        """The scheduler takes a pod away for a more important one."""

        def preempted(registry: Registry) -> None:
            disrupt(
                registry, (namespace, pod), "PreemptionByScheduler", "preempting to accommodate"
            )
            registry.delete(registry.kind("pods"), (namespace, pod), {})

        self.do(preempted)

    def _run(self, registry: Registry, namespace: str, pod: str) -> PodRun:
        found = registry.get(registry.kind("pods"), namespace, pod)
        return self.kubelet.runs[found["metadata"]["uid"]]

    def cut_watches(self) -> int:
        return self.do(lambda _: self.server.cut_watches())

    def cut_logs(self) -> int:
        return self.do(lambda _: self._streams.cut())

    def forget(self) -> None:
        """Every version before now is 410 Gone to a watch."""
        self.do(lambda _: self.store.forget())

    # ------------------------------------------------------------ the end

    async def _end(self) -> None:
        """What the controllers have run into is raised here."""
        self._watchers.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._watchers
        await self.kubelet.end()
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
