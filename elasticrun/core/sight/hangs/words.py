"""Messages to users about a verdict."""

from __future__ import annotations

from collections.abc import Mapping

from elasticrun.core.context import JobContext
from elasticrun.core.sight.hangs.sample import Sample
from elasticrun.core.sight.hangs.states import Reported
from elasticrun.core.sight.hangs.waiting import DECLARED, Impasse, Klass
from elasticrun.core.words import Lasting, render_lasting


def in_words(impasse: Impasse, lines: Mapping[str, str]) -> Lasting:
    """The verdict's sentence, completed from stacks: where a rank is that does not report its
    place, or where a worker of its data loader is. `lines`: places by thread; "" is the main
    thread."""
    if "" in lines and not impasse.place and impasse.klass is not Klass.STILL:
        return (*impasse.pieces, f"; it is at {lines['']}")
    loader = next((thread for thread in lines if thread.startswith("loader")), "")
    return (*impasse.pieces, f"; its {loader} is at {lines[loader]}") if loader else impasse.pieces


def note(pieces: Lasting, impasse: Impasse, before: Reported | None, then: str, where: str) -> str:
    """The log line about a verdict. `before`: what users have seen so far."""
    kind = "no hang" if impasse.kind == DECLARED else f"hang ({impasse.klass.value})"
    says = "" if before is None or impasse.says else before.noted.says
    over = f" (its time in {says} is over)" if says else ""
    return f"{kind}: {render_lasting(pieces)}{over}; {then}{where}"


def where_written(sample: Sample | None, node: str, nodes: int) -> str:
    """A clause that says where the stacks of a sample are, preferably on `node`. `nodes`: the
    number of nodes in the round."""
    if sample is None:
        return ""
    folder, home = sample.folder(node)
    if not folder:
        return "; stacks are not saved (use --log-dir DIR)"
    return f"; stacks are in {folder}" + (f" on node {home}" if nodes > 1 else "")


def what_follows(
    ctx: JobContext, impasse: Impasse, ends: float | None, torch_ends: float | None
) -> str:
    """A clause that says what will be done about a verdict. `ends`: when the round is ended because
    of it; `torch_ends`: when torch ends the job."""
    parts = []
    if ends is None:
        parts.append(f"it is not restarted automatically{_why_left(ctx, impasse)}")
    elif ctx.restarts.budget.remaining(ctx.now):
        parts.append(f"all ranks are restarted in {max(0.0, ends - ctx.now):.0f} s")
    else:
        left = max(0.0, ends - ctx.now)
        parts.append(f"the job ends in {left:.0f} s: {ctx.restarts.budget.exhausted_clause()}")
    if torch_ends is not None and torch_ends > ctx.now:
        if ends is not None and torch_ends < ends:
            parts.clear()
        parts.append(f"torch would end this in {torch_ends - ctx.now:.0f} s")
    return "; ".join(parts)


def _why_left(ctx: JobContext, impasse: Impasse) -> str:
    if impasse.kind == DECLARED:
        return ", because its script announced it"
    if impasse.held:
        return ", because a debugger is attached"
    if ctx.spec.watch.on_hang == "tell":
        return " (--on-hang=tell)"
    if impasse.kind == "stopped":
        return " until it gets SIGCONT (--on-hang=restart ends it)"
    match impasse.klass:
        case Klass.STRONG:
            return " (it may be waiting for an external service; --on-hang=restart ends it)"
        case Klass.STILL:
            return " (--on-hang=restart ends it)"
        case Klass.WEAK:
            return " (it may still finish; --hang-limit sets a limit)"
    return ""
