"""Very many posts of many Attention ranks at random distances from each other; every answer's bits are known before."""

import random
import threading
from contextlib import contextmanager

import torch

from ffn_faas.bench.gpu_rig import Batch
from tests.gpu.lanes import Lanes

CAPACITY = 16
PAUSE_CYCLES = 8000
"""Up to four microseconds, about what one side of a round trip takes."""


class Litmus(Lanes):
    """Lane n posts ``turns`` + n different batches in turn, 0 to 16 rows, to two layers.

    ``wrong`` counts answers that are not what that batch gave when it was computed alone: a stale, torn or missing row
    differs, since no two batches are equal and results are NaN before each replay.
    """

    def __init__(self, rig, lanes, turns):
        super().__init__(rig, lanes, CAPACITY)
        torch.cuda.set_device(rig.a)
        self.streams = [torch.cuda.Stream(rig.a) for _ in range(lanes)]
        self.wrong = [torch.zeros((), dtype=torch.int64, device=f"cuda:{rig.a}") for _ in range(lanes)]
        self.outs, self.known, self.posts = [], [], []
        for lane in range(lanes):
            count = turns + lane
            size = count, CAPACITY, rig.shape.hidden
            outs = torch.full(size, torch.nan, dtype=torch.bfloat16, device=f"cuda:{rig.a}")
            posts = []
            for turn in range(count):
                rows = (7 * turn + 3 * lane) % (CAPACITY + 1)
                made = rig.batch(rows, 10_000 * lane + turn)
                posts.append(((turn // 3 + lane // 4) % 2, Batch(made.x, made.ids, made.weights, outs[turn, :rows])))
            self.outs.append(outs)
            self.posts.append(posts)
        torch.cuda.synchronize(rig.a)

    def learn(self):
        """Every batch alone; returns (layer, batch) of all, whose ``out`` the caller may check against an oracle."""
        with self.serving(captured=True, generator=None):
            for lane, stream in enumerate(self.streams):
                self._chain(lane, stream, None)
                stream.synchronize()
        self.known = [outs.clone() for outs in self.outs]
        return [post for posts in self.posts for post in posts]

    def run(self, replays, seed, *, captured):
        """Each lane's chain ``replays`` times, with pauses drawn from ``seed`` on both sides. Returns posts made."""
        generator = random.Random(seed)
        graphs = []
        for lane, stream in enumerate(self.streams):
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.stream(stream):
                graph.capture_begin(capture_error_mode="thread_local")
                self.outs[lane].fill_(torch.nan)
                self._chain(lane, stream, generator)
                bits, known = (tensor.view(torch.int16) for tensor in (self.outs[lane], self.known[lane]))
                self.wrong[lane].add_((bits != known).flatten(1).any(1).sum())
                graph.capture_end()
            graphs.append(graph)
        torch.cuda.synchronize(self.rig.a)
        with self.serving(captured=captured, generator=generator):
            for _ in range(replays):
                for graph, stream in zip(graphs, self.streams, strict=True):
                    with torch.cuda.stream(stream):
                        graph.replay()
            for stream in self.streams:
                stream.synchronize()
        return replays * sum(map(len, self.posts))

    def _chain(self, lane, stream, generator):
        with torch.cuda.stream(stream):
            for layer, batch in self.posts[lane]:
                self._pause(generator, 4)
                self.post(lane, layer, batch, stream.cuda_stream)
                self._pause(generator, 4)
                self.receive(lane, batch, stream.cuda_stream)

    @staticmethod
    def _pause(generator, one_in):
        if generator is not None and generator.random() * one_in < 1:
            torch.cuda._sleep(int(generator.random() * PAUSE_CYCLES))

    @contextmanager
    def serving(self, *, captured, generator):
        """F steps in a thread of its own, with a pause before some of them."""
        service, over = self.rig.service, threading.Event()

        def steps():
            self.rig.library.call("use_device", self.rig.f)
            torch.cuda.set_device(self.rig.f)
            own = torch.cuda.ExternalStream(service.stream, device=self.rig.f)
            with torch.cuda.stream(own):
                while not over.is_set():
                    self._pause(generator, 8)
                    service.step(captured=captured)
            service.idle()

        thread = threading.Thread(target=steps, name="F")
        thread.start()
        try:
            yield
        finally:
            over.set()
            service.stop()
            thread.join()
            service.stop(stopped=False)
