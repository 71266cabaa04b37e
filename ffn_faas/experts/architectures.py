"""How each architecture spells its experts in config.json and in the checkpoint: one row per architecture."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Architecture:
    """Field names are those of config.json, first match wins; ``experts_prefix`` takes the number of the layer."""

    num_experts: tuple[str, ...]
    intermediate_size: str
    experts_prefix: str
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    is_moe_layer: Callable[[Mapping[str, Any], int], bool] = lambda config, layer: True
    hidden_size: str = "hidden_size"
    top_k: str = "num_experts_per_tok"
    activation: str = "hidden_act"


def _sparse_step(config: Mapping[str, Any], layer: int) -> bool:
    """Qwen's rule: every ``decoder_sparse_step``-th layer, less those listed in ``mlp_only_layers``."""
    dense = config.get("mlp_only_layers") or []
    step = config.get("decoder_sparse_step", 1)
    return layer not in dense and (layer + 1) % step == 0


ARCHITECTURES: Mapping[str, Architecture] = {
    # Newer transformers write num_local_experts for this one; older checkpoints hold num_experts.
    "Qwen3MoeForCausalLM": Architecture(
        num_experts=("num_experts", "num_local_experts"),
        intermediate_size="moe_intermediate_size",
        experts_prefix="model.layers.{}.mlp.experts",
        is_moe_layer=_sparse_step,
    ),
    "Qwen2MoeForCausalLM": Architecture(
        num_experts=("num_experts",),
        intermediate_size="moe_intermediate_size",
        experts_prefix="model.layers.{}.mlp.experts",
        is_moe_layer=_sparse_step,
    ),
    "OlmoeForCausalLM": Architecture(
        num_experts=("num_experts",),
        intermediate_size="intermediate_size",
        experts_prefix="model.layers.{}.mlp.experts",
    ),
    "MixtralForCausalLM": Architecture(
        num_experts=("num_local_experts",),
        intermediate_size="intermediate_size",
        experts_prefix="model.layers.{}.block_sparse_moe.experts",
        gate="w1",
        up="w3",
        down="w2",
    ),
}
