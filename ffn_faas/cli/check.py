"""``check``: MODEL and a number of F ranks to bytes per rank and to what is refused. Loads nothing."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ffn_faas import config
from ffn_faas.check import checkpoint, report
from ffn_faas.check.plan import Question, plan
from ffn_faas.errors import ModelRefused, UsageError
from ffn_faas.experts.kernels import choose_kernel, kernel_refusal
from ffn_faas.experts.model_path import resolve_model
from ffn_faas.experts.spec import MoESpec
from ffn_faas.units import parse_size

EPILOG = """\
examples:
  python -m ffn_faas check Qwen/Qwen3-30B-A3B --ffn-ranks 4
  python -m ffn_faas check ./model --ffn-ranks 8 --capacity 1024 --sessions 3 --json

A directory that holds nothing but config.json is enough; with an index the names of the experts' tensors are checked,
with the safetensors files their shapes and types too. No weights are read.

exit codes: 0 can be served, 2 usage, 3 refused (the reasons are in the answer)."""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m ffn_faas check",
        description="Say what each F rank would hold, window and workspace memory, and what is refused.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("model", metavar="MODEL", help="Hugging Face directory, or a hub id in the local cache")
    add("--ffn-ranks", type=int, required=True, metavar="M", help="number of F ranks")
    add(
        "--capacity",
        type=int,
        default=config.DEFAULT_CAPACITY,
        metavar="N",
        help="rows of a window: the smaller of both sides' --max-num-batched-tokens (%(default)s)",
    )
    add("--sessions", type=int, default=1, metavar="N", help="Attention instances attached at a time (%(default)s)")
    add("--attention-ranks", type=int, default=1, metavar="N", help="A ranks of each instance (%(default)s)")
    add("--window-memory", metavar="SIZE", help="as given to serve: most memory for windows, such as 4GiB")
    add("--dtype", default="auto", choices=config.DTYPES, help="as given to serve (%(default)s)")
    add("--moe-kernel", default="auto", choices=config.MOE_KERNELS, help="as given to serve (%(default)s)")
    add("--revision", help="revision of a hub id (default: what the cache calls main)")
    add("--json", action="store_true", help="one JSON object on stdout")
    return parser


def run(argv: Sequence[str]) -> int:
    """Print the answer; returns the exit code."""
    args = _parser().parse_args(argv)
    for flag in ("ffn_ranks", "capacity", "sessions", "attention_ranks"):
        if getattr(args, flag) < 1:
            raise UsageError(f"--{flag.replace('_', '-')} is {getattr(args, flag)}, at least 1 is needed")
    figures = _figures(args, resolve_model(args.model, args.revision))
    if args.json:
        print(json.dumps(figures))
    elif "ranks" in figures:
        print(report.as_text(figures))
    else:
        print("\n".join(f"refused: {reason}" for reason in figures["refused"]))
    return ModelRefused.exit_code if figures["refused"] else 0


def _figures(args: argparse.Namespace, directory: Path) -> dict[str, Any]:
    try:
        spec = MoESpec.from_model_dir(directory, args.dtype)
    except ModelRefused as error:
        return {"model": args.model, "refused": [str(error)]}
    question = Question(args.ffn_ranks, args.capacity, args.sessions, args.attention_ranks)
    refused = []
    if question.ffn_ranks > spec.num_experts:
        refused.append(f"{question.ffn_ranks} F ranks for {spec.num_experts} experts: some rank would own none")
    ranks = [] if refused else plan(spec, question)
    limit = parse_size(args.window_memory) if args.window_memory else None
    windows = max((rank.window_bytes for rank in ranks), default=0)
    if limit is not None and windows > limit:
        refused.append(f"window memory: {windows} bytes are needed on each F rank, --window-memory allows {limit}")
    seen = checkpoint.look(directory, spec)
    kernel = choose_kernel(args.moe_kernel, spec)
    reasons = (seen.problem, kernel_refusal(kernel, spec, max((rank.num_experts for rank in ranks), default=1)))
    refused += [reason for reason in reasons if reason]
    return report.as_json(args.model, spec, question, ranks, seen, refused, kernel)
