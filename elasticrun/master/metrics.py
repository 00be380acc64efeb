"""/metrics: the picture and the figures as prometheus-client writes them, in a registry of our own.

Nothing is kept between scrapes; each makes its families from what holds at that moment.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from elasticrun import __version__
from elasticrun.master.loop import Loop

STATES = ("alive", "suspect", "dead", "left", "parked")
PHASES = ("gathering", "running", "stopping", "ended")


class JobCollector(Collector):
    """Makes the metrics of one job."""

    def __init__(self, loop: Loop) -> None:
        self._loop = loop

    def collect(self) -> Iterator[Metric]:
        status, figures = self._loop.status(), self._loop.figures
        yield _labelled(
            "elasticrun_job",
            "The job and the version of elasticrun that serves it.",
            ("job_id", "version"),
            {(status.job_id, __version__): 1},
        )
        states = Counter(node.state for node in status.nodes)
        yield _labelled(
            "elasticrun_nodes",
            "Nodes by membership.",
            ("state",),
            {(state,): states[state] for state in (*STATES, *sorted(set(states) - set(STATES)))},
        )
        activities = Counter(node.activity for node in status.nodes)
        yield _labelled(
            "elasticrun_nodes_doing",
            "Nodes by what they do.",
            ("activity",),
            {(activity,): count for activity, count in sorted(activities.items())},
        )
        yield _labelled(
            "elasticrun_phase",
            "1 for the phase the job is in.",
            ("phase",),
            {(phase,): phase == status.phase for phase in PHASES},
        )
        number = status.round.number if status.round else 0
        yield GaugeMetricFamily("elasticrun_round", "Number of the current round.", number)
        age = figures.round_age()
        if age is not None:
            yield GaugeMetricFamily(
                "elasticrun_round_age_seconds", "Seconds since the newest round started.", age
            )
        gauges = {
            "world_size": ("Ranks of the current round.", status.world_size),
            "restarts_left": ("Restarts left in the budget.", status.restarts_left),
            "max_restarts": ("Restarts the budget began with.", status.max_restarts),
            "excluded_nodes": ("Nodes that the job refuses for now.", len(status.excluded)),
        }
        for name, (text, value) in gauges.items():
            yield GaugeMetricFamily(f"elasticrun_{name}", text, value)
        counters = {
            "restarts": ("Restarts charged to the budget.", status.restart_count),
            "rounds_started": ("Rounds started by this master.", figures.rounds),
            "rank_failures": ("Ranks that failed, each once per round.", figures.failures),
            "probes": ("Answers to probes of the network check, by nodes.", figures.probes),
        }
        for name, (text, value) in counters.items():
            yield CounterMetricFamily(f"elasticrun_{name}", text, value)


def _labelled(
    name: str, text: str, labels: tuple[str, ...], values: dict[tuple[str, ...], float]
) -> GaugeMetricFamily:
    family = GaugeMetricFamily(name, text, labels=labels)
    for words, value in values.items():
        family.add_metric(words, float(value))
    return family


def renderer(loop: Loop) -> Callable[[], bytes]:
    """A function that writes the metrics of this moment in the text format."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(JobCollector(loop))
    return lambda: generate_latest(registry)
