"""``bench``: how long one remote layer takes on this machine, part by part, and what the machine could do."""

from __future__ import annotations

import argparse
import json
import logging
from collections.abc import Sequence
from pathlib import Path

from ffn_faas.errors import UsageError

EPILOG = """\
examples:
  python -m ffn_faas bench --backend gpu-deepep-m2n
  python -m ffn_faas bench --backend gpu-deepep-m2n --hidden 2048 --tokens 32,128 --vs vllm,liger --json out.json
  python -m ffn_faas bench --backend gpu-deepep-m2n --one-gpu

A fake Attention runs on the second GPU, F on the first; times in microseconds, medians of graph replays.
Ceilings of the machine are measured first, in the same run."""


def run(argv: Sequence[str]) -> int:
    """Measure and print; returns the exit code."""
    options = _parser().parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    from ffn_faas.bench import gpu_m2n

    tokens = _numbers("--tokens", options.tokens) or gpu_m2n.TOKENS
    hidden = _numbers("--hidden", options.hidden) or tuple(gpu_m2n.SHAPES)
    unknown = [size for size in hidden if size not in gpu_m2n.SHAPES]
    if unknown:
        raise UsageError(
            f"--hidden {unknown[0]} is not measured", remedy=f"one of {', '.join(map(str, gpu_m2n.SHAPES))}"
        )
    devices = _numbers("--device-ids", options.device_ids) or (0, 1)
    f, a = (devices[0], devices[0]) if options.one_gpu else (devices[0], devices[-1])
    rivals = tuple(name for name in options.vs.split(",") if name)
    result = gpu_m2n.run(gpu_m2n.Options(f, a, tokens, hidden, rivals, options.replays))
    if options.json:
        Path(options.json).write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(gpu_m2n.print_table(result, rivals))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m ffn_faas bench",
        description="Measure one remote layer: dispatch, experts, combine, round trip.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--backend", required=True, choices=("gpu-deepep-m2n",), help="which data plane and kernels")
    add("--tokens", default="", metavar="LIST", help="rows of a batch (default: 1 ... 8192)")
    add("--hidden", default="", metavar="LIST", help="hidden sizes, each with its model's shape (2048,4096,7168)")
    add("--vs", default="", metavar="LIST", help="also measure vllm, liger, grouped_mm on F's GPU, weights local")
    add("--device-ids", default="", metavar="F,A", help="GPUs of F and of Attention (0,1)")
    add("--one-gpu", action="store_true", help="both on F's GPU, in one stream: no link between them is measured")
    add("--replays", type=int, default=50, help="graph replays a median stands on (%(default)s)")
    add("--json", metavar="FILE", help="write everything measured there")
    return parser


def _numbers(flag: str, text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(",") if part.strip())
    except ValueError:
        raise UsageError(f"{flag} is {text!r}, numbers such as 1,2 are needed") from None
