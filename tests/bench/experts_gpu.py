"""Builds of the GPU library compared in turns: the experts kernel alone, and with the combine behind it.

    python -m tests.bench.experts_gpu base.so,changed.so 2048:32,256,1024 7168:4096

Prints for each size and build the median of three medians in microseconds, its share of the byte floor and of the
matrix peak (both probed first), and whether results have the bits of the first build. On one GPU, all for itself.
"""

from __future__ import annotations

import statistics
import sys
from dataclasses import dataclass, field, replace

import torch

from ffn_faas.bench import report
from ffn_faas.bench.gpu_m2n import LONG_ROWS, SHAPES, _ceilings
from ffn_faas.bench.gpu_rig import Batch, LayerShape, Rig, Weights, replay_times
from ffn_faas.connectors import m2n_library as parts

ROUNDS, REPLAYS = 3, 12
BEHIND = parts.EXPERTS | parts.COMBINE | parts.OVERLAP


@dataclass
class Build:
    name: str
    rig: Rig
    batch: Batch
    times: dict[int, list[float]] = field(default_factory=lambda: {parts.EXPERTS: [], BEHIND: []})

    def post(self, stream: torch.cuda.Stream) -> torch.Tensor:
        """One whole step, whose sorted rows the measured kernels then find again and again."""
        torch.cuda.synchronize()
        self.rig.dispatch(0, self.batch, stream.cuda_stream)
        self.rig.service.enqueue(parts.STEP, stream.cuda_stream)
        self.rig.receive(self.batch, stream.cuda_stream)
        stream.synchronize()
        return self.batch.out

    def measure(self, stream: torch.cuda.Stream, repeats: int) -> None:
        def record(which: int) -> None:
            for _ in range(repeats):
                self.rig.service.enqueue(which, stream.cuda_stream)

        for which, times in self.times.items():
            times.append(report.quantiles(replay_times(lambda w=which: record(w), stream, repeats, REPLAYS))[0])


def compare(libraries: dict[str, parts.Library], shape: LayerShape, tokens: int, ceilings: dict[str, float]) -> None:
    first = next(iter(libraries.values()))
    weights, stream = Weights(first, shape, 0), torch.cuda.Stream(0)
    builds = []
    for name, library in libraries.items():
        rig = Rig(library, shape, weights, tokens, 0, 0)
        builds.append(Build(name, rig, rig.batch(tokens, 100)))
    results = [build.post(stream) for build in builds]
    for _ in range(ROUNDS):
        for build in builds:
            build.measure(stream, 1 if tokens > LONG_ROWS else 10)
    floor = len(builds[0].batch.ids.unique()) * shape.expert_bytes / ceilings["read_TBps"] / 1e6
    flops = 6 * tokens * shape.top_k * shape.hidden * shape.inter
    for build, result in zip(builds, results, strict=True):
        alone, behind = (statistics.median(times) for times in build.times.values())
        peak = 100 * flops / alone / 1e6 / ceilings["matrix_TFLOPs"]
        same = "same bits" if torch.equal(result, results[0]) else "OTHER BITS"
        print(f"{tokens} x {shape.hidden} {build.name}: {alone:.1f}, with combine {behind:.1f}, ", end="")
        print(f"{100 * floor / alone:.1f} % of the byte floor, {peak:.1f} % of the peak, {same}", flush=True)
        build.rig.close()
    torch.cuda.empty_cache()


def main(builds: str, *sizes: str) -> None:
    libraries = {path: parts.Library(path) for path in builds.split(",")}
    torch.cuda.set_device(0)
    ceilings = _ceilings(next(iter(libraries.values())), torch.cuda.Stream(0))
    print(ceilings)
    for size in sizes:
        hidden, _, tokens = size.partition(":")
        shape = replace(SHAPES[int(hidden)], layers=1)
        for count in tokens.split(","):
            compare(libraries, shape, int(count), ceilings)


if __name__ == "__main__":
    main(*sys.argv[1:])
