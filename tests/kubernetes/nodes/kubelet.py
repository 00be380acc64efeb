"""Nodes that run pods as real processes: on a host of network namespaces each, or on loopback.

Of a pod there is what its processes see: variables, volumes, names of other pods and of services,
SIGTERM and the grace; images, probes, limits and activeDeadlineSeconds are not.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import signal
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from elasticrun.testing import processes
from elasticrun.testing.hosts import Lab
from tests.harness import LIMIT, own_folders
from tests.kubernetes.nodes import container as parts
from tests.kubernetes.server import rbac
from tests.kubernetes.server.apiserver import ApiServer
from tests.kubernetes.server.kinds import Obj
from tests.kubernetes.server.registry import FINAL, now
from tests.kubernetes.server.store import Change, Place, Refusal, place_of

PATH = f"{Path(sys.executable).parent}:/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin"
RESTART_AFTER = 0.5
"""Seconds until a container with restartPolicy starts again; a real one doubles from 10."""


class Ground:
    """What all pods of a cluster stand on. `hollow`: they run without a process."""

    def __init__(
        self, server: ApiServer, scratch: Path, lab: Lab | None, env: dict[str, str], hollow: bool
    ) -> None:
        self.server, self.registry = server, server.registry
        self.scratch, self.lab, self.env, self.hollow = scratch, lab, env, hollow
        self.authority = ""
        """The file that the server's certificate is checked by."""

        self.slow = ThreadPoolExecutor(1, "ground")
        """For what blocks; one after the other."""

        self._numbers = 0

    async def off(self, work: Callable[[], Any]) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self.slow, work)

    async def address(self, name: str) -> tuple[str, str]:
        """Of a new host: its address, and the file that stands for its network."""
        self._numbers += 1
        if self.lab is None:
            return f"127.1.{self._numbers >> 8}.{self._numbers & 255}", ""
        lab = self.lab
        host = await self.off(lambda: lab.add(name))
        return host.address, host.netns

    async def leave(self, name: str) -> None:
        if self.lab is not None and name in self.lab.hosts:
            lab = self.lab
            await self.off(lambda: lab.remove(name))

    def accounts(self, pod: Obj) -> str:
        """The service account whose token the pod carries; '' for none."""
        spec, namespace = pod["spec"], pod["metadata"]["namespace"]
        place = (namespace, spec["serviceAccountName"])
        account = self.registry.store.objects["", "serviceaccounts"].get(place)
        if account is None:
            raise parts.NotYet(f'serviceaccount "{place[1]}" not found')
        carried = account.get("automountServiceAccountToken", True)
        carried = spec.get("automountServiceAccountToken", carried)
        return f"{namespace}/{place[1]}" if carried else ""


class PodRun:
    """One pod on its node, from its first container to the last word about it."""

    def __init__(self, ground: Ground, pod: Obj) -> None:
        self.ground, self.pod = ground, pod
        self.uid: str = pod["metadata"]["uid"]
        self.place: Place = place_of(pod)
        self.folder = ground.scratch / "pods" / self.uid
        self.host = f"pod-{self.uid}"
        self.output: dict[str, parts.Output] = {}
        self.previous: dict[str, parts.Output] = {}
        self.main: dict[str, asyncio.subprocess.Process] = {}
        self.states: dict[str, Obj] = {}
        self.address = self.netns = ""
        self.stopping = asyncio.Event()
        self.lost = False
        self.reason = ""
        self.codes: asyncio.Queue[int] = asyncio.Queue()
        """Of a hollow pod: what it is to end with."""

    # ------------------------------------------------------------ its life

    async def run(self) -> None:
        spec = self.pod["spec"]
        codes = [1]
        try:
            self.address, self.netns = await self.ground.address(self.host)
            for one in spec.get("initContainers", ()):
                if self.stopping.is_set() or await self._contain(one):
                    break
            else:
                if not self.stopping.is_set():
                    codes = await asyncio.gather(*map(self._contain, spec["containers"]))
        finally:
            if not self.lost:
                self._tell("Failed" if any(codes) else "Succeeded")
                with contextlib.suppress(Refusal):
                    meta = self.ground.registry.get(self._kind, *self.place)["metadata"]
                    if meta["uid"] == self.uid and "deletionTimestamp" in meta:
                        now_ = {"gracePeriodSeconds": 0, "preconditions": {"uid": self.uid}}
                        self.ground.registry.delete(self._kind, self.place, now_)
            await self.ground.leave(self.host)

    async def _contain(self, container: Obj) -> int:
        """Run a container, again where its policy says so; its last exit code."""
        policy = self.pod["spec"]["restartPolicy"]
        again = 0
        while True:
            code = await self._once(container, again)
            if self.stopping.is_set() or policy == "Never" or (policy == "OnFailure" and not code):
                return code
            if container in self.pod["spec"].get("initContainers", ()) and not code:
                return code
            again += 1
            name = container["name"]
            self.previous[name] = self.output[name]
            waiting = {"waiting": {"reason": "CrashLoopBackOff"}}
            self.states[name] = {
                "state": waiting,
                "again": again,
                "last": self.states[name]["state"],
            }
            self._tell("Running")
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.stopping.wait(), RESTART_AFTER)

    async def _once(self, container: Obj, again: int) -> int:
        name = container["name"]
        output = self.output[name] = parts.Output()
        began = now()
        try:
            reading, pipe = await output.begin()
            try:
                started = None if self.ground.hollow else await self._start(container, pipe)
            finally:
                os.close(pipe)
        except OSError as error:
            return self._ended(name, began, again, 128, "StartError", str(error))
        last = self.states.get(name, {}).get("last", {})
        running = {"running": {"startedAt": began}}
        self.states[name] = {"state": running, "again": again, "last": last}
        self._tell("Running")
        if started is None:
            code = await self.codes.get()
        else:
            self.main[name] = started
            if self.stopping.is_set():
                self._signal(signal.SIGTERM)
            code = await started.wait()
            del self.main[name]
            mine = functools.partial(processes.marked, f"{self.uid}/{name}")
            await self.ground.off(lambda: processes.kill_all(mine, LIMIT))
        await reading
        output.end()
        code = 128 - code if code < 0 else code
        reason = self.reason or ("Error" if code else "Completed")
        return self._ended(name, began, again, code, reason, "")

    def _ended(
        self, name: str, began: str, again: int, code: int, reason: str, message: str
    ) -> int:
        end = {"exitCode": code, "reason": reason, "startedAt": began, "finishedAt": now()}
        spec = self.pod["spec"]
        ours = [*spec["containers"], *spec.get("initContainers", ())]
        policy = next(one.get("terminationMessagePolicy") for one in ours if one["name"] == name)
        left = self.folder / f"last-words-{name}"
        message = message or (left.read_text()[:4096] if left.exists() else "")
        if code and not message and policy == "FallbackToLogsOnError":
            last = b"".join(line for _, line in self.output[name].lines[-80:])
            message = last[-2048:].decode(errors="replace")
        end |= {"message": message} if message else {}
        self.states[name] = {"state": {"terminated": end}, "again": again}
        self.output[name].end()
        return code

    async def _start(self, container: Obj, pipe: int) -> asyncio.subprocess.Process:
        ground = self.ground
        while True:
            try:
                told = {**self.pod, "status": {"podIP": self.address, "hostIP": "192.0.2.250"}}
                values = parts.variables(ground.registry, told, container)
                pairs = parts.mounts(
                    ground.registry, self.pod, container, ground.scratch, self.folder
                )
                account = ground.accounts(self.pod)
                break
            except parts.NotYet as error:
                waiting = {"reason": "CreateContainerConfigError", "message": str(error)}
                self.states[container["name"]] = {"state": {"waiting": waiting}, "again": 0}
                self._tell("Pending")
                await ground.registry.store.changed()
                if self.stopping.is_set():
                    raise OSError("deleted before it began") from None
        if path := container.get("terminationMessagePath"):
            left = self.folder / f"last-words-{container['name']}"
            left.parent.mkdir(parents=True, exist_ok=True)
            left.write_text("")
            pairs.append((str(left), path))
        if account:
            pairs.append((str(self._account(account)), parts.SECRETS))
        env = {"PATH": PATH, "HOME": str(self.folder), "HOSTNAME": self.name}
        env |= own_folders(self.folder) | ground.env | values
        env[processes.MARK] = f"{self.uid}/{container['name']}"
        words = [*container.get("command", ()), *container.get("args", ())]
        words = [parts.expand(word, values) for word in words]
        if not words:
            raise OSError("no command is given, and images are not known here")
        hosts = self.folder / "hosts"
        hosts.touch()
        where = container.get("workingDir", str(self.folder))
        shell = parts.script(pairs, str(hosts), self.name, where)
        enter = ["nsenter", f"--net={self.netns}"] if self.netns else []
        enter += ["setpriv", "--pdeathsig", "KILL", "unshare", "--mount", "--uts"]
        self._names()
        return await asyncio.create_subprocess_exec(
            *enter, "sh", "-c", shell, "sh", *words,
            env=env, stdin=asyncio.subprocess.DEVNULL, stdout=pipe,
            stderr=asyncio.subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip

    def _account(self, account: str) -> Path:
        folder = self.folder / "account"
        folder.mkdir(parents=True, exist_ok=True)
        who = rbac.account(*account.split("/"))
        (folder / "token").write_text(self.ground.server.token(who))
        (folder / "namespace").write_text(self.place[0])
        (folder / "ca.crt").write_bytes(Path(self.ground.authority).read_bytes())
        return folder

    # ------------------------------------------------------------ its end

    async def stop(self, grace: float) -> None:
        """SIGTERM to the first process of each container, and SIGKILL to all after the grace."""
        self.stopping.set()
        self.ground.registry.store.wake()
        self._signal(signal.SIGTERM)
        if self.ground.hollow:
            self.codes.put_nowait(143)
        loop = asyncio.get_running_loop()
        end = loop.time() + grace
        while self.main and (left := end - loop.time()) > 0:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.ground.registry.store.changed(), left)
        self.kill()

    def kill(self, reason: str = "") -> None:
        """At once, as the kernel does."""
        self.reason = reason
        self._signal(signal.SIGKILL)
        if self.ground.hollow:
            self.codes.put_nowait(137)

    def _signal(self, number: int) -> None:
        for one in self.main.values():
            with contextlib.suppress(ProcessLookupError):
                one.send_signal(number)

    # ------------------------------------------------------------ what is said of it

    @property
    def name(self) -> str:
        """What it calls itself."""
        return str(self.pod["spec"].get("hostname") or self.place[1])[:63]

    @property
    def _kind(self) -> Any:
        return self.ground.registry.kind("pods")

    def _tell(self, phase: str) -> None:
        running = phase == "Running"

        def told(pod: Obj) -> None:
            if pod["metadata"]["uid"] != self.uid or pod["status"]["phase"] in FINAL:
                return
            status = pod["status"]
            kept = [c for c in status.get("conditions", ()) if c["type"] != "Ready"]
            ready = {"type": "Ready", "status": str(running), "lastTransitionTime": now()}
            status |= {"phase": phase, "conditions": [*kept, ready], "hostIP": "192.0.2.250"}
            status |= {"podIP": self.address, "podIPs": [{"ip": self.address}]}
            status.setdefault("startTime", now())
            for part in ("initContainers", "containers"):
                states = [self._state(one) for one in pod["spec"].get(part, ())]
                field = "containerStatuses" if part == "containers" else "initContainerStatuses"
                status |= {field: [one for one in states if one]}

        self.ground.registry.edit(self._kind, self.place, told, "status")

    def _state(self, container: Obj) -> Obj:
        known = self.states.get(container["name"])
        if known is None:
            known = {"state": {"waiting": {"reason": "PodInitializing"}}, "again": 0}
        running = "running" in known["state"]
        return {"name": container["name"], "image": container["image"], "imageID": "",
                "ready": running, "started": running, "restartCount": known["again"],
                "lastState": known.get("last", {}),
                "state": known["state"]}  # fmt: skip

    def _names(self) -> None:
        write_names(self.ground, [self])


def write_names(ground: Ground, runs: list[PodRun]) -> None:
    """The names that each of these pods finds: its own, and what services name."""
    store = ground.registry.store
    for namespace in {run.place[0] for run in runs}:
        shared = []
        pods = [one for one in store.all(("", "pods"), namespace) if one["status"].get("podIP")]
        for service in store.all(("", "services"), namespace):
            name, spec = service["metadata"]["name"], service["spec"]
            selector = spec.get("selector") or {}
            for pod in pods:
                labels = pod["metadata"].get("labels") or {}
                if pod["status"]["phase"] in FINAL or not selector.items() <= labels.items():
                    continue
                names = _full(name, namespace)
                if pod["spec"].get("subdomain") == name and pod["spec"].get("hostname"):
                    names = _full(f"{pod['spec']['hostname']}.{name}", namespace) + names
                shared.append(f"{pod['status']['podIP']} {' '.join(names)}")
        for run in runs:
            if run.place[0] == namespace and (run.folder / "hosts").exists():
                own = f"{run.address} {run.name}"
                text = "\n".join(["127.0.0.1 localhost", own, *shared, ""])
                (run.folder / "hosts").write_text(text)  # in place: it is mounted


def _full(name: str, namespace: str) -> list[str]:
    return [name, f"{name}.{namespace}", f"{name}.{namespace}.svc",
            f"{name}.{namespace}.svc.cluster.local"]  # fmt: skip


class PodsOfAllNodes:
    """The kubelets: they see each change of a pod."""

    def __init__(self, ground: Ground) -> None:
        self.ground = ground
        self.runs: dict[str, PodRun] = {}
        self.printed: dict[Place, dict[str, parts.Output]] = {}
        """By pod, also those that are no more."""

        self._tasks: set[asyncio.Task[None]] = set()
        self.errors: list[BaseException] = []

    def see(self, change: Change) -> None:
        if change.key not in (("", "pods"), ("", "services")):
            return
        pod = change.obj
        if change.key == ("", "pods"):
            uid = pod["metadata"]["uid"]
            run = self.runs.get(uid)
            if change.type == "DELETED":
                if run is not None:
                    run.stopping.set()
                    run.kill()
                    self.runs.pop(uid)
            elif run is None:
                self._first(pod)
            elif "deletionTimestamp" in pod["metadata"] and not run.stopping.is_set():
                run.stopping.set()
                self._do(run.stop(pod["metadata"]["deletionGracePeriodSeconds"]))
            elif _shorter(change) and not run.lost:
                self._do(run.stop(pod["metadata"]["deletionGracePeriodSeconds"]))
        write_names(self.ground, [run for run in self.runs.values() if run.main])

    def _first(self, pod: Obj) -> None:
        if not pod["spec"].get("nodeName") or pod["status"]["phase"] != "Pending":
            return
        if "deletionTimestamp" in pod["metadata"]:
            registry = self.ground.registry
            registry.delete(registry.kind("pods"), place_of(pod), {"gracePeriodSeconds": 0})
            return
        run = self.runs[pod["metadata"]["uid"]] = PodRun(self.ground, pod)
        self.printed[run.place] = run.output
        self._do(run.run())

    def _do(self, work: Any) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._over)

    def _over(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self.errors.append(error)
            self.ground.registry.store.wake()

    def lose(self, node: str) -> None:
        """A node loses its power: its pods say nothing more."""
        for run in self.runs.values():
            if run.pod["spec"]["nodeName"] == node:
                run.lost = True
                run.stopping.set()
                run.kill()

    async def end(self) -> None:
        """Nothing of any pod is left."""
        for run in list(self.runs.values()):
            run.lost = True
            run.stopping.set()
            run.kill()
        self.ground.registry.store.wake()
        while self._tasks:
            await asyncio.wait(self._tasks, timeout=LIMIT)
        if self.errors:
            raise self.errors[0]


def _shorter(change: Change) -> bool:
    was = (change.old or {}).get("metadata", {}).get("deletionGracePeriodSeconds")
    now_ = change.obj["metadata"].get("deletionGracePeriodSeconds")
    return was is not None and now_ is not None and now_ < was
