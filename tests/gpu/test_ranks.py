"""Several F ranks: a row goes once to each rank that owns one of its experts, and A sums what they answer.

All kernels stand in one stream. Two persistent products of one process on one GPU would wait for each other's blocks;
two processes take turns: test_processes has their graphs.
"""

import pytest
import torch

from ffn_faas.bench.gpu_rig import LayerShape
from ffn_faas.connectors.m2n_library import STEP
from tests.gpu import rigs
from tests.gpu.ranks import Ranks

pytestmark = pytest.mark.gpu
TWICE_ROUNDED = 5e-3
"""Partial rows are bf16, and so is their sum: one rounding more than with one F rank."""


def check(run, batch, layer):
    assert not batch.out.isnan().any()
    expected = run.reference(layer, batch)
    if expected.norm() > 0:
        assert rigs.error(batch.out, expected) < TWICE_ROUNDED
    else:
        assert not batch.out.any()


@pytest.mark.sanitized
@pytest.mark.parametrize("counts", [(8,), (5, 3), (3, 1, 4)], ids=str)
def test_uneven_ranks_give_what_one_would_whatever_the_size_and_routing(library, counts):
    run = Ranks(library, LayerShape(256, 128, 8, 3, 2), counts, 300)
    stream = torch.cuda.Stream()
    for number, (rows, kind) in enumerate(
        [(0, "random"), (1, "random"), (7, "sparse"), (64, "none"), (130, "one"), (300, "random"), (300, "sparse")]
    ):
        batch, layer = rigs.random_batch(run.first, rows, number, kind), number % 2
        batch.out.fill_(float("nan"))
        torch.cuda.synchronize()
        run.dispatch(layer, batch, stream.cuda_stream)
        stream.synchronize()
        for rank in range(len(counts)):
            owned = run.owned(rank, batch.ids)
            assert run.head(rank) == (layer, int((owned >= 0).any(1).sum()))
        for service in run.services:
            service.enqueue(STEP, stream.cuda_stream)
        run.receive(batch, stream.cuda_stream)
        stream.synchronize()
        check(run, batch, layer)
    run.close()
