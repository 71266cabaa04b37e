"""Several Attention ranks on one GPU that post the same layers in lockstep to one F; each has a chain of its own."""

import torch

from ffn_faas.bench.gpu_rig import replay_times
from ffn_faas.connectors.base import WindowGeometry
from ffn_faas.connectors.m2n_attention import M2nAttention
from ffn_faas.connectors.m2n_window import addresses, combine_layout, dispatch_layout


class Lockstep:
    """Lane 0 is the rig's own; ``ranks`` - 1 more are added. Capacity is the rows of a post."""

    def __init__(self, rig, ranks, rows):
        self.rig, self.rows, library = rig, rows, rig.library
        geometry = WindowGeometry(1, rows, rig.shape.hidden, rig.shape.top_k, 2)
        self.attentions, self.memory = [], []
        for rank in range(ranks):
            library.call("use_device", rig.f)
            dispatch = library.allocate(dispatch_layout(geometry).nbytes)
            library.call("use_device", rig.a)
            combine = library.allocate(combine_layout(geometry).nbytes)
            attention = M2nAttention(library, geometry, [rig.shape.experts], timeout_s=10.0)
            where = addresses(geometry, dispatch, combine, 0)
            attention.set_link(0, 0, where)
            attention.begin(20 + rank)
            library.call("use_device", rig.f)
            rig.service.set_lane(rank, where, rows, (20 + rank) << 40 | 1)
            self.attentions.append(attention)
            self.memory += [dispatch, combine]
        torch.cuda.set_device(rig.a)
        self.streams = [torch.cuda.Stream(rig.a) for _ in range(ranks)]
        self.posts = [
            [(layer, rig.batch(rows, 1000 * rank + layer)) for layer in range(rig.shape.layers)]
            for rank in range(ranks)
        ]

    def measure(self, replays):
        """Microseconds of a layer in which every rank posts once, for each replay."""
        self.rig.library.call("use_device", self.rig.f)
        self.rig.service.capture()
        self.rig.library.call("use_device", self.rig.a)
        torch.cuda.set_device(self.rig.a)
        main = torch.cuda.Stream(self.rig.a)
        with self.rig.serving():
            return replay_times(lambda: self._record(main), main, self.rig.shape.layers, replays)

    def _record(self, main):
        begin = torch.cuda.Event()
        begin.record(main)
        for attention, stream, posts in zip(self.attentions, self.streams, self.posts, strict=True):
            stream.wait_event(begin)
            for layer, batch in posts:
                where = batch.x.data_ptr(), batch.ids.data_ptr(), batch.weights.data_ptr()
                attention.dispatch(0, layer, *where, self.rows, stream.cuda_stream)
                attention.receive(0, batch.out.data_ptr(), self.rows, stream.cuda_stream)
            end = torch.cuda.Event()
            end.record(stream)
            main.wait_event(end)

    def close(self):
        for attention in self.attentions:
            assert attention.status(0) == "fine"
            attention.close()
        for rank in range(len(self.attentions)):
            self.rig.library.call("use_device", self.rig.f)
            self.rig.service.set_lane(rank, None)
