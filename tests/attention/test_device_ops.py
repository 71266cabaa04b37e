"""Which rows the GPU ops post and in which order. The kernels themselves run in tests/gpu."""

from dataclasses import dataclass, field

import pytest
import torch

from ffn_faas.attention import device_ops
from ffn_faas.attention.device_ops import DeviceOps
from ffn_faas.connectors.base import WindowGeometry
from ffn_faas.errors import SessionLost


@dataclass
class Posts:
    """Where M2nClient is, with a record of what is launched; rows are known by their address."""

    capacity: int
    reason: str = ""
    layers: list[int] = field(default_factory=lambda: [5, 7])
    calls: list[tuple] = field(default_factory=list)

    @property
    def geometry(self):
        return WindowGeometry(1, self.capacity, 8, 2, 2)

    @property
    def attention(self):
        return self

    def dispatch(self, stage, layer, x, ids, weights, rows, stream):
        self.calls.append(("dispatch", layer, x, rows))

    def receive(self, stage, out, rows, stream):
        self.calls.append(("receive", rows))


@pytest.fixture(autouse=True)
def no_stream(monkeypatch):
    monkeypatch.setattr(device_ops, "_stream", lambda: 0)


def inputs(rows):
    return torch.zeros(rows, 8, dtype=torch.bfloat16), torch.zeros(rows, 2), torch.zeros(rows, 2, dtype=torch.int32)


@pytest.mark.parametrize(("rows", "sizes"), [(0, [0]), (4, [4]), (5, [4, 1]), (12, [4, 4, 4])])
def test_a_batch_above_the_capacity_goes_in_chunks_the_next_after_an_answer(rows, sizes):
    posts = Posts(capacity=4)
    ops, (x, weights, ids) = DeviceOps(posts), inputs(rows)
    ops.dispatch(x, weights, ids, 1, 0, 1)
    assert ops.combine(x, weights, ids, 1, 0, 1).shape == (rows, 8)
    expected = []
    for number, size in enumerate(sizes):
        expected += [("dispatch", 7, x.data_ptr() + number * 4 * 16, size), ("receive", size)]
    assert [call for call in posts.calls if call[0] != "dispatch" or call[3]] == [
        call for call in expected if call[0] != "dispatch" or call[3]
    ]
    assert [call[0] for call in posts.calls] == ["dispatch", "receive"] * len(sizes)


def test_a_part_of_the_rows_is_sent_and_the_rest_of_its_result_is_zero():
    posts = Posts(capacity=8)
    ops, (x, weights, ids) = DeviceOps(posts), inputs(5)
    ops.dispatch(x, weights, ids, 0, 1, 2)
    out = ops.combine(x, weights, ids, 0, 1, 2)
    assert posts.calls == [("dispatch", 5, x.data_ptr() + 3 * 16, 2), ("receive", 2)]
    assert out.shape == (3, 8)
    assert not out[2].any()


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"x": torch.zeros(1, 8)}, "torch.float32"),
        ({"x": torch.zeros(1, 16, dtype=torch.bfloat16)}, r"rows are \[16\]"),
        ({"ids": torch.zeros(1, 3, dtype=torch.int32)}, "3 experts"),
    ],
)
def test_rows_that_do_not_fit_the_windows_are_refused_naming_both(changed, reason):
    x, weights, ids = inputs(1)
    with pytest.raises(SessionLost, match=reason):
        DeviceOps(Posts(capacity=4)).dispatch(changed.get("x", x), weights, changed.get("ids", ids), 0, 0, 1)


def test_a_lost_session_is_named_before_anything_is_launched():
    posts = Posts(capacity=4, reason="F rank 0 is lost")
    with pytest.raises(SessionLost, match="F rank 0 is lost"):
        DeviceOps(posts).dispatch(*inputs(1), 0, 0, 1)
    assert posts.calls == []
