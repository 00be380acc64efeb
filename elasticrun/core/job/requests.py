"""Requests of operators to the running job, and the replies.

Each request that is carried out is logged in the job's events, with the operator and the reason. A
request names a node by its id, or by its host if no other node is on that host.
"""

from __future__ import annotations

from elasticrun.core.context import JobContext
from elasticrun.core.job.streams import Streams
from elasticrun.core.nodes.admission import ASKED
from elasticrun.core.reasons import ByOperator, Excluded, how_to_include, text
from elasticrun.core.rounds.failures import Ending
from elasticrun.core.rounds.rendezvous import Phase
from elasticrun.core.snapshots.policy import SnapshotPolicy
from elasticrun.core.wishes import EndJob, RecordSoon, Reopen, Wish
from elasticrun.core.words import names, plural
from elasticrun.wire import messages as m


class RequestRejected(Exception):
    """The request is not carried out; the text is the reply to the operator."""


_Done = tuple[str] | tuple[str, Wish]
"""The reply to the operator, and what the job must do."""


class OperatorRequests:
    """Carries out the requests of operators."""

    def __init__(self, ctx: JobContext, streams: Streams, saving: SnapshotPolicy) -> None:
        self._ctx = ctx
        self._streams = streams
        self._saving = saving
        self._stop_reason: ByOperator | None = None

    def handle(self, request: m.Request) -> tuple[m.Reply, tuple[Wish, ...]]:
        """Carry out the request or reply why not. Return the reply and what the job must do."""
        try:
            done, *wishes = self._do(request)
        except RequestRejected as why:
            return m.Reply(False, str(why)), ()
        return m.Reply(True, done), tuple(wishes)

    def _do(self, request: m.Request) -> _Done:
        if self._ctx.outcome is not None:
            raise RequestRejected(f"the job is over: {self._ctx.outcome.reason}")
        if self._stop_reason is not None:
            raise RequestRejected(f"the job is already ending: {text(self._stop_reason)}")
        match request.verb:
            case "stop":
                return self._stop(request)
            case "restart":
                return self._restart(request)
            case "exclude":
                return self._exclude(request)
            case "include":
                return self._include(request)
            case "scale":
                return self._scale(request)
        raise RequestRejected(f"{request.verb}: not possible for a running job")

    def _stop(self, request: m.Request) -> _Done:
        self._stop_reason = why = _operator_reason(request, "stopped")
        self._ctx.note(f"the job is {text(why)}", "warning")
        step = self._saving.only_in_memory()
        first = f"; step {step} is written to storage first" if step >= 0 else ""
        return f"the job ends: {text(why)}{first}", EndJob(Ending.LEFT, why)

    def _restart(self, request: m.Request) -> _Done:
        ctx = self._ctx
        if ctx.rdzv.phase is not Phase.RUNNING or ctx.round is None:
            raise RequestRejected("no round is running, so there is nothing to restart")
        why = _operator_reason(request, "restarted")
        ctx.note(f"round {ctx.round.name.number} is {text(why)}", "warning")
        done = f"the ranks are stopped and restarted (no restart used): {text(why)}"
        return done, Reopen(why)

    # ------------------------------------------------------------ nodes

    def _scale(self, request: m.Request) -> _Done:
        ctx, spec, high = self._ctx, self._ctx.spec, request.number
        low = min(spec.min_nodes, high)
        if not 1 <= high <= m.MAX_NODES:
            raise RequestRejected(f"a job has 1 to {m.MAX_NODES} nodes: elasticrun stop ends it")
        if high % spec.node_unit:
            unit = spec.node_unit
            raise RequestRejected(
                f"nodes join {unit} at a time, and {high} is not a multiple of that"
            )
        limits = [node.hello.spec.max_nodes for node in ctx.membership.sessions.values()]
        if high > 1 and max(limits, default=high) == 1:
            raise RequestRejected(
                "the job was started for one node, and no other node can reach it"
            )
        if ctx.rdzv.last.completed and high < spec.max_nodes:
            raise RequestRejected("ranks have already exited with 0: the job is finishing")
        if high == spec.max_nodes:
            return (f"the job already uses at most {plural(high, 'node')}",)
        by = text(_operator_reason(request, f"scaled to {plural(high, 'node')}"))
        ctx.scale(low, high)
        ctx.note(f"the job is {by}", "warning")
        done = f"the job now uses at most {plural(high, 'node')}, and needs {low}"
        return done, RecordSoon()

    def _exclude(self, request: m.Request) -> _Done:
        ctx = self._ctx
        present = {node: ctx.nodes[node].host for node in ctx.membership.present}
        node = _find(request.node, present)
        if node is None:
            raise RequestRejected(f"the job has no node {request.node}{_list_known(list(present))}")
        if len(present) == 1:
            raise RequestRejected(f"{node} is the job's only node: elasticrun stop ends the job")
        self._streams.exclude([(node, Excluded(ASKED, text(_operator_reason(request, "asked"))))])
        low, left = ctx.spec.min_nodes, len(present) - 1
        waits = f"; {left} of {low} nodes are left, so the job waits for more" if left < low else ""
        seconds = f"{ctx.spec.checks.exclude_for:g} s"
        return (f"node {node} is excluded for {seconds}; {how_to_include(node)}{waits}",)

    def _include(self, request: m.Request) -> _Done:
        ctx, now = self._ctx, self._ctx.now
        out = {one.node: one.host for one in ctx.exclusions.page(now)}
        held = {node: ctx.nodes[node].host for node in ctx.rdzv.backing_off if node in ctx.nodes}
        node = _find(request.node, {**held, **out})
        if node is None:
            known = _list_known([*out, *held], "excluded: ")
            raise RequestRejected(f"node {request.node} is not excluded{known}")
        by = text(_operator_reason(request, "included again"))
        ctx.exclusions.lift(node)
        if node in ctx.rdzv.backing_off:
            ctx.rdzv.backing_off.put(node, now, by)
        ctx.note(f"node {node} is {by}", "warning")
        return f"node {node} may join again", RecordSoon()


def _find(name: str, hosts: dict[str, str]) -> str | None:
    """The id of the node with this id or host; None if there is none. Raises RequestRejected if
    several nodes are on that host."""
    if name in hosts:
        return name
    named = [node for node, host in hosts.items() if name and host == name]
    if len(named) > 1:
        raise RequestRejected(f"{len(named)} nodes are on {name}: {names(sorted(named))}; name one")
    return named[0] if named else None


def _list_known(nodes: list[str], word: str = "it has ") -> str:
    return f"; {word}{names(sorted(nodes))}" if nodes else ""


def _operator_reason(request: m.Request, done: str) -> ByOperator:
    return ByOperator(done, request.who, request.reason)
