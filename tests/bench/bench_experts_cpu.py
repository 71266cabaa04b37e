"""Experts of one layer on this CPU: the native kernel, its rivals and the machine's ceilings, interleaved.

    python -m tests.bench.bench_experts_cpu [--tokens 1,8,32] [--rounds 9] [--threads 2] [--rivals vllm,torch]

Each round draws fresh routing and takes the next of several layers, so that no weights are found in a cache. The bound
is the larger of bytes of hit experts / read bandwidth and flops / multiply-add peak, both measured in every round.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch

from ffn_faas import native
from ffn_faas.experts.kernels import create_kernel
from ffn_faas.experts.kernels.base import ExpertKernel
from ffn_faas.experts.kernels.native_kernel import NativeKernel
from ffn_faas.experts.loader import load_experts
from ffn_faas.experts.spec import MoESpec
from tests.data import TinyModel, routing

_READ_BYTES = 1 << 29


def _spec(args: argparse.Namespace) -> MoESpec:
    model = TinyModel(args.hidden, args.inter, args.experts, args.top_k, args.layers, args.dtype)
    return MoESpec.from_config(model.config(), args.dtype)


def _kernels(spec: MoESpec, args: argparse.Namespace) -> dict[str, ExpertKernel]:
    names = ["native", *filter(None, args.rivals.split(","))]
    kernels = {}
    for name in names:
        kernel = NativeKernel(spec, threads=args.threads) if name == "native" else create_kernel(name, spec)
        load_experts(spec, None, range(spec.num_experts), kernel, lambda done, total: None)
        kernels[name] = kernel
    return kernels


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--tokens", default="1,8,32,128,512,2048")
    parser.add_argument("--rivals", default="vllm,torch")
    for name, default in (("rounds", 9), ("threads", 2), ("layers", 2), ("hidden", 2048), ("inter", 768)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--experts", type=int, default=128)
    parser.add_argument("--top-k", type=int, default=8)
    parser.add_argument("--dtype", default="bfloat16")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    spec = _spec(args)
    kernels = _kernels(spec, args)
    code = {"float32": 0, "float16": 1, "bfloat16": 2}[args.dtype]
    ballast = torch.ones(_READ_BYTES, dtype=torch.uint8)
    lib = native.load()
    print(
        "| tokens | experts hit | read GB/s | peak GFLOP/s | bound ms |", *(f"{name} ms |" for name in kernels), end=" "
    )
    print("native / bound |", *(f"{name} / native |" for name in list(kernels)[1:]))
    print("|---" * (5 + len(kernels) + len(kernels)) + "|")
    turn = 0
    for tokens in map(int, args.tokens.split(",")):
        times: dict[str, list[float]] = {name: [] for name in kernels}
        bounds, hits, reads, peaks = [], [], [], []
        for round_ in range(args.rounds):
            ids, weights = routing(tokens, args.experts, args.top_k, seed=tokens * 1000 + round_)
            hidden = torch.randn(tokens, args.hidden).to(getattr(torch, args.dtype))
            out = torch.empty(tokens, args.hidden)
            reads.append(
                lib.cpu_read_bandwidth(threads=args.threads, address=ballast.data_ptr(), nbytes=ballast.numel())
            )
            peaks.append(lib.cpu_peak_flops(threads=args.threads, dtype=code, rounds=1_000_000))
            hits.append(len(ids.unique()))
            order = list(kernels.items())
            for name, kernel in order if round_ % 2 else reversed(order):
                layer = turn % args.layers
                turn += 1
                started = time.perf_counter()
                kernel.compute(layer, hidden, ids, weights, out)
                times[name].append(1e3 * (time.perf_counter() - started))
            bytes_s = hits[-1] * spec.expert_bytes / reads[-1]
            bounds.append(1e3 * max(bytes_s, tokens * args.top_k * 6 * args.hidden * args.inter / peaks[-1]))
        median = {name: statistics.median(values) for name, values in times.items()}
        bound = statistics.median(bounds)
        print(f"| {tokens} | {statistics.median(hits):.0f} | {statistics.median(reads) / 1e9:.1f}", end=" ")
        print(
            f"| {statistics.median(peaks) / 1e9:.0f} | {bound:.1f} |", *(f"{v:.1f} |" for v in median.values()), end=" "
        )
        ratios = [value / median["native"] for value in list(median.values())[1:]]
        print(f"{median['native'] / bound:.2f} |", *(f"{ratio:.2f} |" for ratio in ratios), flush=True)


if __name__ == "__main__":
    main()
