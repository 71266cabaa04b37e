"""``bench``: how long one remote layer takes on this machine, part by part, and what the machine could do."""

from __future__ import annotations

import argparse
import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ffn_faas import env
from ffn_faas.errors import ResourceError, UsageError

EPILOG = """\
examples:
  python -m ffn_faas bench                                              (backend cpu, shape of Qwen3-30B-A3B)
  python -m ffn_faas bench --tokens 1,8,32 --vs vllm,torch --json out.json --plot out.png
  python -m ffn_faas bench --moe-kernel zero --tokens 8,4096            (windows alone: op to op, nothing computed)
  python -m ffn_faas bench --tokens 64 --sessions 1,2,4,8 --routing zipf
  python -m ffn_faas bench --backend gpu-deepep-m2n --hidden 2048 --tokens 32,128 --vs vllm,liger
  python -m ffn_faas bench --replay requests.jsonl --deployments http://127.0.0.1:8001,http://127.0.0.1:8002

A fake Attention in a process of its own (cpu) or on a second GPU drives the real connector; no model is needed.
Columns, in microseconds, medians of all rounds:
  dispatch    Attention writes rows, expert ids and weights into F's window
  wait        Attention waits for F's flag: the way there, F's computation, the way back
  experts     of this, F's kernel
  combine     F hands back, and Attention rounds the sum into its own tensor
  round trip  dispatch, wait and combine as Attention sees them; p90 and p99 of it
  floor       the larger of weights of the experts hit / read bandwidth and flops / multiply-add peak, both measured in
              every round; with --moe-kernel zero the copies that no round trip can do without
  local       the kernel alone, called in F's process; GB/s, GFLOP/s and their share of the ceilings are of this
  vs NAME     NAME's time / ours, both local, in turns in the same run; above 1 we are faster
Weights are random, batches fresh each time. Other programs on the machine spoil the figures: ratios suffer least."""


def run(argv: Sequence[str]) -> int:
    """Measure and print; returns the exit code."""
    options = _parser().parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    for name in ("json", "plot"):
        target = getattr(options, name)
        if target and not Path(target).resolve().parent.is_dir():
            raise UsageError(f"--{name} {target}: there is no such directory")
    if options.brackets < 1:
        raise UsageError(f"--brackets is {options.brackets}, at least 1 is needed")
    if options.plot and (options.replay or options.backend != "cpu"):
        raise UsageError("--plot draws a bench of --backend cpu")
    result, text = _measure(options)
    print(text, flush=True)
    if options.json:
        try:
            Path(options.json).write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        except OSError as error:
            raise ResourceError(f"--json: cannot write {options.json}: {error.strerror}") from error
    if options.plot:
        from ffn_faas.bench.plot import plot

        plot(result, Path(options.plot))
    return 0


def _measure(options: argparse.Namespace) -> tuple[dict[str, Any], str]:
    if options.replay:
        from ffn_faas.cli import bench_replay

        return bench_replay.measure(options)
    if options.backend == "cpu":
        env.calm_openmp()  # as serve does: a rival's threads would spin beside the kernel that is measured next
        from ffn_faas.cli import bench_cpu

        return bench_cpu.measure(options)
    return _measure_gpu(options)


def _measure_gpu(options: argparse.Namespace) -> tuple[dict[str, Any], str]:
    from ffn_faas.bench import gpu_m2n

    tokens = numbers("--tokens", options.tokens) or gpu_m2n.TOKENS
    hidden = numbers("--hidden", options.hidden) or tuple(gpu_m2n.SHAPES)
    unknown = [size for size in hidden if size not in gpu_m2n.SHAPES]
    if unknown:
        raise UsageError(
            f"--hidden {unknown[0]} is not measured", remedy=f"one of {', '.join(map(str, gpu_m2n.SHAPES))}"
        )
    devices = numbers("--device-ids", options.device_ids) or (0, 1)
    f, a = (devices[0], devices[0]) if options.one_gpu else (devices[0], devices[-1])
    rivals = tuple(name for name in options.vs.split(",") if name)
    result = gpu_m2n.run(gpu_m2n.Options(f, a, tokens, hidden, rivals, options.replays))
    return result, gpu_m2n.print_table(result, rivals)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m ffn_faas bench",
        description="Measure one remote layer: dispatch, wait, experts, combine, round trip. Or compare two services.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--backend", default="cpu", choices=("cpu", "gpu-deepep-m2n"), help="data plane and kernels (%(default)s)")
    add("--tokens", default="", metavar="LIST", help="rows of a batch (cpu: 1 ... 2048, gpu: 1 ... 8192)")
    add("--hidden", default="", metavar="LIST", help="cpu: one hidden size (2048); gpu: 2048,4096,7168")
    add("--vs", default="", metavar="LIST", help="also measure, weights local; cpu: vllm, sgl, zentorch, torch; gpu: "
        "vllm, liger, grouped_mm; those that are not installed are named and left out")  # fmt: skip
    add("--json", metavar="FILE", help="write everything measured there")
    add("--plot", metavar="FILE.png", help="draw it there (needs matplotlib)")
    cpu = parser.add_argument_group("cpu")
    cpu.add_argument("--moe-kernel", default="auto", metavar="NAME", help="auto, native, torch, vllm; zero: nothing")
    cpu.add_argument("--routing", default="uniform", metavar="FORM", help="uniform, zipf[:EXPONENT], recorded:FILE.npz")
    cpu.add_argument("--sessions", default="", metavar="LIST", help="Attention instances sharing the tokens (1)")
    cpu.add_argument("--stages", type=int, default=1, metavar="N", help="posts of each session in a round (1)")
    cpu.add_argument("--inter", type=int, default=768, metavar="N", help="intermediate size of an expert (%(default)s)")
    cpu.add_argument("--experts", type=int, default=128, metavar="N", help="experts of the layer (%(default)s)")
    cpu.add_argument("--top-k", type=int, default=8, metavar="N", help="experts of a token (%(default)s)")
    cpu.add_argument("--layers", type=int, default=1, metavar="N", help="layers resident, used in turn (%(default)s)")
    cpu.add_argument("--dtype", default="bfloat16", metavar="TYPE", help="bfloat16, float16, float32 (%(default)s)")
    cpu.add_argument("--rounds", type=int, default=9, metavar="N", help="rounds of all kernels in turn (%(default)s)")
    cpu.add_argument(
        "--spin-us", type=int, metavar="N", help="how long waits spin; 0: both sides sleep (default: as serve)"
    )
    gpu = parser.add_argument_group("gpu-deepep-m2n")
    gpu.add_argument("--device-ids", default="", metavar="F,A", help="GPUs of F and of Attention (0,1)")
    gpu.add_argument("--one-gpu", action="store_true", help="both on F's GPU, one stream: no link is measured")
    gpu.add_argument("--replays", type=int, default=50, metavar="N", help="graph replays of a median (%(default)s)")
    service = parser.add_argument_group("whole services")
    service.add_argument("--replay", metavar="FILE.jsonl", help="send these recorded requests to --deployments instead")
    service.add_argument("--deployments", default="", metavar="URL,URL", help="two OpenAI servers, asked A B B A")
    service.add_argument("--concurrency", default="1", metavar="LIST", help="requests in flight (%(default)s)")
    service.add_argument("--brackets", type=int, default=1, metavar="N", help="times A B B A (%(default)s)")
    return parser


def numbers(flag: str, text: str) -> tuple[int, ...]:
    """A comma-separated list; raises UsageError naming ``flag`` for what is not a positive number."""
    try:
        values = tuple(int(part) for part in text.split(",") if part.strip())
    except ValueError:
        raise UsageError(f"{flag} is {text!r}, numbers such as 1,2 are needed") from None
    if flag != "--device-ids" and any(value < 1 for value in values):
        raise UsageError(f"{flag} is {text!r}, at least 1 is needed")
    return values
