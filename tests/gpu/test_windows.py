"""Waits that end, sessions side by side, peers that break the protocol, and very many rounds."""

import time

import pytest
import torch

from ffn_faas.bench.gpu_rig import LayerShape
from ffn_faas.connectors import m2n_library
from ffn_faas.connectors.base import WindowGeometry
from ffn_faas.connectors.m2n_attention import M2nAttention
from ffn_faas.connectors.m2n_window import addresses, combine_layout, dispatch_layout
from tests.gpu import rigs
from tests.gpu.conftest import PATIENCE
from tests.gpu.litmus import CAPACITY, Litmus

pytestmark = pytest.mark.gpu
SHAPE = LayerShape(128, 64, 4, 2, 2)


@pytest.mark.sanitized
def test_a_wait_without_a_post_ends_by_itself_and_a_cancelled_one_at_once(library):
    rig, _ = rigs.make(library, SHAPE, 8)
    rig.service.capture()
    begun = time.perf_counter()
    rig.service.step()
    rig.service.idle()
    assert 0.015 < time.perf_counter() - begun < 0.2 * PATIENCE
    rig.service.step()
    time.sleep(0.005)
    begun = time.perf_counter()
    rig.service.stop()
    rig.service.idle()
    assert time.perf_counter() - begun < 0.2 * PATIENCE
    assert int(rig.service.counters.taken) == 0
    rig.close()


@pytest.mark.sanitized
def test_a_cancelled_receive_gives_nan_and_a_new_session_works(library):
    rig, weights = rigs.make(library, SHAPE, 8)
    batch = rig.batch(8, 1)
    stream = torch.cuda.Stream()
    rig.dispatch(0, batch, stream.cuda_stream)
    rig.receive(batch, stream.cuda_stream)
    time.sleep(0.005)
    begun = time.perf_counter()
    rig.attention.stop()
    stream.synchronize()
    assert time.perf_counter() - begun < 0.2 * PATIENCE
    assert batch.out.isnan().all()
    assert rig.attention.status(0) == "stopped"
    where = addresses(rig.geometry, rig._dispatch, rig._combine, 0)
    rig.attention.set_link(0, 0, where, 9)
    rig.attention.begin()
    rig.service.set_lane(0, where, 8, 9 << 40 | 1)
    assert rigs.error(rigs.post(rig, 0, batch), rigs.reference(SHAPE, weights, 0, batch)) < 4e-3
    rig.close()


@pytest.mark.sanitized
@pytest.mark.parametrize(("layer", "rows"), [(2, 1), (-1, 1), (0, 9), (0, -1)])
def test_a_post_out_of_bounds_is_refused_and_other_lanes_go_on(library, layer, rows):
    rig, weights = rigs.make(library, SHAPE, 16)
    geometry = WindowGeometry(1, 8, SHAPE.hidden, SHAPE.top_k, 2)
    arena = library.allocate(dispatch_layout(geometry).nbytes + (2 << 20))
    where = addresses(geometry, arena, arena + dispatch_layout(geometry).nbytes, 0)
    rig.service.set_lane(1, where, 8, 3 << 40 | 1)
    head = torch.tensor([layer, rows], dtype=torch.int32)
    library.call("copy", where.dispatch_head, head.data_ptr(), 8)
    flag = torch.tensor([(3 << 40 | 1) << 10], dtype=torch.int64)
    library.call("copy", where.dispatch_flag, flag.data_ptr(), 8)
    rig.service.enqueue(m2n_library.STEP)
    rig.service.idle()
    assert int(rig.service.counters.faults) == 1
    assert rig.service.lane_fault(1)
    assert not rig.service.lane_fault(0)
    batch = rig.batch(16, 2)
    assert rigs.error(rigs.post(rig, 1, batch), rigs.reference(SHAPE, weights, 1, batch)) < 4e-3
    rig.close()
    library.call("free", arena)


@pytest.mark.sanitized
def test_sessions_of_different_capacity_are_served_in_turn_by_one_graph(library, pair):
    f, a = pair
    rig, weights = rigs.make_serving(library, LayerShape(256, 128, 8, 2, 2), 512, pair)
    shape = rig.shape
    library.call("use_device", f)
    geometry = WindowGeometry(1, 32, shape.hidden, shape.top_k, 2)
    arena = library.allocate(dispatch_layout(geometry).nbytes)
    rig.service.capture()
    library.call("use_device", a)
    torch.cuda.set_device(a)
    combine = library.allocate(combine_layout(geometry).nbytes)
    other = M2nAttention(library, geometry, [shape.experts], beside=rig.beside)
    where = addresses(geometry, arena, combine, 0)
    other.set_link(0, 0, where, 11)
    other.begin()
    library.call("use_device", f)
    rig.service.set_lane(1, where, 32, 11 << 40 | 1)
    library.call("use_device", a)
    large, small = rig.batch(512, 1), rig.batch(32, 2)
    streams = [torch.cuda.Stream(a) for _ in range(2)]
    torch.cuda.synchronize()
    turns = 50
    with rig.serving():
        for turn in range(turns):
            rig.dispatch(turn % 2, large, streams[0].cuda_stream)
            ids, scales = small.ids.data_ptr(), small.weights.data_ptr()
            other.dispatch(0, 1, small.x.data_ptr(), ids, scales, 32, streams[1].cuda_stream)
            rig.receive(large, streams[0].cuda_stream)
            other.receive(0, small.out.data_ptr(), 32, streams[1].cuda_stream)
        torch.cuda.synchronize(a)
    assert rigs.error(large.out, rigs.reference(shape, weights, 1, large)) < 4e-3
    assert rigs.error(small.out, rigs.reference(shape, weights, 1, small)) < 4e-3
    assert int(rig.service.counters.completed) == 2 * turns
    other.close()
    rig.close()


@pytest.mark.quiet
@pytest.mark.parametrize("rounds", [10_000_000])
def test_very_many_rounds_at_random_distances_never_give_another_result(library, pair, rounds, record_property):
    """Sixteen Attention ranks at once; pauses drawn anew every so often on both sides, F in its graph and eager."""
    rig, weights = rigs.make_serving(library, SHAPE, 8 * CAPACITY, pair)
    rig.service.capture()
    run = Litmus(rig, 16, 60)
    for layer, batch in run.learn()[::41]:
        if batch.x.shape[0]:
            assert rigs.error(batch.out, rigs.reference(SHAPE, weights, layer, batch)) < 4e-3
    done = seed = 0
    while done < rounds:
        done += run.run(50 if seed % 4 else 200, seed, captured=seed % 4 != 3)
        seed += 1
    assert [int(wrong) for wrong in run.wrong] == [0] * 16
    counters = rig.service.counters
    print(f"{done} rounds in {seed} draws: {counters.completed} posts in {counters.items} items")
    record_property("rounds", done)
    assert int(counters.completed) == done + sum(map(len, run.posts))
    assert int(counters.faults) == 0
    run.close()
    rig.close()
