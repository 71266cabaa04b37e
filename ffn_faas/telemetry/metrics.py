"""Prometheus metrics, read from counters the step keeps anyway: a scrape costs, a step does not."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from ffn_faas.service.lifecycle import Phase
from ffn_faas.service.state import ServiceState


class _Collector:
    def __init__(self, state: ServiceState) -> None:
        self._state = state

    def collect(self) -> Iterable[Metric]:
        state, snapshot = self._state, self._state.lifecycle.snapshot()
        phase = GaugeMetricFamily("ffn_faas:phase", "1 for the phase this rank is in", labels=["phase"])
        for candidate in Phase:
            phase.add_metric([candidate.value], float(candidate is snapshot.phase))
        yield phase
        seconds = GaugeMetricFamily("ffn_faas:phase_seconds", "time spent in each phase", labels=["phase"])
        for name, value in snapshot.seconds.items():
            seconds.add_metric([name], value)
        yield seconds
        if snapshot.time_to_ready_s is not None:
            yield GaugeMetricFamily(
                "ffn_faas:time_to_ready_seconds", "process start to READY", value=snapshot.time_to_ready_s
            )
        yield GaugeMetricFamily("ffn_faas:sessions", "attached Attention instances", len(state.sessions.snapshot()))
        yield GaugeMetricFamily("ffn_faas:weights_bytes", "resident expert weights", value=state.weight_bytes)
        yield GaugeMetricFamily("ffn_faas:window_bytes", "granted windows", value=state.sessions.window_bytes)
        yield CounterMetricFamily("ffn_faas:attach", "A ranks attached", value=state.sessions.attached_total)
        ended = CounterMetricFamily("ffn_faas:session_ends", "sessions ended", labels=["reason"])
        for reason, count in state.sessions.ended_total.items():
            ended.add_metric([reason], count)
        yield ended
        if state.connector is not None:
            yield from _step_metrics(state.connector.statistics())


def _step_metrics(statistics: dict[str, float]) -> Iterable[Metric]:
    yield CounterMetricFamily("ffn_faas:steps", "items computed", value=statistics["steps"])
    yield CounterMetricFamily("ffn_faas:tokens", "rows computed", value=statistics["rows"])
    yield CounterMetricFamily(
        "ffn_faas:posts", "posts received; over steps: posts merged", value=statistics.get("posts", 0)
    )
    yield CounterMetricFamily("ffn_faas:split_posts", "posts above the item limit", value=statistics.get("splits", 0))
    split = CounterMetricFamily("ffn_faas:step_seconds", "time of steps by part", labels=["part"])
    for part in ("wait", "compute", "post"):
        split.add_metric([part], statistics[f"{part}_s"])
    yield split
    yield GaugeMetricFamily(
        "ffn_faas:seconds_since_last_step", "idle time; tells idle from hung", value=statistics["idle_s"]
    )
    yield GaugeMetricFamily(
        "ffn_faas:step_in_flight_seconds", "age of the item being computed, 0 when idle", value=statistics["item_s"]
    )


def exposition(state: ServiceState) -> bytes:
    """The current values in Prometheus text format."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Collector(state))
    return generate_latest(registry)
