"""The metrics for scrapers: the current status, and counters, in Prometheus format."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Final

from elasticrun import __version__
from elasticrun.core.sight.picture import Goodput, LedgerRow, without_words
from elasticrun.master.loop import Loop

if TYPE_CHECKING:
    from prometheus_client.core import Metric

STATES: Final = ("alive", "suspect", "dead", "left")
PHASES: Final = ("gathering", "running", "stopping", "ended")


class SlotCounters:
    """Time of all slots by category and cause, as counters that never decrease.

    A row of the ledger may shrink when late information moves time to another row. So the time
    since the last scrape is divided among the counters that are behind their rows. The sum of the
    counters equals the sum of the rows."""

    def __init__(self) -> None:
        self._micros: dict[tuple[str, str], int] = {}

    def take(self, rows: Iterable[LedgerRow]) -> Mapping[tuple[str, str], float]:
        """Advance the counters to the current ledger; returns seconds by category and cause."""
        counters = self._micros
        book = {(row.category, row.cause): round(row.seconds * 1e6) for row in rows}
        behind = {key: micros - counters.get(key, 0) for key, micros in book.items()}
        behind = {key: micros for key, micros in behind.items() if micros > 0}
        left, owed = sum(book.values()) - sum(counters.values()), sum(behind.values())
        for key, micros in behind.items():
            share = min(micros, micros * left // owed)
            counters[key] = counters.get(key, 0) + share
            left, owed = left - share, owed - micros
        return {key: micros / 1e6 for key, micros in counters.items()}


def metrics_writer(loop: Loop) -> Callable[[], bytes]:
    """A function that renders the current metrics. Imports prometheus-client: call it in a thread.
    Uses a registry of its own."""
    import prometheus_client.core  # noqa: F401  # slow, so imported here, in a thread
    from prometheus_client import CollectorRegistry, generate_latest
    from prometheus_client.registry import Collector

    slots = SlotCounters()

    class JobCollector(Collector):
        def collect(self) -> Iterator[Metric]:
            yield from _families(loop)
            yield from _time(loop.goodput(), slots)

    registry = CollectorRegistry(auto_describe=False)
    registry.register(JobCollector())
    return lambda: generate_latest(registry)


def _families(loop: Loop) -> Iterator[Metric]:
    """The current metrics of the job."""
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

    status, figures = loop.status(), loop.figures
    states = Counter(node.state for node in status.nodes)
    activities = Counter(node.activity for node in status.nodes)
    every_state = (*STATES, *sorted(set(states) - set(STATES)))
    phases: dict[str, float] = {phase: phase == status.phase for phase in PHASES}
    labelled: list[tuple[str, str, str, dict[str, float]]] = [
        ("nodes", "state", "Nodes by membership.", {name: states[name] for name in every_state}),
        ("nodes_doing", "activity", "Nodes by activity.", dict(sorted(activities.items()))),
        ("phase", "phase", "1 for the job's current phase.", phases),
    ]
    text = "The job's id and name, and the version of elasticrun that serves it."
    job = GaugeMetricFamily("elasticrun_job", text, labels=("job_id", "name", "version"))
    job.add_metric((status.job_id, status.name or status.job_id, __version__), 1.0)
    yield job
    for name, label, text, values in labelled:
        family = GaugeMetricFamily(f"elasticrun_{name}", text, labels=(label,))
        for word, value in values.items():
            family.add_metric((word,), float(value))
        yield family
    gauges = {
        "round": ("Number of the current round.", status.round.number if status.round else 0),
        "round_age_seconds": ("Seconds since the newest round started.", figures.round_age()),
        "world_size": ("Ranks of the current round.", status.world_size),
        "restarts_left": ("Restarts left in the budget.", status.restarts_left),
        "max_restarts": ("Initial restart budget.", status.max_restarts),
        "quiet_seconds": ("Seconds since a collective or a step made progress.", loop.quiet()),
        "slow_nodes": ("Nodes that are considered slow and were not excluded.", loop.slow_nodes()),
        "nodes_with_notices": (
            "Nodes whose agents report problems of their machines.",
            sum(1 for node in status.nodes if node.notices),
        ),
        "excluded_nodes": ("Nodes that are currently excluded.", len(status.excluded)),
    }
    for name, (text, number) in gauges.items():
        if number is not None:
            yield GaugeMetricFamily(f"elasticrun_{name}", text, number)
    counters = {
        "restarts": ("Restarts charged to the budget.", status.restart_count),
        "rounds_started": ("Rounds started by this master.", figures.rounds),
        "rank_failures": ("Ranks that failed, each once per round.", figures.failures),
        "probes": ("Answers of nodes to probes of the network check.", figures.probes),
    }
    by_kind = {
        "incidents": ("cause", "Finished incidents, by cause.", figures.incidents),
        "hang_verdicts": ("class", "Reported hang verdicts, by class.", figures.verdicts),
    }
    for name, (label, text, numbers) in by_kind.items():
        counter = CounterMetricFamily(f"elasticrun_{name}", text, labels=(label,))
        for word, number in numbers.items():
            counter.add_metric((word,), number)
        yield counter
    for name, (text, count) in counters.items():
        yield CounterMetricFamily(f"elasticrun_{name}", text, count)


def _time(found: Goodput | None, slots: SlotCounters) -> Iterator[Metric]:
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

    text = "Seconds of all slots by category; a slot is the place of one rank."
    spent = CounterMetricFamily("elasticrun_slot_seconds", text, labels=("category", "cause"))
    rows = without_words(found.rows) if found is not None else ()
    for key, seconds in slots.take(rows).items():
        spent.add_metric(key, seconds)
    yield spent
    if found is not None and found.name == "goodput":
        text = "Share of all slots' time spent on steps that were kept."
        yield GaugeMetricFamily("elasticrun_goodput_ratio", text, found.share)
