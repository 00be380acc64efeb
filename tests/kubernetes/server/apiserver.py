"""The HTTP side: discovery, the routes of objects, watches, subresources."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import secrets
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple

import yaml
from aiohttp import web

from tests.kubernetes.server import protobuf, rbac, tables
from tests.kubernetes.server.faults import Faults
from tests.kubernetes.server.kinds import EVERY_VERB, Kind, Obj
from tests.kubernetes.server.rbac import Ask, Who
from tests.kubernetes.server.registry import Options, Registry
from tests.kubernetes.server.store import Change, Place, Refusal, Selector

BOOKMARK_EVERY = 5.0
"""Seconds without an event after which a watch is told the version."""

LIMIT = 3 << 20
"""Bytes of a body, as etcd's and the API server's."""

WRITES = {"create", "update", "patch", "delete", "deletecollection"}


Served = Callable[[web.Request, Obj], Awaitable[web.StreamResponse]]


class Asked(NamedTuple):
    """A request for objects, understood."""

    kind: Kind
    namespace: str
    name: str
    sub: str

    @property
    def place(self) -> Place:
        return (self.namespace, self.name)


class ApiServer:
    """Answers requests from a registry."""

    def __init__(self, registry: Registry) -> None:
        self.registry, self.store = registry, registry.store
        self.faults = Faults()
        self.tokens: dict[str, Who] = {}
        self.used: Counter[tuple[str, str, str, str]] = Counter()
        """User, verb, group, resource of every request for objects."""

        self.pods: dict[str, Served] = {}
        """How `log` and `exec` of a pod are served: the kubelet says."""

        self._watches: set[asyncio.Transport] = set()

    def app(self) -> web.Application:
        app = web.Application(client_max_size=LIMIT)
        app.router.add_route("*", "/{path:.*}", self._handle)
        return app

    def cut_watches(self) -> int:
        """Break every watch off; how many there were."""
        watches, self._watches = self._watches, set()
        for one in watches:
            one.abort()
        return len(watches)

    # ------------------------------------------------------------ a request

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        options = Options(
            "All" in request.query.getall("dryRun", []),
            request.query.get("fieldValidation", "Warn"),
        )
        try:
            who = self._who(request)
            answer = await self._answer(request, who, options)
        except Refusal as refusal:
            after = refusal.retry_after
            more = {} if after is None else {"Retry-After": str(after)}
            return _json(refusal.status(), refusal.code, more)
        if isinstance(answer, web.StreamResponse):
            return answer
        code = 201 if request.method == "POST" and answer.get("kind") != "Status" else 200
        response = _json(answer, code, {})
        for text in options.warnings:
            response.headers.add("Warning", f"299 - {json.dumps(text)}")
        return response

    def _who(self, request: web.Request) -> Who:
        token = request.headers.get("Authorization", "").removeprefix("Bearer ")
        if token not in self.tokens:
            raise Refusal(401, "Unauthorized", "Unauthorized")
        return self.tokens[token]

    async def _answer(self, request: web.Request, who: Who, options: Options) -> Any:
        path = [part for part in request.path.split("/") if part]
        if path[:1] == ["apis"] and path[1:2] == ["authorization.k8s.io"] and len(path) > 3:
            return self._review(await _body(request), who)
        if (found := self._discovery(path)) is not None:
            return found
        asked = self._asked(path)
        verb = _verb(request, asked)
        resource = f"{asked.kind.plural}/{asked.sub}" if asked.sub else asked.kind.plural
        self.used[who.name, verb, asked.kind.group, resource] += 1
        rbac.check(
            self.store, who, Ask(verb, asked.kind.group, resource, asked.namespace, asked.name)
        )
        late = False
        if self.faults.concerns(who.name):
            late = await self.faults.before(write=verb in WRITES)
        answer = await self._do(request, asked, verb, options)
        if late:
            self.faults.fail()
        return answer

    def _asked(self, path: list[str]) -> Asked:
        missing = Refusal(404, "NotFound", "the server could not find the requested resource")
        if path[:1] == ["api"]:
            group, (version, *rest) = "", path[1:]
        elif path[:1] == ["apis"] and len(path) > 3:
            _, group, version, *rest = path
        else:
            raise missing
        namespace = ""
        if rest[:1] == ["namespaces"] and len(rest) > 2 and rest[2] not in ("status", "finalize"):
            _, namespace, *rest = rest
        plural, name, sub, *_ = [*rest, "", "", ""]
        kind = self.registry.kinds.get((group, version, plural))
        if kind is None or (sub and sub not in kind.subresources()):
            raise missing
        return Asked(kind, namespace, name, sub)

    async def _do(self, request: web.Request, asked: Asked, verb: str, options: Options) -> Any:
        kind, registry = asked.kind, self.registry
        if asked.sub and asked.sub != "status":
            return await self._subresource(request, asked, verb, options)
        if verb == "list":
            return self._list(request, asked)
        if verb == "watch":
            return await self._watch(request, asked)
        if verb == "get":
            found = registry.get(kind, *asked.place)
            return self._shown(request, kind, [found], found["metadata"]["resourceVersion"], found)
        body = await _body(request)
        if verb == "create":
            return registry.create(kind, asked.namespace, body, options)
        if verb == "update":
            return registry.update(kind, asked.place, body, asked.sub, options)
        if verb == "patch":
            form = request.headers.get("Content-Type", "").split(";")[0]
            return registry.patch(kind, asked.place, form, body, asked.sub, options)
        asked_for = {**{n: request.query[n] for n in ("propagationPolicy",) if n in request.query}}
        if "gracePeriodSeconds" in request.query:
            asked_for["gracePeriodSeconds"] = int(request.query["gracePeriodSeconds"])
        asked_for |= body or {}
        if verb == "deletecollection":
            gone = self._selected(request, asked)
            for one in gone:
                place = (one["metadata"].get("namespace", ""), one["metadata"]["name"])
                registry.delete(kind, place, asked_for, options)
            return {"kind": f"{kind.name}List", "apiVersion": kind.api_version, "metadata": {},
                    "items": gone}  # fmt: skip
        last = registry.delete(kind, asked.place, asked_for, options)
        if kind.key == ("", "pods"):
            return last
        return _success({"name": asked.name, "group": kind.group, "kind": kind.plural,
                         "uid": last["metadata"]["uid"]})  # fmt: skip

    # ------------------------------------------------------------ lists and watches

    def _selector(self, request: web.Request, asked: Asked) -> Selector:
        fields = request.query.get("fieldSelector", "")
        if asked.name:
            fields = f"metadata.name={asked.name}"
        labels = request.query.get("labelSelector", "")
        return Selector(labels, fields, custom=asked.kind.schema is not None)

    def _selected(self, request: web.Request, asked: Asked) -> list[Obj]:
        selector = self._selector(request, asked)
        return [one for one in self.store.all(asked.kind.key, asked.namespace) if selector(one)]

    def _list(self, request: web.Request, asked: Asked) -> Any:
        version = self.store.version
        if lag := self.faults.lag():
            version = max(self.store.oldest, version - lag)
            selector = self._selector(request, asked)
            found = [
                one
                for one in self.store.at(asked.kind.key, version)
                if asked.namespace in ("", one["metadata"].get("namespace")) and selector(one)
            ]
        else:
            found = self._selected(request, asked)
        more: Obj = {}
        if token := request.query.get("continue"):
            first = base64.urlsafe_b64decode(token).decode()
            found = [one for one in found if _order(one) > first]
        limit = int(request.query.get("limit") or 0)
        if limit and len(found) > limit:
            more["remainingItemCount"] = len(found) - limit
            found = found[:limit]
            more["continue"] = base64.urlsafe_b64encode(_order(found[-1]).encode()).decode()
        kind = asked.kind
        listed = {
            "kind": f"{kind.name}List",
            "apiVersion": kind.api_version,
            "metadata": {"resourceVersion": str(version), **more},
            "items": found,
        }
        return self._shown(request, kind, found, str(version), listed)

    def _shown(
        self, request: web.Request, kind: Kind, found: list[Obj], version: str, plain: Obj
    ) -> Obj:
        """As a Table where that is asked for."""
        if "as=Table" not in request.headers.get("Accept", ""):
            return plain
        include = request.query.get("includeObject", "Metadata")
        made = tables.table(kind, found, include, version)
        if "continue" in plain.get("metadata", {}):
            made["metadata"] |= plain["metadata"]
        return made

    async def _watch(self, request: web.Request, asked: Asked) -> web.StreamResponse:
        query = request.query
        selector = self._selector(request, asked)
        stream = web.StreamResponse(headers={"Content-Type": "application/json"})
        stream.enable_chunked_encoding()
        await stream.prepare(request)
        transport = request.transport
        assert transport is not None
        self._watches.add(transport)
        ends = asyncio.get_running_loop().time() + float(query.get("timeoutSeconds") or 1800)
        told = _Told(stream, request, self, asked)
        try:
            version = int(query.get("resourceVersion") or 0)
            initial = query.get("sendInitialEvents") == "true"
            if initial or not version:
                version = self.store.version
                for one in self._selected(request, asked):
                    await told.event("ADDED", one)
                if initial:
                    await told.bookmark(version, last=True)
            await self._follow(told, selector, version, ends, "allowWatchBookmarks" in query)
        except Refusal as refusal:
            with contextlib.suppress(ConnectionError):
                await told.say("ERROR", refusal.status())
        except ConnectionError:  # it looks elsewhere now
            pass
        finally:
            self._watches.discard(transport)
        return stream

    async def _follow(
        self, told: _Told, selector: Selector, version: int, ends: float, bookmarks: bool
    ) -> None:
        loop = asyncio.get_running_loop()
        count = 0
        self.store.check(version)
        while loop.time() < ends:
            for change in self.store.since(version):
                version = change.version
                if kind := told.concerns(change, selector):
                    await told.event(kind, change.obj)
                    count += 1
                    if count == self.faults.cut_after and told.request.transport is not None:
                        told.request.transport.abort()
                        return
            if version == self.store.version:
                try:
                    wait = min(BOOKMARK_EVERY, ends - loop.time())
                    await asyncio.wait_for(self.store.changed(), wait)
                except TimeoutError:
                    if bookmarks:
                        await told.bookmark(version)

    # ------------------------------------------------------------ subresources and reviews

    async def _subresource(
        self, request: web.Request, asked: Asked, verb: str, options: Options
    ) -> Any:
        kind, registry = asked.kind, self.registry
        if asked.sub == "scale":
            if verb == "get":
                return registry.scale(kind, asked.place)
            scale = await _body(request)
            return registry.rescale(kind, asked.place, scale, options)
        found = registry.get(kind, *asked.place)
        if asked.sub == "token":
            token = self.token(rbac.account(*asked.place))
            status = {"token": token, "expirationTimestamp": "2100-01-01T00:00:00Z"}
            return {"kind": "TokenRequest", "apiVersion": "authentication.k8s.io/v1",
                    "metadata": {}, "spec": {"audiences": []}, "status": status}  # fmt: skip
        if asked.sub == "eviction":
            body = await _body(request)
            disrupt(registry, asked.place, "EvictionByEvictionAPI", "Eviction API: evicting")
            registry.delete(kind, asked.place, body.get("deleteOptions") or {}, options)
            return _success({})
        if asked.sub not in self.pods:
            raise Refusal(501, "NotImplemented", f"there is no kubelet here that gives {asked.sub}")
        return await self.pods[asked.sub](request, found)

    def token(self, who: Who) -> str:
        """A new bearer token."""
        token = secrets.token_urlsafe(12)
        self.tokens[token] = who
        return token

    def _review(self, body: Obj, who: Who) -> Obj:
        ask = body.get("spec", {}).get("resourceAttributes") or {}
        resource = ask.get("resource", "")
        if ask.get("subresource"):
            resource += "/" + ask["subresource"]
        asked = Ask(ask.get("verb", ""), ask.get("group", ""), resource,
                    ask.get("namespace", ""), ask.get("name", ""))  # fmt: skip
        return {**body, "status": {"allowed": rbac.may(self.store, who, asked)}}

    # ------------------------------------------------------------ discovery

    def _discovery(self, path: list[str]) -> Obj | None:
        kinds = list(self.registry.kinds.values())
        groups: dict[str, list[str]] = {"authorization.k8s.io": ["v1"]}
        for one in kinds:
            if one.group and one.version not in groups.setdefault(one.group, []):
                groups[one.group].append(one.version)
        match path:
            case ["version"]:
                return {"major": "1", "minor": "37", "gitVersion": "v1.37.0-standin"}
            case ["healthz" | "livez" | "readyz"]:
                return _success({})
            case ["api"]:
                return {"kind": "APIVersions", "versions": ["v1"]}
            case ["apis"]:
                listed = [_group(name, versions) for name, versions in groups.items()]
                return {"kind": "APIGroupList", "apiVersion": "v1", "groups": listed}
            case ["apis", name] if name in groups:
                return {"kind": "APIGroup", "apiVersion": "v1", **_group(name, groups[name])}
            case ["api", "v1"]:
                return _resources("v1", [one for one in kinds if not one.group])
            case ["apis", name, version] if version in groups.get(name, ()):
                own = [one for one in kinds if (one.group, one.version) == (name, version)]
                made = _resources(f"{name}/{version}", own)
                if name == "authorization.k8s.io":
                    review = "SelfSubjectAccessReview"
                    made["resources"] = [_resource(f"{review.lower()}s", review, False, ["create"])]
                return made
            case ["openapi", "v3"]:
                return {"paths": {
                    p: {"serverRelativeURL": f"/openapi/v3/{p}?hash=1"}
                    for p in {_root(one) for one in kinds}
                }}  # fmt: skip
            case ["openapi", "v3", *rest]:
                return _openapi([one for one in kinds if _root(one) == "/".join(rest)])
        return None


class _Told:
    """One watch: what is said to it."""

    def __init__(
        self, stream: web.StreamResponse, request: web.Request, server: ApiServer, asked: Asked
    ) -> None:
        self._stream, self.request, self._server, self._asked = stream, request, server, asked

    def concerns(self, change: Change, selector: Selector) -> str:
        """The type of event that it is to this watch; '' for none."""
        if change.key != self._asked.kind.key:
            return ""
        if self._asked.namespace not in ("", change.obj["metadata"].get("namespace")):
            return ""
        was = change.old is not None and selector(change.old)
        here = change.type != "DELETED" and selector(change.obj)
        return "MODIFIED" if was and here else "ADDED" if here else "DELETED" if was else ""

    async def event(self, kind: str, obj: Obj) -> None:
        version = obj["metadata"]["resourceVersion"]
        shown = self._server._shown(self.request, self._asked.kind, [obj], version, obj)
        await self.say(kind, shown)

    async def bookmark(self, version: int, *, last: bool = False) -> None:
        kind = self._asked.kind
        meta: Obj = {"resourceVersion": str(version), "creationTimestamp": None}
        if last:
            meta["annotations"] = {"k8s.io/initial-events-end": "true"}
        await self.say("BOOKMARK", {"kind": kind.name, "apiVersion": kind.api_version,
                                    "metadata": meta})  # fmt: skip

    async def say(self, kind: str, obj: Obj) -> None:
        await self._stream.write(json.dumps({"type": kind, "object": obj}).encode() + b"\n")


def disrupt(registry: Registry, place: Place, reason: str, message: str) -> None:
    """Say on a pod that it is taken away, and that this is not its fault."""
    condition = {"type": "DisruptionTarget", "status": "True", "reason": reason, "message": message}

    def told(pod: Obj) -> None:
        kept = [c for c in pod["status"].get("conditions", ()) if c["type"] != "DisruptionTarget"]
        pod["status"]["conditions"] = [*kept, condition]

    registry.edit(registry.kind("pods"), place, told, "status")


def _json(obj: Obj, code: int, headers: dict[str, str]) -> web.Response:
    """Clients look for this very type, with no charset."""
    told = {"Content-Type": "application/json", **headers}
    return web.Response(body=json.dumps(obj).encode(), status=code, headers=told)


async def _body(request: web.Request) -> Any:
    raw = await request.read()
    if not raw:
        return {}
    if raw.startswith(protobuf.MAGIC):
        return protobuf.read(raw)
    try:
        return yaml.load(raw, yaml.CSafeLoader) if raw[:1] not in b"{[" else json.loads(raw)
    except (ValueError, yaml.YAMLError) as error:
        raise Refusal(400, "BadRequest", f"the body cannot be read: {error}") from None


def _verb(request: web.Request, asked: Asked) -> str:
    if request.method == "GET":
        if asked.sub:
            return "create" if asked.sub == "exec" else "get"
        if request.query.get("watch") in ("1", "true"):
            return "watch"
        return "get" if asked.name else "list"
    if request.method == "DELETE":
        return "delete" if asked.name else "deletecollection"
    verbs = {"POST": "create", "PUT": "update", "PATCH": "patch"}
    if request.method not in verbs:
        raise Refusal(405, "MethodNotAllowed", "the server does not allow this method")
    return verbs[request.method]


def _order(obj: Obj) -> str:
    return f"{obj['metadata'].get('namespace', '')}/{obj['metadata']['name']}"


def _success(details: Obj) -> Obj:
    return {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success",
            "details": details}  # fmt: skip


def _root(kind: Kind) -> str:
    return f"apis/{kind.api_version}" if kind.group else f"api/{kind.version}"


def _group(name: str, versions: list[str]) -> Obj:
    listed = [{"groupVersion": f"{name}/{one}", "version": one} for one in versions]
    return {"name": name, "versions": listed, "preferredVersion": listed[0]}


def _resource(plural: str, kind: str, namespaced: bool, verbs: Any, **more: Any) -> Obj:
    return {"name": plural, "singularName": kind.lower(), "namespaced": namespaced, "kind": kind,
            "verbs": list(verbs), **more}  # fmt: skip


def _resources(version: str, kinds: list[Kind]) -> Obj:
    found = []
    foreign: dict[str, tuple[str, Obj]] = {
        "scale": ("Scale", {"group": "autoscaling", "version": "v1"}),
        "eviction": ("Eviction", {"group": "policy", "version": "v1"}),
        "token": ("TokenRequest", {"group": "authentication.k8s.io", "version": "v1"}),
    }
    for one in kinds:
        more = {"shortNames": list(one.short), "categories": list(one.categories)}
        found.append(_resource(one.plural, one.name, one.namespaced, EVERY_VERB, **more))
        for sub in one.subresources():
            name, more = foreign.get(sub, (one.name, {}))
            verbs = (
                ("create",) if sub in ("exec", "eviction", "token") else ("get", "patch", "update")
            )
            found.append(_resource(f"{one.plural}/{sub}", name, one.namespaced, verbs, **more))
    return {"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": version,
            "resources": found}  # fmt: skip


def _openapi(kinds: list[Kind]) -> Obj:
    """As much as tells kubectl that the server checks fields itself."""
    paths = {}
    for one in kinds:
        middle = "namespaces/{namespace}/" if one.namespaced else ""
        told = {"group": one.group, "version": one.version, "kind": one.name}
        takes = [{"name": name, "in": "query", "schema": {"type": "string"}}
                 for name in ("fieldValidation", "dryRun")]  # fmt: skip
        paths[f"/{_root(one)}/{middle}{one.plural}/{{name}}"] = {
            "patch": {"x-kubernetes-group-version-kind": told, "parameters": takes,
                      "responses": {"200": {"description": "OK"}}}
        }  # fmt: skip
    info = {"title": "a stand-in", "version": "v1.37.0"}
    return {"openapi": "3.0.0", "info": info, "paths": paths, "components": {"schemas": {}}}
