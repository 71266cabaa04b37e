"""Prometheus metrics, read from counters the step keeps anyway: a scrape costs, a step does not."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import accumulate

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from ffn_faas.connectors.base import Distribution, FFNConnector
from ffn_faas.service.lifecycle import Phase
from ffn_faas.service.state import ServiceState
from ffn_faas.telemetry.device_work import device_work
from ffn_faas.telemetry.expert_load import imbalance_ratio, top

TOP = 3
"""Busiest experts among the metrics; /status?experts=1 has all."""


class _Collector:
    def __init__(self, state: ServiceState) -> None:
        self._state = state

    def collect(self) -> Iterable[Metric]:
        yield from _lifecycle(self._state)
        yield from _sessions(self._state)
        if self._state.connector is not None:
            yield from _steps(self._state.connector, self._state.spec.expert_bytes)
            yield from _experts(self._state.connector)


def _lifecycle(state: ServiceState) -> Iterable[Metric]:
    snapshot = state.lifecycle.snapshot()
    phase = GaugeMetricFamily("ffn_faas:phase", "1 for the phase this rank is in", labels=["phase"])
    for candidate in Phase:
        phase.add_metric([candidate.value], float(candidate is snapshot.phase))
    yield phase
    seconds = GaugeMetricFamily("ffn_faas:phase_seconds", "time spent in each phase", labels=["phase"])
    for name, value in snapshot.seconds.items():
        seconds.add_metric([name], value)
    yield seconds
    if snapshot.time_to_ready_s is not None:
        yield GaugeMetricFamily("ffn_faas:time_to_ready_seconds", "process start to READY", snapshot.time_to_ready_s)
    yield GaugeMetricFamily("ffn_faas:ready", "what /ready answers: 1 for 200", float(state.world.node_is_ready()))
    yield GaugeMetricFamily("ffn_faas:weights_bytes", "resident expert weights", value=state.weight_bytes)


def _sessions(state: ServiceState) -> Iterable[Metric]:
    sessions = state.sessions
    yield GaugeMetricFamily("ffn_faas:sessions", "attached Attention instances", len(sessions.snapshot()))
    yield GaugeMetricFamily("ffn_faas:window_bytes", "granted windows", value=sessions.window_bytes)
    yield GaugeMetricFamily("ffn_faas:merge_bytes", "memory in which posts are merged", value=sessions.shared_bytes)
    for name, help_text, label, counts in (
        ("attaches", "A ranks attached: first, or again after F or they were away", "kind", sessions.attached_total),
        ("attach_refusals", "attaches refused", "reason", sessions.refused_total),
        ("detaches", "A ranks that left, whatever the reason", "reason", sessions.ended_total),
    ):
        family = CounterMetricFamily(f"ffn_faas:{name}", help_text, labels=[label])
        for key, count in dict(counts).items():
            family.add_metric([key], count)
        yield family


def _steps(connector: FFNConnector, expert_bytes: int) -> Iterable[Metric]:
    statistics = connector.statistics()
    for key, name, help_text in (
        ("steps", "steps", "items computed"),
        ("rows", "tokens", "rows computed"),
        ("posts", "posts", "posts answered"),
        ("splits", "split_posts", "items that were a part of a post above the item limit, not its last"),
        ("captures", "graph_captures", "graphs recorded"),
        ("replays", "graph_replays", "graphs launched"),
    ):
        if key in statistics:
            yield CounterMetricFamily(f"ffn_faas:{name}", help_text, value=statistics[key])
    yield GaugeMetricFamily(
        "ffn_faas:seconds_since_last_step", "idle time; tells idle from hung", value=statistics["idle_s"]
    )
    yield GaugeMetricFamily(
        "ffn_faas:step_in_flight_seconds", "age of the item being computed, 0 when idle", value=statistics["item_s"]
    )
    yield from device_work(statistics, expert_bytes)
    help_texts = {
        "wait": "from the end of a step to taking the next item, idle time included",
        "compute": "from taking an item to its result",
        "send": "from the result to the last flag",
    }
    for part, distribution in connector.step_seconds().items():
        yield _histogram(f"ffn_faas:step_{part}_seconds", help_texts[part], distribution)
    merged = connector.posts_per_item()
    if merged is not None:
        yield _histogram("ffn_faas:posts_per_item", "posts, or parts of posts, computed in one step", merged)


def _experts(connector: FFNConnector) -> Iterable[Metric]:
    rows = connector.expert_rows()
    if not rows:
        return
    busiest = GaugeMetricFamily("ffn_faas:expert_top_tokens", "rows of the busiest experts", labels=["place"])
    for place, (count, _, _) in enumerate(top(rows, TOP), start=1):
        busiest.add_metric([str(place)], count)
    yield busiest
    yield GaugeMetricFamily(
        "ffn_faas:expert_imbalance_ratio",
        "rows of each layer's busiest local expert over those of its average one, all layers together",
        value=imbalance_ratio(rows),
    )


def _histogram(name: str, help_text: str, distribution: Distribution) -> HistogramMetricFamily:
    bounds = [*(f"{bound:g}" for bound in distribution.bounds), "+Inf"]
    buckets = list(zip(bounds, map(float, accumulate(distribution.counts)), strict=True))
    return HistogramMetricFamily(name, help_text, buckets=buckets, sum_value=distribution.total)


def exposition(state: ServiceState) -> bytes:
    """The current values in Prometheus text format."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Collector(state))
    return generate_latest(registry)
