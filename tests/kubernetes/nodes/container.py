"""What a container is made of: its variables, its words, its volumes; and what it has printed."""

from __future__ import annotations

import asyncio
import base64
import os
import re
import shlex
import time
from collections.abc import AsyncIterator
from pathlib import Path

from tests.kubernetes.server.kinds import Obj
from tests.kubernetes.server.registry import Registry
from tests.kubernetes.server.store import dig

SECRETS = "/var/run/secrets/kubernetes.io/serviceaccount"


class NotYet(Exception):
    """A container cannot be made, as long as something is missing; the text says what."""


class Output:
    """What a container has printed, line by line, and who follows it."""

    def __init__(self) -> None:
        self.lines: list[tuple[float, bytes]] = []
        self.ended = False
        self._grown = asyncio.Event()

    async def begin(self) -> tuple[asyncio.Task[None], int]:
        """A pipe to print to, and who reads it to its end: a process' own pipe would make asyncio
        wait for all that inherit it."""
        ours, theirs = os.pipe()
        stream = asyncio.StreamReader(limit=1 << 20)
        protocol = asyncio.StreamReaderProtocol(stream)
        await asyncio.get_running_loop().connect_read_pipe(lambda: protocol, os.fdopen(ours, "rb"))
        return asyncio.create_task(self._read(stream)), theirs

    async def _read(self, stream: asyncio.StreamReader) -> None:
        while line := await stream.readline():
            self.lines.append((time.time(), line))
            self._wake()

    def end(self) -> None:
        self.ended = True
        self._wake()

    def _wake(self) -> None:
        grown, self._grown = self._grown, asyncio.Event()
        grown.set()

    async def follow(self, first: int, *, to_the_end: bool) -> AsyncIterator[tuple[float, bytes]]:
        while True:
            while first < len(self.lines):
                yield self.lines[first]
                first += 1
            if self.ended or not to_the_end:
                return
            await self._grown.wait()


def expand(text: str, values: dict[str, str]) -> str:
    """`$(NAME)` of what is known; `$$` is a dollar."""
    return re.sub(
        r"\$(\$|\(([^)]*)\))",
        lambda found: "$" if found[1] == "$" else values.get(found[2], found[0]),
        text,
    )


def _keys(registry: Registry, plural: str, namespace: str, name: str) -> dict[str, bytes]:
    found = registry.store.objects["", plural].get((namespace, name))
    if found is None:
        raise NotYet(f'{plural[:-1]} "{name}" not found')
    data = found.get("data") or {}
    if plural == "secrets":
        return {key: base64.b64decode(value) for key, value in data.items()}
    return {key: value.encode() for key, value in data.items()}


def variables(registry: Registry, pod: Obj, container: Obj) -> dict[str, str]:
    """What `env` and `envFrom` come to. NotYet."""
    namespace = pod["metadata"]["namespace"]
    made: dict[str, str] = {}
    for one in container.get("envFrom") or ():
        for field, plural in (("secretRef", "secrets"), ("configMapRef", "configmaps")):
            if field in one:
                found = _keys(registry, plural, namespace, one[field]["name"])
                made |= {one.get("prefix", "") + k: v.decode() for k, v in found.items()}
    for one in container.get("env") or ():
        source = one.get("valueFrom")
        if not source:
            made[one["name"]] = expand(str(one.get("value") or ""), made)
        elif "fieldRef" in source:
            made[one["name"]] = field_of(pod, source["fieldRef"]["fieldPath"])
        for kind, plural in (("secretKeyRef", "secrets"), ("configMapKeyRef", "configmaps")):
            if ref := (source or {}).get(kind):
                try:
                    made[one["name"]] = _keys(registry, plural, namespace, ref["name"])[
                        ref["key"]
                    ].decode()
                except (NotYet, KeyError) as error:
                    if not ref.get("optional"):
                        said = f"couldn't find key {ref['key']} in {plural} {ref['name']}"
                        raise NotYet(str(error) if isinstance(error, NotYet) else said) from None
    return made


def field_of(pod: Obj, path: str) -> str:
    if found := re.fullmatch(r"metadata\.(labels|annotations)\['(.*)'\]", path):
        return str((pod["metadata"].get(found[1]) or {}).get(found[2], ""))
    value = dig(pod, path)
    return "" if value is None else str(value)


def mounts(
    registry: Registry, pod: Obj, container: Obj, scratch: Path, own: Path
) -> list[tuple[str, str]]:
    """Pairs of a folder or file and where it is mounted. `scratch`: the cluster's, `own`: the
    pod's. NotYet."""
    namespace = pod["metadata"]["namespace"]
    sources: dict[str, str] = {}
    for one in pod["spec"].get("volumes") or ():
        here = own / "volumes" / one["name"]
        here.mkdir(parents=True, exist_ok=True)
        if "hostPath" in one:
            here = Path(one["hostPath"]["path"])
        elif claim := one.get("persistentVolumeClaim"):
            if (namespace, claim["claimName"]) not in registry.store.objects[
                "", "persistentvolumeclaims"
            ]:
                raise NotYet(f'persistentvolumeclaim "{claim["claimName"]}" not found')
            here = scratch / "claims" / namespace / claim["claimName"]
        for kind, plural, name in (
            ("secret", "secrets", "secretName"),
            ("configMap", "configmaps", "name"),
        ):
            if kind in one and not one[kind].get("optional"):
                for key, data in _keys(registry, plural, namespace, one[kind][name]).items():
                    (here / key).write_bytes(data)
                    (here / key).chmod(0o600)
        if "hostPath" not in one:
            here.mkdir(parents=True, exist_ok=True)
        sources[one["name"]] = str(here)
    made = []
    for one in container.get("volumeMounts") or ():
        source = Path(sources[one["name"]]) / expand(one.get("subPath", ""), {})
        if one.get("subPath") and not source.exists():
            source.mkdir(parents=True)
        made.append((str(source), one["mountPath"]))
    return made


OVER_ALL = """mkdir -p "$ROOT" && mount -t tmpfs root "$ROOT" && for one in /*; do
  if [ -L "$one" ]; then cp -P "$one" "$ROOT"
  elif [ -d "$one" ]; then mkdir "$ROOT$one" && mount --rbind "$one" "$ROOT$one"; fi
done"""


def script(pairs: list[tuple[str, str]], hosts: str, name: str, folder: str) -> str:
    """Shell that makes a mount namespace the container's own, and becomes its first process. Where
    a volume's place has no top folder on this machine, it gets a root of its own: only places deep
    in folders that are here are made, and stay; /run is the pod's."""
    foreign = any(not Path("/", *Path(target).parts[1:2]).exists() for _, target in pairs)
    root = str(Path(hosts).with_name("root")) if foreign else ""
    lines = ["mount -t tmpfs -o size=64m shm /dev/shm", "mount -t tmpfs run /run"]
    lines.append(f"mount --bind {shlex.quote(hosts)} /etc/hosts")
    lines.append(f"echo {shlex.quote(name)} >/proc/sys/kernel/hostname")
    lines += [f"ROOT={shlex.quote(root)}", OVER_ALL] if foreign else []
    for source, target in pairs:
        made = "mkdir -p" if Path(source).is_dir() else "touch"
        there = shlex.quote(root + os.path.realpath(target))  # /var/run leads to /run
        lines.append(f"{{ [ -e {there} ] || {made} {there}; }}")
        lines.append(f"mount --bind {shlex.quote(source)} {there}")
    inner = f'cd {shlex.quote(folder)} && exec "$@"'
    chroot = f"chroot {shlex.quote(root)} " if foreign else ""
    return " && ".join([*lines, f'exec {chroot}sh -c {shlex.quote(inner)} sh "$@"'])
