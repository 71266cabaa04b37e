"""Experts on the GPU against float64, over sizes, shapes and routings; graphs and eager launches give the same bits."""

import pytest
import torch

from ffn_faas.bench.gpu_rig import LayerShape
from ffn_faas.connectors import m2n_library
from tests.gpu import rigs
from tests.gpu.lanes import Lanes

pytestmark = pytest.mark.gpu
ROWS = 40
BF16_ERROR = 4e-3
"""bf16 products of normal numbers end near 2.9e-3: two roundings on the way, one at the end."""
SHAPES = [
    LayerShape(128, 64, 3, 1, 2),
    LayerShape(256, 192, 16, 4, 2),
    LayerShape(2048, 768, 128, 8, 2),
    LayerShape(4096, 1536, 16, 8, 1),
    LayerShape(7168, 2048, 8, 8, 1),
]


@pytest.mark.parametrize(
    "shape",
    [pytest.param(shape, marks=[pytest.mark.sanitized] if shape.hidden < 256 else []) for shape in SHAPES],
    ids=lambda shape: f"H{shape.hidden}",
)
@pytest.mark.parametrize("kind", ["random", "one", "sparse"])
def test_every_size_and_routing_agrees_with_float64(library, shape, kind):
    rig, weights = rigs.make(library, shape, 1000)
    for rows in (1, 2, 15, 17, 128, 193, 1000):
        layer = rows % shape.layers
        batch = rigs.random_batch(rig, rows, rows, kind)
        result = rigs.post(rig, layer, batch)
        expected = rigs.reference(shape, weights, layer, batch)
        assert not result.isnan().any()
        if expected.norm() > 0:
            assert rigs.error(result, expected) < BF16_ERROR, rows
        else:
            assert not result.any()
    rig.close()


@pytest.mark.sanitized
def test_rows_without_an_expert_are_zero_and_zero_rows_are_answered(library):
    rig, _ = rigs.make(library, LayerShape(256, 64, 4, 2, 1), 64)
    assert not rigs.post(rig, 0, rigs.random_batch(rig, 64, 1, "none")).any()
    rigs.post(rig, 0, rigs.random_batch(rig, 0, 1))
    assert int(rig.service.counters.completed) == 2
    assert int(rig.service.counters.rows) == 0
    rig.close()


def test_overlapped_plain_and_captured_steps_give_the_same_bits(library):
    shape = LayerShape(512, 256, 32, 4, 2)
    rig, _ = rigs.make(library, shape, 3000)
    for rows in (1, 100, 3000):
        batch = rigs.random_batch(rig, rows, rows)
        first = rigs.post(rig, 1, batch).clone()
        assert torch.equal(first, rigs.post(rig, 1, batch, m2n_library.STEP & ~m2n_library.OVERLAP))
        rig.service.capture()
        for captured in (True, False):
            stream = torch.cuda.Stream()
            batch.out.fill_(float("nan"))
            torch.cuda.synchronize()
            rig.dispatch(1, batch, stream.cuda_stream)
            stream.synchronize()
            rig.service.step(captured=captured)
            rig.service.idle()
            rig.receive(batch, stream.cuda_stream)
            stream.synchronize()
            assert torch.equal(first, batch.out)
    rig.close()


@pytest.mark.parametrize("items", [100_000])
def test_very_many_random_items_over_poisoned_windows(library, items):
    """One to four posts an item, 0 to 40 rows each. Rows are independent, so one reference serves 64 items; NaN is
    everywhere that was not written."""
    shape = LayerShape(128, 64, 8, 2, 2)
    rig, weights = rigs.make(library, shape, 4 * ROWS)
    lanes = Lanes(rig, 4, ROWS)
    wide = weights.w13.double().view(2, 8, 128, 128)
    narrow = weights.w2.double().view(2, 8, 128, 64)
    generator = torch.Generator().manual_seed(3)
    stream = torch.cuda.Stream()
    poison = torch.full((ROWS * 128,), float("nan"), dtype=torch.bfloat16, device="cuda")
    worst = torch.zeros((), dtype=torch.float64, device="cuda")
    posts = 0
    for group in range(items // 64):
        rows = torch.randint(0, ROWS + 1, (64, 4), generator=generator)
        joins = torch.rand((64, 4), generator=generator) < 0.5
        joins[torch.arange(64), torch.randint(0, 4, (64,), generator=generator)] = True
        batch = rig.batch(int(rows[joins].sum()), group)
        drop = torch.rand(batch.ids.shape, device="cuda") < 0.25
        batch.ids.masked_fill_(drop, -1)
        batch.out.fill_(float("nan"))
        lanes.poison(poison)
        torch.cuda.synchronize()
        begin = 0
        for item in range(64):
            parts = []
            for lane in joins[item].nonzero().flatten().tolist():
                end = begin + int(rows[item, lane])
                parts.append((lane, rigs.Batch(*(tensor[begin:end] for tensor in vars(batch).values()))))
                begin = end
            for lane, part in parts:
                lanes.post(lane, group % 2, part, stream.cuda_stream)
            rig.service.enqueue(m2n_library.STEP, stream.cuda_stream)
            for lane, part in parts:
                lanes.receive(lane, part, stream.cuda_stream)
            posts += len(parts)
        stream.synchronize()
        x = batch.x.double()
        gate, up = torch.einsum("th,eih->tei", x, wide[group % 2]).chunk(2, -1)
        every = torch.einsum("tei,ehi->teh", torch.nn.functional.silu(gate) * up, narrow[group % 2])
        scales = torch.zeros(x.shape[0], 8, dtype=torch.float64, device="cuda")
        scales.scatter_add_(1, batch.ids.clamp(min=0).long(), batch.weights.double() * (batch.ids >= 0))
        expected = torch.einsum("teh,te->th", every, scales)
        gap = (batch.out.double() - expected).norm(dim=1) / (expected.norm(dim=1) + 1e-9)
        worst = torch.maximum(worst, torch.where(gap.isnan(), torch.inf, gap).max())
    assert float(worst) < 2e-2
    assert int(rig.service.counters.items) == 64 * (items // 64)
    assert int(rig.service.counters.completed) == posts
    lanes.close()
    rig.close()
