"""Waits that end, sessions side by side, peers that break the protocol, and very many rounds."""

import time

import pytest
import torch

from ffn_faas.bench.gpu_rig import LayerShape, replay_times
from ffn_faas.connectors import m2n_library
from ffn_faas.connectors.base import WindowGeometry
from ffn_faas.connectors.m2n_attention import M2nAttention
from ffn_faas.connectors.m2n_window import addresses, combine_layout, dispatch_layout
from tests.gpu import rigs

pytestmark = pytest.mark.gpu
SHAPE = LayerShape(128, 64, 4, 2, 2)


def test_a_wait_without_a_post_ends_by_itself_and_a_cancelled_one_at_once(library):
    rig, _ = rigs.make(library, SHAPE, 8)
    rig.service.capture()
    begun = time.perf_counter()
    rig.service.step()
    rig.service.idle()
    assert 0.015 < time.perf_counter() - begun < 0.2
    rig.service.step()
    time.sleep(0.005)
    begun = time.perf_counter()
    rig.service.stop()
    rig.service.idle()
    assert time.perf_counter() - begun < 0.2
    assert int(rig.service.counters.taken) == 0
    rig.close()


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
    assert time.perf_counter() - begun < 0.2
    assert batch.out.isnan().all()
    assert rig.attention.status(0) == "stopped"
    rig.attention.begin(9)
    rig.service.set_lane(0, addresses(rig.geometry, rig._dispatch, rig._combine, 0), 8, 9 << 40 | 1)
    assert rigs.error(rigs.post(rig, 0, batch), rigs.reference(SHAPE, weights, 0, batch)) < 4e-3
    rig.close()


@pytest.mark.parametrize(("layer", "rows"), [(2, 1), (-1, 1), (0, 9), (0, -1)])
def test_a_post_out_of_bounds_is_refused_and_other_lanes_go_on(library, layer, rows):
    rig, weights = rigs.make(library, SHAPE, 16)
    geometry = WindowGeometry(1, 8, SHAPE.hidden, SHAPE.top_k, 2)
    arena = library.allocate(dispatch_layout(geometry).nbytes + (2 << 20))
    where = addresses(geometry, arena, arena + dispatch_layout(geometry).nbytes, 0)
    rig.service.set_lane(1, where, 8, 3 << 40 | 1)
    head = torch.tensor([layer, rows], dtype=torch.int32)
    library.call("copy", where.dispatch_head, head.data_ptr(), 8)
    flag = torch.tensor([3 << 40 | 1], dtype=torch.int64)
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


def test_sessions_of_different_capacity_are_served_in_turn_by_one_graph(library, pair):
    f, a = pair
    rig, weights = rigs.make(library, LayerShape(256, 128, 8, 2, 2), 512, f, a)
    shape = rig.shape
    library.call("use_device", f)
    geometry = WindowGeometry(1, 32, shape.hidden, shape.top_k, 2)
    arena = library.allocate(dispatch_layout(geometry).nbytes)
    rig.service.capture()
    library.call("use_device", a)
    torch.cuda.set_device(a)
    combine = library.allocate(combine_layout(geometry).nbytes)
    other = M2nAttention(library, geometry, [shape.experts])
    where = addresses(geometry, arena, combine, 0)
    other.set_link(0, 0, where)
    other.begin(11)
    library.call("use_device", f)
    rig.service.set_lane(1, where, 32, 11 << 40 | 1)
    library.call("use_device", a)
    large, small = rig.batch(512, 1), rig.batch(32, 2)
    streams = [torch.cuda.Stream(a) for _ in range(2)]
    torch.cuda.synchronize()
    with rig.serving():
        for turn in range(200):
            rig.dispatch(turn % 2, large, streams[0].cuda_stream)
            ids, scales = small.ids.data_ptr(), small.weights.data_ptr()
            other.dispatch(0, 1, small.x.data_ptr(), ids, scales, 32, streams[1].cuda_stream)
            rig.receive(large, streams[0].cuda_stream)
            other.receive(0, small.out.data_ptr(), 32, streams[1].cuda_stream)
        torch.cuda.synchronize(a)
    assert rigs.error(large.out, rigs.reference(shape, weights, 1, large)) < 4e-3
    assert rigs.error(small.out, rigs.reference(shape, weights, 1, small)) < 4e-3
    assert int(rig.service.counters.completed) == 400
    other.close()
    rig.close()


@pytest.mark.parametrize("rounds", [1_000_000])
def test_very_many_rounds_at_random_distances_never_give_another_result(library, pair, rounds):
    """Each round has rows of its own; a stale or torn row would differ from the first result of that round."""
    f, a = pair
    if f == a:
        pytest.skip("needs two GPUs")
    rig, _ = rigs.make(library, SHAPE, 16, f, a)
    library.call("use_device", f)
    rig.service.capture()
    library.call("use_device", a)
    torch.cuda.set_device(a)
    stream = torch.cuda.Stream(a)
    batches = [rig.batch(1 + 5 * turn % 16, turn) for turn in range(100)]
    first = [torch.empty_like(batch.x) for batch in batches]
    wrong = torch.zeros((), dtype=torch.int64, device=f"cuda:{a}")
    torch.cuda.synchronize()
    pauses = torch.randint(0, 4000, (100,), generator=torch.Generator().manual_seed(1)).tolist()

    def record():
        for turn, batch in enumerate(batches):
            rig.dispatch(turn % 2, batch, stream.cuda_stream)
            if turn % 3 == 0:
                torch.cuda._sleep(pauses[turn])
            rig.receive(batch, stream.cuda_stream)
            if turn % 10 == 9:
                for seen, known in zip(batches[turn - 9 : turn + 1], first[turn - 9 : turn + 1], strict=True):
                    wrong.add_((seen.out != known).any())

    with rig.serving():
        with torch.cuda.stream(stream):
            for turn, batch in enumerate(batches):
                rig.dispatch(turn % 2, batch, stream.cuda_stream)
                rig.receive(batch, stream.cuda_stream)
                first[turn].copy_(batch.out)
            stream.synchronize()
        replay_times(record, stream, 100, rounds // 100)
    assert int(wrong) == 0
    assert rig.attention.status(0) == "fine"
    rig.close()
