"""A demo's result as one JSON object, as text, and as an exit code."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from ffn_faas.demo.comparison import Comparison, compare
from ffn_faas.demo.options import DemoOptions
from ffn_faas.demo.runner import DemoResult
from ffn_faas.units import MIB

LARGEST_ERROR_RATIO = 1.25
"""How much larger a layer's error against float64 may be than that of stock's kernel."""


def as_json(options: DemoOptions, result: DemoResult) -> dict[str, Any]:
    """All figures. What needs stock answers is None without them."""
    attention, stock = result.attention, result.stock
    compared = compare(attention.answers, stock.answers) if stock else None
    spoken = {token for answer in attention.answers for token in answer.token_ids}
    return {
        "arch": options.arch,
        "ffn_ranks": options.ffn_ranks,
        "moe_kernel": options.moe_kernel,
        "compiled": options.compiled,
        "tokens_equal": compared.equal if compared else None,
        "tokens_compared": compared.compared if compared else 0,
        "changed_tokens_fraction": compared.changed / compared.compared if compared else None,
        "distinct_tokens": len(spoken),
        "stock_distinct_tokens": len({t for a in stock.answers for t in a.token_ids}) if stock else None,
        "max_logprob_diff": compared.max_logprob_diff if compared else None,
        "partings": [asdict(parting) for parting in compared.partings] if compared else None,
        "max_layer_error_ratio": result.max_layer_error_ratio,
        "attention_expert_bytes": result.attention_expert_bytes,
        "stock_expert_bytes": result.stock_expert_bytes,
        "remote_layers": result.remote_layers,
        "f_ready_s": round(result.f_ready_s, 2),
        "attention_ready_s": round(attention.ready_s, 2),
        "stock_ready_s": round(stock.ready_s, 2) if stock else None,
        "tokens_per_s": round(attention.tokens_per_s, 2),
        "stock_tokens_per_s": round(stock.tokens_per_s, 2) if stock else None,
        "attention_rss_bytes": attention.rss_bytes,
        "stock_rss_bytes": stock.rss_bytes if stock else None,
        "attention_pss_bytes": attention.pss_bytes,
        "stock_pss_bytes": stock.pss_bytes if stock else None,
        "f_rss_bytes": result.f_rss_bytes,
        "stock_answers_kept": result.stock_was_kept,
    }


def failure(options: DemoOptions, figures: dict[str, Any]) -> str | None:
    """Why this demo did not show what it promises; None when it did."""
    if figures["attention_expert_bytes"] != 0:
        return f"Attention holds {figures['attention_expert_bytes']} bytes of routed experts, it should hold none"
    if options.must_equal_stock and figures["tokens_equal"] is False:
        return f"{figures['changed_tokens_fraction']:.1%} of the tokens differ from stock vLLM's, none should"
    ratio = figures["max_layer_error_ratio"]
    if ratio is not None and ratio > LARGEST_ERROR_RATIO:
        return f"a layer's error is {ratio:.3f} times that of stock vLLM's kernel, at most {LARGEST_ERROR_RATIO} is due"
    return None


def as_text(options: DemoOptions, result: DemoResult) -> str:
    """Both answers of each prompt, then the figures."""
    figures = as_json(options, result)
    lines: list[str] = []
    for number, answer in enumerate(result.attention.answers):
        lines += [f"prompt    {answer.prompt!r}", f"ffn_faas  {answer.text!r}"]
        if result.stock:
            lines.append(f"stock     {result.stock.answers[number].text!r}")
        lines.append("")
    if result.stock:
        lines += _verdict(options, compare(result.attention.answers, result.stock.answers))
        saved = figures["stock_rss_bytes"] - figures["attention_rss_bytes"]
        lines.append(
            f"memory: Attention {figures['attention_rss_bytes'] / MIB:.0f} MiB, stock vLLM "
            f"{figures['stock_rss_bytes'] / MIB:.0f} MiB, saved {saved / MIB:.0f} MiB"
        )
    lines.append(
        f"routed-expert bytes: {result.attention_expert_bytes} on Attention ({result.remote_layers} remote layers), "
        f"{result.stock_expert_bytes} in the checkpoint"
    )
    if result.max_layer_error_ratio is not None:
        lines.append(f"largest error of a layer: {result.max_layer_error_ratio:.3f} x that of stock's kernel")
    ready = f"ready after: F {result.f_ready_s:.1f} s, Attention {result.attention.ready_s:.1f} s"
    speed = f"tokens/s, one prompt at a time: {result.attention.tokens_per_s:.1f}"
    if result.stock:
        ready += f", stock vLLM {result.stock.ready_s:.1f} s"
        speed += f", stock vLLM {result.stock.tokens_per_s:.1f}"
    return "\n".join([*lines, ready, speed])


def _verdict(options: DemoOptions, compared: Comparison) -> list[str]:
    if compared.equal:
        return [f"all {compared.compared} tokens equal; largest log-probability gap {compared.max_logprob_diff:g}"]
    fraction = compared.changed / compared.compared
    lines = [f"{compared.changed} of {compared.compared} tokens differ ({fraction:.0%})"]
    if options.is_control:
        return [lines[0] + ", as they should: F returned zeros"]
    for parting in compared.partings:
        gap = "not among its best" if parting.gap is None else f"behind by {parting.gap:.4f} in log-probability"
        lines.append(f"  prompt {parting.prompt} parts at token {parting.position}: our token is {gap} on stock")
    if not options.must_equal_stock:
        lines.append("  (this kernel, or more than one F rank, rounds sums elsewhere: near ties may fall differently)")
    return lines
