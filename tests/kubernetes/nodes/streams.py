"""`kubectl logs` and `kubectl exec` of the pods that run here."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import json
import time
from typing import Any

from aiohttp import WSMsgType, web

from tests.kubernetes.nodes.container import Output
from tests.kubernetes.nodes.kubelet import PodRun, PodsOfAllNodes
from tests.kubernetes.server.kinds import Obj
from tests.kubernetes.server.store import Refusal

STDIN, STDOUT, STDERR, ERROR, CLOSE = 0, 1, 2, 3, 255
PROTOCOLS = ("v5.channel.k8s.io", "v4.channel.k8s.io")


class Streams:
    """What the API server asks a kubelet for."""

    def __init__(self, kubelet: PodsOfAllNodes) -> None:
        self._kubelet = kubelet
        self._followed: set[asyncio.Transport] = set()

    def cut(self) -> int:
        """Break every log that is followed off; how many there were."""
        cut, self._followed = self._followed, set()
        for one in cut:
            one.abort()
        return len(cut)

    def _container(self, request: web.Request, pod: Obj) -> tuple[PodRun | None, str]:
        name = request.query.get("container") or pod["spec"]["containers"][0]["name"]
        known = [one["name"] for part in ("containers", "initContainers")
                 for one in pod["spec"].get(part, ())]  # fmt: skip
        where = f'pod "{pod["metadata"]["name"]}"'
        if name not in known:
            raise Refusal(400, "BadRequest", f"container {name} is not valid for {where}")
        return self._kubelet.runs.get(pod["metadata"]["uid"]), name

    async def log(self, request: web.Request, pod: Obj) -> web.StreamResponse:
        run, name = self._container(request, pod)
        output = None
        if run is not None:
            before = request.query.get("previous") == "true"
            output = (run.previous if before else run.output).get(name)
        if output is None:
            message = (
                f'container "{name}" in pod "{pod["metadata"]["name"]}" is waiting to start: '
                "ContainerCreating"
            )
            raise Refusal(400, "BadRequest", message)
        stream = web.StreamResponse(headers={"Content-Type": "text/plain"})
        await stream.prepare(request)
        first, follow = _first(output, request), request.query.get("follow") == "true"
        stamped = request.query.get("timestamps") == "true"
        left = int(request.query.get("limitBytes") or 1 << 62)
        if follow and request.transport is not None:
            self._followed.add(request.transport)
        with contextlib.suppress(ConnectionError):
            async for when, line in output.follow(first, to_the_end=follow):
                if stamped:
                    moment = datetime.datetime.fromtimestamp(when, datetime.UTC)
                    line = moment.strftime("%Y-%m-%dT%H:%M:%S.%fZ ").encode() + line
                await stream.write(line[:left])
                left -= len(line)
                if left <= 0:
                    break
        if request.transport is not None:
            self._followed.discard(request.transport)
        return stream

    async def execute(self, request: web.Request, pod: Obj) -> web.StreamResponse:
        run, name = self._container(request, pod)
        main = run.main.get(name) if run is not None else None
        if run is None or main is None:
            raise Refusal(400, "BadRequest", f"container {name} does not run")
        socket = web.WebSocketResponse(protocols=PROTOCOLS)
        if not socket.can_prepare(request):
            raise Refusal(400, "BadRequest", "exec is served by websocket alone here")
        await socket.prepare(request)
        env = dict(pair.split("=", 1) for pair in _environment(main.pid) if "=" in pair)
        command = request.query.getall("command")
        process = await asyncio.create_subprocess_exec(
            "nsenter", f"--target={main.pid}", "--mount", "--uts", "--net", "--root", "--wd", "--",
            *command, env=env, start_new_session=True,
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )  # fmt: skip
        feeding = asyncio.create_task(_feed(socket, process))
        await asyncio.gather(
            _carry(socket, STDOUT, process.stdout), _carry(socket, STDERR, process.stderr)
        )
        code = await process.wait()
        status: Obj = {"metadata": {}, "status": "Success"}
        if code:
            cause = {"reason": "ExitCode", "message": str(code)}
            status |= {"status": "Failure", "reason": "NonZeroExitCode",
                       "message": f"command terminated with non-zero exit code: {code}",
                       "details": {"causes": [cause]}}  # fmt: skip
        with contextlib.suppress(ConnectionError):
            await socket.send_bytes(bytes([ERROR]) + json.dumps(status).encode())
            await socket.close()
        feeding.cancel()
        return socket


def _environment(pid: int) -> list[str]:
    with open(f"/proc/{pid}/environ") as file:
        return file.read().split("\0")


def _first(output: Output, request: web.Request) -> int:
    first = 0
    if tail := request.query.get("tailLines"):
        first = max(0, len(output.lines) - int(tail))
    after = 0.0
    if seconds := request.query.get("sinceSeconds"):
        after = time.time() - int(seconds)
    if moment := request.query.get("sinceTime"):
        after = datetime.datetime.fromisoformat(moment).timestamp()
    while first < len(output.lines) and output.lines[first][0] < after:
        first += 1
    return first


async def _feed(socket: web.WebSocketResponse, process: asyncio.subprocess.Process) -> None:
    """What is typed goes in; a connection that has gone ends the command's input."""
    assert process.stdin is not None
    async for message in socket:
        if message.type != WSMsgType.BINARY or not message.data:
            continue
        channel, data = message.data[0], message.data[1:]
        if channel == STDIN:
            process.stdin.write(data)
        elif channel == CLOSE:
            process.stdin.close()
    process.stdin.close()


async def _carry(socket: web.WebSocketResponse, channel: int, stream: Any) -> None:
    while data := await stream.read(1 << 16):
        await socket.send_bytes(bytes([channel]) + data)
