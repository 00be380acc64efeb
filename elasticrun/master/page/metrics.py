"""What a scraper is given: the picture and the figures of this moment, as Prometheus wants them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Final

from elasticrun import __version__
from elasticrun.core.sight.picture import Goodput
from elasticrun.master.loop import Loop

if TYPE_CHECKING:
    from prometheus_client.core import Metric

STATES: Final = ("alive", "suspect", "dead", "left", "parked")
PHASES: Final = ("gathering", "running", "stopping", "ended")


def metrics_writer(loop: Loop) -> Callable[[], bytes]:
    """A function that writes the picture and the figures of this moment as prometheus-client does,
    in a registry of our own."""
    import prometheus_client.core  # noqa: F401  # here, where it may take a while
    from prometheus_client import CollectorRegistry, generate_latest
    from prometheus_client.registry import Collector

    class JobCollector(Collector):
        def collect(self) -> Iterator[Metric]:
            return _families(loop)

    registry = CollectorRegistry(auto_describe=False)
    registry.register(JobCollector())
    return lambda: generate_latest(registry)


def _families(loop: Loop) -> Iterator[Metric]:
    """The metrics of one job as they hold at this moment: nothing is kept between scrapes."""
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

    status, figures = loop.status(), loop.figures
    states = Counter(node.state for node in status.nodes)
    activities = Counter(node.activity for node in status.nodes)
    every_state = (*STATES, *sorted(set(states) - set(STATES)))
    phases: dict[str, float] = {phase: phase == status.phase for phase in PHASES}
    labelled: list[tuple[str, str, str, dict[str, float]]] = [
        ("nodes", "state", "Nodes by membership.", {name: states[name] for name in every_state}),
        ("nodes_doing", "activity", "Nodes by what they do.", dict(sorted(activities.items()))),
        ("phase", "phase", "1 for the phase the job is in.", phases),
    ]
    text = "The job and the version of elasticrun that serves it."
    job = GaugeMetricFamily("elasticrun_job", text, labels=("job_id", "version"))
    job.add_metric((status.job_id, __version__), 1.0)
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
        "max_restarts": ("Restarts the budget began with.", status.max_restarts),
        "quiet_seconds": ("Seconds since a collective or a step moved.", loop.quiet()),
        "excluded_nodes": ("Nodes that the job refuses for now.", len(status.excluded)),
    }
    for name, (text, number) in gauges.items():
        if number is not None:
            yield GaugeMetricFamily(f"elasticrun_{name}", text, number)
    counters = {
        "restarts": ("Restarts charged to the budget.", status.restart_count),
        "rounds_started": ("Rounds started by this master.", figures.rounds),
        "rank_failures": ("Ranks that failed, each once per round.", figures.failures),
        "probes": ("Answers to probes of the network check, by nodes.", figures.probes),
    }
    text = "Incidents that are over, by cause."
    incidents = CounterMetricFamily("elasticrun_incidents", text, labels=("cause",))
    for cause, number in figures.incidents.items():
        incidents.add_metric((cause,), number)
    yield incidents
    for name, (text, count) in counters.items():
        yield CounterMetricFamily(f"elasticrun_{name}", text, count)
    yield _time(loop.goodput())


def _time(found: Goodput | None) -> Metric:
    """Where the time of all slots went. A gauge: what is told late moves from one category to
    another, so that a row may shrink."""
    from prometheus_client.core import GaugeMetricFamily

    text = "Seconds of all slots by what they were spent on, a slot being one rank's place."
    spent = GaugeMetricFamily("elasticrun_slot_seconds_total", text, labels=("category", "cause"))
    for row in found.rows if found is not None else ():
        spent.add_metric((row.category, row.cause), row.seconds)
    return spent
