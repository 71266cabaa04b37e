"""Windows, chunks and batch_info against numbers worked out by hand and properties that any plan must have."""

from __future__ import annotations

import ctypes

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ffn_faas.ascend import twin
from ffn_faas.ascend.shape import CamShape
from tests.cam.twin import calls
from tests.cam.twin.calls import Sizes

Longs = ctypes.POINTER(ctypes.c_int64)


def longs(values):
    return (ctypes.c_int64 * len(values))(*values)


def windows(*topology):
    """max_seq_len, hidden, top_k, moe ranks, attention ranks, experts of a rank, tp, quant."""
    attention, moe = ctypes.c_int64(), ctypes.c_int64()
    twin.library().cam_twin_window_bytes(longs(topology), ctypes.byref(attention), ctypes.byref(moe))
    return attention.value, moe.value


def plan(totals, capacity):
    lasts = longs([0] * len(totals))
    call = twin.library().cam_twin_plan
    call.restype = ctypes.c_int64
    chunks = call(longs(totals), ctypes.c_int64(len(totals)), ctypes.c_int64(capacity), lasts)
    return None if chunks < 0 else list(lasts)[:chunks]


def test_windows_by_hand():
    # A: 4*8*48 = 1536, 4*2 -> 32, 2*64*32*2 = 8192, 32. F, for each of two A: 40 -> 64, 2 * (12 -> 32), rows, 2*32*2.
    assert windows(32, 64, 2, 2, 2, 3, 1, 0) == (1536 + 32 + 8192 + 32, 2 * (64 + 64 + 4096 + 128) + 32)
    assert windows(32, 64, 2, 2, 2, 3, 1, 1) == (9792, 2 * (64 + 64 + 32 * 96 + 128) + 32)


def test_the_deployment_that_is_known_to_need_1_61_gb():
    attention, _ = windows(65536, 4096, 6, 8, 8, 32, 2, 1)
    assert round(attention / 1e9, 2) == 1.61


@settings(deadline=None)
@given(
    st.integers(1, 8), st.integers(1, 8), st.integers(1, 64), st.sampled_from([1, 2]), st.integers(1, 300),
    st.integers(1, 8), st.booleans(),
)  # fmt: skip
def test_what_is_checked_at_start_is_what_the_operators_need(groups, ffn, experts, tp, rows, top_k, quant):
    shape = CamShape(groups * tp, ffn, ffn * experts, top_k, 128, rows * tp, tp, dynamic_quant=quant)
    needed = windows(rows * tp, 128, top_k, ffn, groups * tp, experts, tp, int(quant))
    assert needed == (shape.attention_window_bytes(), shape.ffn_window_bytes())


@pytest.mark.parametrize(
    ("totals", "capacity", "lasts"),
    [
        ([0, 0, 0], 4, [2]),  # nothing at all is one chunk all the same
        ([4, 4, 4], 8, [1, 2]),
        ([4, 4, 4], 4, [0, 1, 2]),
        ([1, 0, 3, 0], 4, [3]),  # experts without rows cost nothing
        ([4, 0, 0, 1, 0], 4, [2, 4]),
        ([5], 4, None),
        ([1, 5], 4, None),
    ],
)
def test_chunks_are_whole_experts_as_many_as_fit(totals, capacity, lasts):
    assert plan(totals, capacity) == lasts


@settings(deadline=None)
@given(st.lists(st.integers(0, 9), min_size=1, max_size=12), st.integers(9, 20))
def test_any_plan_covers_all_experts_within_capacity_and_leaves_no_room_unused(totals, capacity):
    lasts = plan(totals, capacity)
    firsts = [0, *(last + 1 for last in lasts[:-1])]
    sums = [sum(totals[first : last + 1]) for first, last in zip(firsts, lasts, strict=True)]
    assert lasts[-1] == len(totals) - 1
    assert sum(sums) == sum(totals)
    assert all(total <= capacity for total in sums)
    assert all(total + totals[last + 1] > capacity for total, last in zip(sums, lasts[:-1], strict=False))


def test_batch_info_and_the_order_of_rows_by_hand(ops):
    """Two A ranks of one DP group, two F ranks of two experts; rows are told apart by their first number."""
    sizes = Sizes(experts=2, tp=2, top_k=1, hidden=32)
    choices = [[3, 0, 2, 3], [1, 2, 2]]
    for rank, choice in enumerate(choices):
        x = torch.zeros(len(choice), 32, dtype=torch.bfloat16)
        x[:, 0] = torch.arange(len(choice)) + 10 * rank
        calls.dispatch_send(ops, sizes, rank, 5, x, torch.tensor(choice, dtype=torch.int32)[:, None])

    rows, _, batch_info, counts = calls.dispatch_recv(ops, sizes, 0)
    # total, first A rank, layer, experts 0..1; nobody is before the first F rank; A0 has one 0, A1 one 1.
    assert batch_info.tolist() == [2, 0, 5, 0, 1, 0, 0, 1, 0, 0, 1]
    assert counts.tolist() == [1, 1]
    assert rows[:2, 0].tolist() == [1, 10]

    rows, _, batch_info, counts = calls.dispatch_recv(ops, sizes, 1)
    assert batch_info.tolist() == [5, 0, 5, 0, 1, 1, 1, 1, 2, 2, 0]
    assert counts.tolist() == [3, 2]
    assert rows[:5, 0].tolist() == [2, 11, 12, 0, 3]  # expert 2 of A0 and A1, then expert 3


def test_a_later_chunk_tells_the_whole_total_and_counts_of_its_experts_alone(ops, monkeypatch):
    monkeypatch.setenv("BATCH_SIZE_FACTOR", str(3 / 262144))
    sizes = Sizes(attention=1, ffn=1, top_k=1)
    ids = torch.tensor([[0], [2], [1], [1], [2]], dtype=torch.int32)
    calls.dispatch_send(ops, sizes, 0, 1, torch.ones(5, 64, dtype=torch.bfloat16), ids)
    told = []
    for _ in range(2):
        rows, _, batch_info, counts = calls.dispatch_recv(ops, sizes, 0)
        calls.combine_send(ops, sizes, 0, rows, batch_info)
        told.append((batch_info.tolist(), counts.tolist()))
    assert told == [([5, 0, 1, 0, 1, 0, 1, 2, 0], [1, 2, 0]), ([5, 0, 1, 2, 2, 0, 0, 0, 2], [0, 0, 2])]
