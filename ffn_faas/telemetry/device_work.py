"""What an accelerator did in its steps, from counters that its kernels keep: times, bytes, products. No host waits."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

PEAK_FLOPS = 989.5e12
"""Dense bf16 of an H100 or H200 (SXM), as published: what utilization is stated against."""


def device_work(statistics: Mapping[str, float], expert_bytes: int) -> Iterable[Metric]:
    """Metrics of a connector whose statistics count experts hit; ``expert_bytes`` of one expert's bf16 matrices.

    Rates are over the time of computing alone, since the start.
    """
    if "experts_hit" not in statistics:
        return
    seconds = CounterMetricFamily(
        "ffn_faas:device_step_seconds",
        "device time of items: wait (until one came), compute (sort and experts), send (sums and flags)",
        labels=["part"],
    )
    for part, key in (("wait", "wait_s"), ("compute", "compute_s"), ("send", "post_s")):
        seconds.add_metric([part], statistics[key])
    yield seconds
    hit, pairs, compute_s = statistics["experts_hit"], statistics["pairs"], statistics["compute_s"]
    nbytes, flops = hit * expert_bytes, pairs * expert_bytes  # two bytes an element, two operations an element
    yield CounterMetricFamily("ffn_faas:expert_weight_bytes", "weights read: of each item's experts hit", nbytes)
    yield CounterMetricFamily("ffn_faas:expert_flops", "operations of the experts' products", flops)
    yield GaugeMetricFamily("ffn_faas:rows_per_expert", "rows of an expert hit, on average", pairs / hit if hit else 0)
    rate = 1 / compute_s if compute_s else 0.0
    yield GaugeMetricFamily("ffn_faas:expert_bytes_per_second", "weights read, while computing", nbytes * rate)
    yield GaugeMetricFamily("ffn_faas:expert_flops_per_second", "operations, while computing", flops * rate)
    yield GaugeMetricFamily(
        "ffn_faas:flops_utilization", f"of {PEAK_FLOPS / 1e12:g} TFLOP/s (Hopper, bf16)", flops * rate / PEAK_FLOPS
    )
