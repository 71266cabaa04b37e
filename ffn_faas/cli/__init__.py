"""Command line: one module per command, imported when it is the one asked for."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib import import_module

from ffn_faas import __version__
from ffn_faas.errors import FfnError

COMMANDS = {
    "serve": "run one F rank: load its share of the routed experts and serve Attention",
    "check": "bytes and memory of each F rank for a model, and what is refused, without loading it",
    "top": "watch a running F in the terminal: phases, step times, sessions, tokens per expert",
    "profile": "capture the next steps of F and of its Attention as a trace for Perfetto",
    "bench": "measure one remote layer on this machine, part by part",
    "wait": "until all F ranks are ready; what starts Attention calls it first",
    "stop": "ask F to stop, and wait until it has",
    "demo": "F and stock vLLM on this machine: a tiny model, real completions, compared with local experts",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit code. Every FfnError becomes one line on stderr and its exit code."""
    argv = list(sys.argv[1:] if argv is None else argv)
    parser = argparse.ArgumentParser(
        prog="python -m ffn_faas",
        description="Routed experts of Mixture-of-Experts LLMs as a service; Attention stays in stock vLLM.",
        epilog="python -m ffn_faas COMMAND --help explains a command.",
    )
    parser.add_argument("--version", action="version", version=f"ffn_faas {__version__}")
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, help_text in COMMANDS.items():
        subparsers.add_parser(name, help=help_text, add_help=False)
    chosen = parser.parse_args(argv[:1]).command
    command = import_module(f"ffn_faas.cli.{chosen}")
    try:
        return int(command.run(argv[1:]))
    except FfnError as error:
        print(f"ffn_faas: error: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("ffn_faas: interrupted", file=sys.stderr)
        return 130
