"""One Attention rank and several F ranks with experts of their own, all in this process and on one GPU."""

from dataclasses import replace

import torch

from ffn_faas.bench.gpu_rig import Batch, Rig, Weights
from ffn_faas.connectors.m2n_attention import M2nAttention
from ffn_faas.connectors.m2n_window import addresses, combine_layout, dispatch_layout
from ffn_faas.protocol.window import flag
from tests.gpu import rigs

EPOCH = 40


class Ranks:
    """Rank r owns ``counts[r]`` experts. ``first`` makes batches for all of them."""

    def __init__(self, library, shape, counts, rows):
        self.library, self.shape = library, shape
        self.starts = [sum(counts[:rank]) for rank in range(len(counts))]
        self.shapes = [replace(shape, experts=count) for count in counts]
        self.weights = [Weights(library, own, 0, seed=rank) for rank, own in enumerate(self.shapes)]
        self.rigs = [
            Rig(library, own, weights, rows, 0, 0) for own, weights in zip(self.shapes, self.weights, strict=True)
        ]
        self.services = [rig.service for rig in self.rigs]
        self.first = _Batches(self.rigs[0], shape)
        geometry = self.rigs[0].geometry
        self.attention = M2nAttention(library, geometry, counts, timeout_s=20.0)
        self.memory = []
        for rank, rig in enumerate(self.rigs):
            dispatch = library.allocate(dispatch_layout(geometry).nbytes)
            combine = library.allocate(combine_layout(geometry).nbytes)
            where = addresses(geometry, dispatch, combine, 0)
            self.attention.set_link(0, rank, where, EPOCH + 7 * rank)  # each rank grants an epoch of its own
            rig.service.set_lane(0, where, geometry.capacity, flag(EPOCH + 7 * rank, 1))
            self.memory.append((where, dispatch, combine))
        torch.cuda.set_device(0)
        self.attention.begin()

    def dispatch(self, layer, batch, stream):
        where = batch.x.data_ptr(), batch.ids.data_ptr(), batch.weights.data_ptr()
        self.attention.dispatch(0, layer, *where, batch.x.shape[0], stream)

    def receive(self, batch, stream):
        self.attention.receive(0, batch.out.data_ptr(), batch.x.shape[0], stream)

    def owned(self, rank, ids):
        """Local ids, -1 for experts of other ranks."""
        local = ids - self.starts[rank]
        return torch.where((ids >= 0) & (local >= 0) & (local < self.shapes[rank].experts), local, -1)

    def head(self, rank):
        """(layer, rows) of the last post to a rank."""
        seen = torch.empty(2, dtype=torch.int32)
        self.library.call("copy", seen.data_ptr(), self.memory[rank][0].dispatch_head, 8)
        return tuple(seen.tolist())

    def reference(self, layer, batch):
        """[T, H] float64, of all ranks."""
        parts = (
            rigs.reference(own, weights, layer, Batch(batch.x, self.owned(rank, batch.ids), batch.weights, batch.out))
            for rank, (own, weights) in enumerate(zip(self.shapes, self.weights, strict=True))
        )
        return sum(parts)

    def close(self):
        assert self.attention.status(0) == "fine"
        self.attention.close()
        for rig, (_, dispatch, combine) in zip(self.rigs, self.memory, strict=True):
            rig.close()
            self.library.call("free", dispatch)
            self.library.call("free", combine)


class _Batches:
    """What ``rigs.random_batch`` asks of a rig, with the experts of all ranks."""

    def __init__(self, rig, shape):
        self.a, self.shape = rig.a, shape

    def batch(self, rows, seed):
        return Rig.batch(self, rows, seed)
