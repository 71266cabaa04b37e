"""The answer of ``check``: one JSON object, or the same as text."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from ffn_faas.check.checkpoint import Seen
from ffn_faas.check.plan import Question, RankPlan, window_bytes
from ffn_faas.experts.spec import MoESpec

_SEEN = {
    "headers": "every expert tensor's header was checked",
    "index": "names were checked in the index; its files are not all here",
    "config": "only config.json was read: no checkpoint is here",
}


def as_json(
    model: str, spec: MoESpec, question: Question, ranks: list[RankPlan], seen: Seen, refused: list[str], kernel: str
) -> dict[str, Any]:
    """All sizes in bytes."""
    return {
        "model": model,
        "architecture": spec.architecture,
        "dtype": spec.dtype,
        "activation": spec.activation_text,
        "expert_biases": spec.has_bias,
        "hidden_size": spec.hidden_size,
        "intermediate_size": spec.intermediate_size,
        "top_k": spec.top_k,
        "moe_layers": spec.num_layers,
        "experts_per_layer": spec.num_experts,
        "bytes_per_expert": spec.expert_bytes,
        "expert_bytes": spec.num_layers * spec.num_experts * spec.expert_bytes,
        "checked": seen.what,
        "stored_expert_bytes": seen.stored_bytes,
        "moe_kernel": kernel,
        **asdict(question),
        "window_bytes_per_pair": window_bytes(spec, question.capacity),
        "ranks": [{**asdict(rank), "total_bytes": rank.total_bytes} for rank in ranks],
        "refused": refused,
    }


def as_text(figures: dict[str, Any]) -> str:
    """A few lines, then a table with one line per F rank."""
    shape = f"hidden {figures['hidden_size']}, intermediate {figures['intermediate_size']}"
    activation = figures["activation"] + (" with biases" if figures["expert_biases"] else "")
    experts = f"{_size(figures['expert_bytes'])} ({figures['expert_bytes']} bytes)"
    sessions = f"{figures['sessions']} session(s) x {figures['attention_ranks']} A rank(s)"
    pair = _size(figures["window_bytes_per_pair"])
    lines = [
        f"{figures['model']}: {figures['architecture']}, {figures['dtype']}",
        f"{figures['moe_layers']} layers x {figures['experts_per_layer']} experts, top {figures['top_k']}, {shape}",
        f"experts: {experts}, {_size(figures['bytes_per_expert'])} each; {_SEEN[figures['checked']]}",
        f"windows of {figures['capacity']} rows: {pair} for each of {sessions}",
        f"kernel {figures['moe_kernel']}, activation {activation}",
        "",
        "F rank  experts of each layer      weights      windows    workspace        total",
    ]
    for rank in figures["ranks"]:
        experts = f"{rank['first_expert']}-{rank['last_expert']} ({rank['num_experts']})"
        sizes = [rank[name] for name in ("weight_bytes", "window_bytes", "workspace_bytes", "total_bytes")]
        lines.append(f"{rank['rank']:>6}  {experts:<18}" + "".join(f"{_size(size):>13}" for size in sizes))
    lines += ["", *(f"refused: {reason}" for reason in figures["refused"])] if figures["refused"] else []
    return "\n".join(lines)


def _size(nbytes: int) -> str:
    for unit, name in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if nbytes >= unit:
            return f"{nbytes / unit:.2f} {name}"
    return f"{nbytes} B"
