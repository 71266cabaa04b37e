"""Ready posts of one layer go into one item: the experts' weights are read once for all of them."""

import pytest
import torch

from ffn_faas.bench import report
from ffn_faas.bench.gpu_rig import LayerShape
from ffn_faas.connectors import m2n_library
from tests.gpu import rigs
from tests.gpu.lockstep import Lockstep

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_posts_of_ranks_in_lockstep_are_merged_and_right(library, pair, ranks):
    for shape, rows in ((LayerShape(256, 128, 8, 2, 4), 5), (LayerShape(512, 256, 32, 8, 3), 300)):
        rig, weights = rigs.make_serving(library, shape, rows * ranks, pair)
        run = Lockstep(rig, ranks, rows)
        run.measure(20)
        for rank in range(ranks):
            for layer, batch in run.posts[rank]:
                assert rigs.error(batch.out, rigs.reference(shape, weights, layer, batch)) < 4e-3, (rank, layer)
        counters = rig.service.counters
        print(f"{ranks} ranks, {rows} rows: {counters.completed} posts in {counters.items} items")
        assert int(counters.completed) > 1.5 * int(counters.items)
        run.close()
        rig.close()


def test_posts_of_different_layers_are_not_merged_and_an_item_keeps_to_its_limit(library, pair):
    shape = LayerShape(256, 128, 8, 2, 4)
    rig, weights = rigs.make_serving(library, shape, 40, pair)
    run = Lockstep(rig, 4, 20)
    run.posts[1] = run.posts[1][1:] + run.posts[1][:1]
    run.measure(20)
    for rank in range(4):
        for layer, batch in run.posts[rank]:
            assert rigs.error(batch.out, rigs.reference(shape, weights, layer, batch)) < 4e-3, (rank, layer)
    assert int(rig.service.counters.completed) <= 2 * int(rig.service.counters.items)
    run.close()
    rig.close()


@pytest.mark.sanitized
def test_few_posts_of_two_ranks_in_lockstep_are_merged_and_right(library, pair):
    shape = LayerShape(256, 128, 8, 2, 2)
    rig, weights = rigs.make(library, shape, 10)
    stream = torch.cuda.Stream()
    run = Lockstep(rig, 2, 5)
    torch.cuda.synchronize()
    for layer in range(2):
        for lane in range(2):
            run.post(lane, *run.posts[lane][layer], stream.cuda_stream)
        rig.service.enqueue(m2n_library.STEP, stream.cuda_stream)
        for lane in range(2):
            run.receive(lane, run.posts[lane][layer][1], stream.cuda_stream)
    stream.synchronize()
    for posts in run.posts:
        for layer, batch in posts:
            assert rigs.error(batch.out, rigs.reference(shape, weights, layer, batch)) < 4e-3
    assert int(rig.service.counters.items) == 2
    run.close()
    rig.close()


@pytest.mark.quiet
def test_what_lockstep_posts_cost_beside_one(library, pair, record_property):
    """Figures for docs/performance.md, not limits: rows of their own, the same rows, one post as large as all."""
    if pair[0] == pair[1]:
        pytest.skip("needs two GPUs: these times are of an F that has all of its GPU")
    shape, first = LayerShape(2048, 768, 128, 8, 8), 0.0
    for ranks, rows, same in ((1, 32, False), (2, 32, False), (2, 32, True), (1, 64, False), (4, 32, False),
                              (4, 32, True), (1, 128, False), (1, 32, False)):  # fmt: skip
        rig, _ = rigs.make_serving(library, shape, ranks * rows, pair)
        run = Lockstep(rig, ranks, rows, same=same)
        time = report.quantiles(run.measure(60))[0]
        first = first or time
        counters, hit = rig.service.counters, run.experts_hit()
        what = f"{ranks} x {rows} rows{', the same' if same else ''}"
        figures = f"{time:.1f} us a layer ({time / first:.3f}), {hit:.1f} experts hit"
        print(f"{what}: {figures}, {counters.completed} posts in {counters.items} items")
        record_property(what, figures)
        run.close()
        rig.close()
