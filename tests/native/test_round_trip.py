"""What comes back for what was dispatched, over poisoned windows."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ffn_faas import native
from tests.native.world import World, batch, from_wire, oracle, to_wire


def expected(world: World, handle: int, x: np.ndarray, ids: np.ndarray, weights: np.ndarray) -> np.ndarray:
    rows = oracle(world.wire_layers[handle], from_wire(to_wire(x, world.dtype), world.dtype), ids, weights)
    return from_wire(to_wire(rows.astype(np.float32), world.dtype), world.dtype)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_routing_gives_what_the_experts_give(data: st.DataObject) -> None:
    counts = data.draw(st.lists(st.integers(0, 5), min_size=1, max_size=4).filter(any), label="experts per F rank")
    capacity = data.draw(st.integers(1, 9), label="capacity")
    layers = (2, 0, 1)
    with World(
        counts,
        top_k=data.draw(st.integers(1, 4), label="top_k"),
        hidden_size=data.draw(st.integers(1, 70), label="hidden_size"),
        capacity=capacity,
        dtype=data.draw(st.sampled_from(["float32", "float16", "bfloat16"]), label="dtype"),
        wire_layers=layers,
        spin_us=data.draw(st.sampled_from([0, 50]), label="spin"),
    ) as world:
        rng = np.random.default_rng(data.draw(st.integers(0, 1 << 30), label="seed"))
        sent_layers = []
        for rows in data.draw(
            st.lists(st.sampled_from([0, 1, capacity, capacity + 1, 3 * capacity + 1, 4]), max_size=5)
        ):
            handle = int(rng.integers(len(layers)))
            padding = float(rng.choice([0.0, 0.2, 1.0]))
            x, ids, weights = batch(rng, rows, world, padding=padding, id_type=rng.choice([np.int32, np.int64]))
            np.testing.assert_array_equal(world.step(x, ids, weights, handle), expected(world, handle, x, ids, weights))
            sent_layers += [layers[handle]] * max(1, -(-rows // capacity))
        for rank in world.ranks:
            assert rank.seen.layers == sent_layers, "every F rank gets every post"


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
def test_each_row_goes_once_to_each_rank_that_owns_an_expert_of_it(num_ranks: int) -> None:
    with World([2] * num_ranks, top_k=3, capacity=32) as world:
        x, ids, weights = batch(np.random.default_rng(num_ranks), 32, world)
        world.step(x, ids, weights)
        for index, rank in enumerate(world.ranks):
            owned = ((ids >= 2 * index) & (ids < 2 * index + 2)).any(axis=1)
            np.testing.assert_array_equal(rank.seen.rows[0], x[owned])


def test_a_nan_row_stays_in_its_row() -> None:
    with World([2, 2], capacity=8) as world:
        x, ids, weights = batch(np.random.default_rng(1), 6, world, padding=0)
        weights += 1
        clean = world.step(x, ids, weights)
        x[3, 5] = np.nan
        out = world.step(x, ids, weights)
        assert np.isnan(out[3, 5])
        others = np.arange(6) != 3
        np.testing.assert_array_equal(out[others], clean[others])


def test_a_post_without_rows_or_without_experts_is_answered_with_exact_zeros() -> None:
    with World([2, 2], capacity=4) as world:
        no_expert = np.full((3, 2), -1, np.int32)
        x = np.full((3, world.hidden_size), np.nan, np.float32)
        out = world.step(x, no_expert, np.full((3, 2), np.nan, np.float32))
        np.testing.assert_array_equal(out.view(np.uint32), np.zeros_like(out, np.uint32))
        empty = world.step(x[:0], no_expert[:0], np.empty((0, 2), np.float32))
        assert empty.shape == (0, world.hidden_size)
        assert [[len(rows) for rows in rank.seen.rows] for rank in world.ranks] == [[0, 0], [0, 0]]


def test_counts_travel_with_the_post_so_4_and_4_rows_can_become_7_and_1() -> None:
    with World([1, 1], top_k=1, capacity=8) as world:
        rng = np.random.default_rng(2)
        for on_first in (4, 7):
            x, _, weights = batch(rng, 8, world)
            ids = (np.arange(8) >= on_first).astype(np.int32).reshape(8, 1)
            np.testing.assert_array_equal(world.step(x, ids, weights), oracle(0, x, ids, weights))
        assert [len(rows) for rows in world.ranks[0].seen.rows] == [4, 7]
        assert [len(rows) for rows in world.ranks[1].seen.rows] == [4, 1]


def test_two_stages_are_in_flight_at_once_and_keep_apart() -> None:
    with World([2, 2], stages=2, capacity=8) as world:
        rng = np.random.default_rng(3)
        batches = [batch(rng, rows, world) for rows in (5, 8)]
        calls = [world.call(*batches[stage], stage=stage) for stage in (0, 1)]
        outs = [np.full_like(x, np.nan) for x, _, _ in batches]
        for call in calls:
            world.client.dispatch(call)
        for stage in (1, 0):
            world.client.combine(calls[stage], outs[stage].ctypes.data)
        for (x, ids, weights), out in zip(batches, outs, strict=True):
            np.testing.assert_array_equal(out, oracle(0, x, ids, weights))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_partial_sums_are_rounded_to_nearest_even(dtype: str) -> None:
    special = np.array(
        [0.0, -0.0, 1e-8, -6e-8, 6.1e-5, 65504, 65519, 65520, 3.3e38, np.inf, -np.inf, np.nan], np.float32
    )
    rng = np.random.default_rng(4)
    values = np.concatenate([special, rng.normal(0, 10.0 ** rng.uniform(-9, 5, 4000), 4000).astype(np.float32)])
    steps = np.arange(1 << 10, dtype=np.uint32)
    between_bf16 = ((steps << 16) + np.uint32(0x3F808000)).view(np.float32)
    between_f16 = ((steps << 13) + np.uint32(0x38001000)).view(np.float32)
    values = np.concatenate([values, between_bf16, between_f16]).reshape(1, -1)
    with World([1], top_k=1, hidden_size=values.size, capacity=1, dtype=dtype) as world:
        world.ranks[0].close()
        x, ids, weights = np.zeros(values.shape, np.uint16), np.zeros((1, 1), np.int32), np.ones((1, 1), np.float32)
        out = np.empty(values.shape, np.uint16)
        call = world.call(x, ids, weights)
        world.client.dispatch(call)
        item = world.ranks[0].receiver.receive(1_000_000) or world.ranks[0].receiver.receive(1_000_000)
        np.asarray(item.partial)[:] = values
        item.complete()
        world.client.combine(call, out.ctypes.data)
    with np.errstate(over="ignore"):
        want = from_wire(to_wire(values, dtype), dtype)
    np.testing.assert_array_equal(from_wire(out, dtype), want)


def test_the_zero_kernel_steps_in_cpp_and_answers_zeros() -> None:
    with World([2], capacity=8) as world:
        rank = world.ranks[0]
        rank.close()
        kernel = native.load().ZeroKernel()
        world.poison()
        x, ids, weights = batch(np.random.default_rng(5), 8, world)
        out = np.full_like(x, np.nan)
        call = world.call(x, ids, weights)
        world.client.dispatch(call)
        while not rank.receiver.step(kernel.address, 1_000_000):
            pass
        world.client.combine(call, out.ctypes.data)
        np.testing.assert_array_equal(out, np.zeros_like(out))
        counters = rank.receiver.counters()
        assert (counters["steps"], counters["rows"], counters["taken_at_ns"]) == (
            1,
            int((ids >= 0).any(axis=1).sum()),
            0,
        )
        assert counters["last_step_monotonic_ns"] > 0
