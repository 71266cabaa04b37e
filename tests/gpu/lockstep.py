"""Attention ranks that post the same layers in lockstep to one F; each has a chain of its own."""

import torch

from ffn_faas.bench.gpu_rig import replay_times
from tests.gpu.lanes import Lanes


class Lockstep(Lanes):
    """``same``: all ranks post the same rows, so that all of them hit the same experts."""

    def __init__(self, rig, ranks, rows, *, same=False):
        super().__init__(rig, ranks, rows)
        torch.cuda.set_device(rig.a)
        self.streams = [torch.cuda.Stream(rig.a) for _ in range(ranks)]
        self.posts = [
            [(layer, rig.batch(rows, (0 if same else 1000 * rank) + layer)) for layer in range(rig.shape.layers)]
            for rank in range(ranks)
        ]

    def experts_hit(self):
        """Of a layer, by all ranks together; the mean over layers."""
        layers = zip(*self.posts, strict=True)
        return sum(len(torch.cat([batch.ids for _, batch in posts]).unique()) for posts in layers) / len(self.posts[0])

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
        for lane, (stream, posts) in enumerate(zip(self.streams, self.posts, strict=True)):
            stream.wait_event(begin)
            for layer, batch in posts:
                self.post(lane, layer, batch, stream.cuda_stream)
                self.receive(lane, batch, stream.cuda_stream)
            end = torch.cuda.Event()
            end.record(stream)
            main.wait_event(end)
