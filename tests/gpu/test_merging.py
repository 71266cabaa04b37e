"""Ready posts of one layer go into one item: the experts' weights are read once for all of them."""

import pytest

from ffn_faas.bench import report
from ffn_faas.bench.gpu_rig import LayerShape
from tests.gpu import rigs
from tests.gpu.lockstep import Lockstep

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_posts_of_ranks_in_lockstep_are_merged_and_right(library, pair, ranks):
    f, a = pair
    if f == a:
        pytest.skip("needs two GPUs")
    for shape, rows in ((LayerShape(256, 128, 8, 2, 4), 5), (LayerShape(512, 256, 32, 8, 3), 300)):
        rig, weights = rigs.make(library, shape, rows * ranks, f, a)
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
    f, a = pair
    if f == a:
        pytest.skip("needs two GPUs")
    shape = LayerShape(256, 128, 8, 2, 4)
    rig, weights = rigs.make(library, shape, 40, f, a)
    run = Lockstep(rig, 4, 20)
    run.posts[1] = run.posts[1][1:] + run.posts[1][:1]
    run.measure(20)
    for rank in range(4):
        for layer, batch in run.posts[rank]:
            assert rigs.error(batch.out, rigs.reference(shape, weights, layer, batch)) < 4e-3, (rank, layer)
    assert int(rig.service.counters.completed) <= 2 * int(rig.service.counters.items)
    run.close()
    rig.close()


def test_what_lockstep_posts_cost_beside_one(library, pair, record_property):
    """A figure for docs/performance.md, not a limit."""
    f, a = pair
    if f == a:
        pytest.skip("needs two GPUs")
    shape, times = LayerShape(2048, 768, 128, 8, 8), {}
    for ranks in (1, 2, 4):
        rig, _ = rigs.make(library, shape, 32 * ranks, f, a)
        run = Lockstep(rig, ranks, 32)
        times[ranks] = report.quantiles(run.measure(60))[0]
        counters = rig.service.counters
        items = f"{counters.completed} posts in {counters.items} items"
        print(f"{ranks} x 32 rows: {times[ranks]:.1f} us a layer ({times[ranks] / times[1]:.3f}), {items}")
        record_property(f"lockstep_{ranks}x32_us", round(times[ranks], 1))
        run.close()
        rig.close()
