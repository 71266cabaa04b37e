"""Posts through the real kernels, and their result in float64."""

import torch

from ffn_faas.bench.gpu_rig import Batch, Rig, Weights
from ffn_faas.connectors import m2n_library


def make(library, shape, rows, f=0, a=0):
    """Posts in turns with F, in one stream on one GPU."""
    weights = Weights(library, shape, f)
    return Rig(library, shape, weights, rows, f, a), weights


def make_serving(library, shape, rows, pair):
    """F serves in a thread of its own, on a GPU of its own where there are two."""
    f, a = pair
    weights = Weights(library, shape, f)
    return Rig(library, shape, weights, rows, f, a, beside=f == a), weights


def post(rig, layer, batch, parts=m2n_library.STEP):
    """One post on one GPU, all kernels in one stream; the output is poisoned first."""
    torch.cuda.set_device(rig.a)
    stream = torch.cuda.Stream(rig.a)
    batch.out.fill_(float("nan"))
    torch.cuda.synchronize()
    rig.dispatch(layer, batch, stream.cuda_stream)
    rig.service.enqueue(parts, stream.cuda_stream)
    rig.receive(batch, stream.cuda_stream)
    stream.synchronize()
    assert rig.attention.status(0) == "fine"
    return batch.out


def reference(shape, weights, layer, batch):
    """[T, H] float64, one expert at a time."""
    where = weights.w13.device
    x, ids, scales = batch.x.to(where).double(), batch.ids.to(where), batch.weights.to(where).double()
    result = torch.zeros_like(x)
    for expert in range(shape.experts):
        token, k = (ids == expert).nonzero(as_tuple=True)
        row = layer * shape.experts + expert
        if token.numel():
            gate, up = (x[token] @ weights.w13[row].double().t()).chunk(2, -1)
            partial = (torch.nn.functional.silu(gate) * up) @ weights.w2[row].double().t()
            result.index_add_(0, token, partial * scales[token, k].unsqueeze(1))
    return result


def error(result, expected):
    return float((result.to(expected.device).double() - expected).norm() / expected.norm())


def random_batch(rig, rows, seed, kind="random"):
    """kind: random, one (one expert gets all), sparse (most ids are -1), none (all are -1)."""
    batch = rig.batch(rows, seed)
    if kind == "one":
        batch.ids.fill_(-1)
        batch.ids[:, 0] = seed % rig.shape.experts
    elif kind == "sparse":
        keep = torch.rand(batch.ids.shape, device=batch.ids.device) < 0.2
        batch.ids.masked_fill_(~keep, -1)
    elif kind == "none":
        batch.ids.fill_(-1)
    return Batch(batch.x, batch.ids, batch.weights, batch.out)
