"""What /metrics and /status say of steps that were really made over shared memory."""

import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families

from ffn_faas import native
from ffn_faas.connectors.base import WindowGeometry
from ffn_faas.connectors.shm import ShmConnector, native_geometry
from ffn_faas.connectors.shm_client import fetch_windows
from ffn_faas.service.lifecycle import Phase
from tests.connectors.processes import NumpyKernel
from tests.http.conftest import Service

GEOMETRY = WindowGeometry(1, 16, 8, 2, 4)
IDS = np.array([[0, 1], [1, -1], [1, 2]], np.int32)


class Stepped(Service):
    """A management port over a real connector whose posts this test makes and steps."""

    def __init__(self):
        super().__init__()
        self.connector = ShmConnector(merge_wait_us=0)
        self.clients = []

    def attach(self):
        link, offer = self.connector.open_link(GEOMETRY, 1, [3, 3])
        client = native.load().AttentionClient(native_geometry(GEOMETRY), [3])
        client.set_layers([0, 1])
        client.set_link(0, fetch_windows(offer, GEOMETRY, 1, 5))
        self.connector.activate_link(link)
        self.clients.append(client)

    def post(self, layer):
        """The rows of IDS from every client, computed as one item."""
        arrays = []
        module = native.load()
        for client in self.clients:
            x, weights, out = np.ones((3, 8), np.float32), np.ones((3, 2), np.float32), np.ones((3, 8), np.float32)
            call = module.Call(
                stage=0, handle=layer, rows=3, hidden_size=8, top_k=2, dtype=module.F32, x=x.ctypes.data,
                ids=IDS.ctypes.data, ids_are_int64=False, weights=weights.ctypes.data,
            )  # fmt: skip
            client.dispatch(call)
            arrays.append((client, call, out, x, weights))
        assert self.connector.step(NumpyKernel(0), 1.0)
        for client, call, out, *_ in arrays:
            client.combine(call, out.ctypes.data)

    def samples(self):
        """{(name, labels without le): value} and the buckets by name."""
        values, buckets = {}, {}
        for family in text_string_to_metric_families(self.get("/metrics").text):
            for sample in family.samples:
                if "le" in sample.labels:
                    buckets.setdefault(sample.name, []).append((float(sample.labels["le"]), sample.value))
                else:
                    values[(sample.name, *sample.labels.values())] = sample.value
        return values, buckets


@pytest.fixture
def stepped():
    service = Stepped()
    service.to_ready()
    yield service
    service.server.shutdown()
    service.connector.close()


def test_steps_are_split_into_wait_compute_and_send_and_nothing_is_lost(stepped):
    stepped.attach()
    stepped.attach()
    for layer in (0, 0, 1):
        stepped.post(layer)
    values, buckets = stepped.samples()
    assert values[("ffn_faas:steps_total",)] == 3
    assert values[("ffn_faas:posts_total",)] == 6
    assert values[("ffn_faas:tokens_total",)] == 18
    assert buckets["ffn_faas:posts_per_item_bucket"] == [
        (1, 0), (2, 3), (4, 3), (8, 3), (16, 3), (float("inf"), 3),
    ]  # fmt: skip
    assert values[("ffn_faas:posts_per_item_sum",)] == 6
    for part in ("wait", "compute", "send"):
        assert values[(f"ffn_faas:step_{part}_seconds_count",)] == 3
        total = values[(f"ffn_faas:step_{part}_seconds_sum",)]
        assert total > 0
        cumulative = buckets[f"ffn_faas:step_{part}_seconds_bucket"]
        assert [bound for bound, _ in cumulative] == sorted(bound for bound, _ in cumulative)
        assert [count for _, count in cumulative] == sorted(count for _, count in cumulative)
        assert cumulative[-1] == (float("inf"), 3)
    assert values[("ffn_faas:seconds_since_last_step",)] >= 0
    assert values[("ffn_faas:step_in_flight_seconds",)] == 0


def test_rows_are_counted_by_layer_and_expert(stepped):
    stepped.attach()
    for layer in (0, 0, 1):
        stepped.post(layer)
    status = stepped.get("/status?experts=1").json()
    assert status["expert_rows"] == [[2, 6, 2], [1, 3, 1]]
    assert status["busiest_experts"][:2] == [
        {"layer": 0, "expert": 1, "rows": 6},
        {"layer": 1, "expert": 1, "rows": 3},
    ]
    assert "expert_rows" not in stepped.get("/status").json()
    values, _ = stepped.samples()
    assert values["ffn_faas:expert_top_tokens", "1"] == 6
    assert values[("ffn_faas:expert_imbalance_ratio",)] == pytest.approx(9 / 5)


def test_before_the_first_post_there_are_no_experts_and_no_steps(stepped):
    values, _ = stepped.samples()
    assert values[("ffn_faas:steps_total",)] == 0
    assert values[("ffn_faas:step_wait_seconds_count",)] == 0
    assert not any(name.startswith("ffn_faas:expert") for name, *_ in values)


def test_phases_readiness_and_bytes_are_there_before_anything_is_loaded():
    service = Service()
    try:
        service.to(Phase.LOADING)
        text = service.get("/metrics").text
        assert 'ffn_faas:phase{phase="loading"} 1.0' in text
        assert 'ffn_faas:phase_seconds{phase="starting"}' in text
        for name in ("ready", "weights_bytes", "window_bytes", "merge_bytes", "sessions"):
            assert f"ffn_faas:{name} 0.0" in text
        assert 'ffn_faas:detaches_total{reason="connection_lost"} 0.0' in text
        assert 'ffn_faas:attaches_total{kind="first"} 0.0' in text
    finally:
        service.server.shutdown()
