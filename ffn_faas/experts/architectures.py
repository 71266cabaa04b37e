"""How each architecture spells its experts in config.json and in the checkpoint: one row per architecture."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ffn_faas.experts.layouts import BIASES, Source, per_expert, stacked

Config = Mapping[str, Any]
SWIGLU_OAI_LIMIT = 7.0
"""Where vLLM's kernels clamp the swigluoai activation, whatever config.json says."""


@dataclass(frozen=True)
class Architecture:
    """Field names are those of config.json, first match wins; ``experts_prefix`` takes the number of the layer."""

    num_experts: tuple[str, ...]
    intermediate_size: str
    experts_prefix: str = "model.layers.{}.mlp.experts"
    sources: tuple[Source, ...] = per_expert()
    is_moe_layer: Callable[[Config, int], bool] = lambda config, layer: True
    hidden_size: str = "hidden_size"
    top_k: str = "num_experts_per_tok"
    swiglu_limit: str = ""
    """Field that bounds the activation's two halves (MoESpec.swiglu_limit); "" where none does."""
    activation: str | None = None
    """What vLLM computes with; None = what ``hidden_act`` says."""
    tensor_prefixes: tuple[str, ...] = ("",)
    """What the names of expert tensors, and of no others, begin with after ``experts_prefix``."""
    defaults: Config = field(default_factory=dict)
    """Fields that a config.json may leave out."""
    refused: Callable[[Config], str | None] = lambda config: None
    """What of a configuration cannot be served, in words."""

    @property
    def has_bias(self) -> bool:
        return any(matrix in BIASES for source in self.sources for matrix in source.matrices)


def _sparse_step(config: Config, layer: int) -> bool:
    """Qwen's rule: every ``decoder_sparse_step``-th layer, less those listed in ``mlp_only_layers``."""
    dense = config.get("mlp_only_layers") or []
    step = config.get("decoder_sparse_step", 1)
    return bool(layer not in dense and (layer + 1) % step == 0)


def _after_dense(config: Config, layer: int) -> bool:
    """DeepSeek's and GLM's rule: the first ``first_k_dense_replace`` layers are dense."""
    return bool(layer >= config["first_k_dense_replace"] and layer % config.get("moe_layer_freq", 1) == 0)


def _between(config: Config, layer: int) -> bool:
    """ERNIE's rule; an end of -1 is the last layer."""
    end = config["moe_layer_end_index"]
    inside = config["moe_layer_start_index"] <= layer and (end == -1 or layer <= end)
    return bool(inside and (layer + 1) % config["moe_layer_interval"] == 0)


def _interleaved(config: Config, layer: int) -> bool:
    return bool((layer + 1) % config["interleave_moe_layer_step"] == 0)


def _swiglu_limit(config: Config) -> str | None:
    limit = config.get("swiglu_limit", SWIGLU_OAI_LIMIT)
    return None if limit == SWIGLU_OAI_LIMIT else f"swiglu_limit {limit!r}: vLLM's kernel clamps at {SWIGLU_OAI_LIMIT}"


def _one_expert_only(config: Config) -> str | None:
    top_k = config.get("num_experts_per_tok")
    return None if top_k == 1 else f"{top_k} experts per token: router weights go on the input of only one"


_DEEPSEEK = Architecture(
    num_experts=("n_routed_experts",),
    intermediate_size="moe_intermediate_size",
    is_moe_layer=_after_dense,
    defaults={"first_k_dense_replace": 0},
)
_MIXTRAL = Architecture(
    num_experts=("num_local_experts",),
    intermediate_size="intermediate_size",
    experts_prefix="model.layers.{}.block_sparse_moe.experts",
    sources=per_expert("w1", "w3", "w2"),
)

ARCHITECTURES: Mapping[str, Architecture] = {
    # Newer transformers write num_local_experts for this one; older checkpoints hold num_experts.
    "Qwen3MoeForCausalLM": Architecture(
        num_experts=("num_experts", "num_local_experts"),
        intermediate_size="moe_intermediate_size",
        is_moe_layer=_sparse_step,
    ),
    "Qwen2MoeForCausalLM": Architecture(
        num_experts=("num_experts",),
        intermediate_size="moe_intermediate_size",
        is_moe_layer=_sparse_step,
    ),
    "DeepseekV2ForCausalLM": _DEEPSEEK,
    "DeepseekV3ForCausalLM": _DEEPSEEK,
    # The names of checkpoints converted for Ascend; as published the experts are FP4 and go by other names.
    "DeepseekV4ForCausalLM": Architecture(
        num_experts=("n_routed_experts",),
        intermediate_size="moe_intermediate_size",
        swiglu_limit="swiglu_limit",
    ),
    "OlmoeForCausalLM": Architecture(num_experts=("num_experts",), intermediate_size="intermediate_size"),
    "MixtralForCausalLM": _MIXTRAL,
    "PhiMoEForCausalLM": _MIXTRAL,
    "Glm4MoeForCausalLM": Architecture(
        num_experts=("n_routed_experts",),
        intermediate_size="moe_intermediate_size",
        is_moe_layer=_after_dense,
        defaults={"first_k_dense_replace": 1},
    ),
    "Ernie4_5_MoeForCausalLM": Architecture(
        num_experts=("moe_num_experts",),
        intermediate_size="moe_intermediate_size",
        top_k="moe_k",
        is_moe_layer=_between,
        defaults={"moe_layer_start_index": 0, "moe_layer_end_index": -1, "moe_layer_interval": 1},
    ),
    "GraniteMoeForCausalLM": Architecture(
        num_experts=("num_local_experts",),
        intermediate_size="intermediate_size",
        experts_prefix="model.layers.{}.block_sparse_moe",
        sources=stacked("input_linear.weight", "output_linear.weight"),
        tensor_prefixes=(".input_linear", ".output_linear"),
    ),
    "GptOssForCausalLM": Architecture(
        num_experts=("num_local_experts",),
        intermediate_size="intermediate_size",
        sources=stacked(transposed=True, interleaved=True, bias="_bias"),
        activation="swigluoai",
        refused=_swiglu_limit,
    ),
    "Llama4ForCausalLM": Architecture(
        num_experts=("num_local_experts",),
        intermediate_size="intermediate_size",
        experts_prefix="model.layers.{}.feed_forward.experts",
        sources=stacked(transposed=True),
        is_moe_layer=_interleaved,
        defaults={"interleave_moe_layer_step": 1},
        refused=_one_expert_only,
    ),
}

NOT_RUN: Mapping[str, str] = {
    "MiniMaxM2ForCausalLM": "the CPU router of vLLM 0.32 has no sigmoid scores without expert groups",
    "Llama4ForConditionalGeneration": "vLLM's class needs torchvision, which does not load beside torch for CPUs",
    **dict.fromkeys(("MiniMaxText01ForCausalLM", "MiniMaxM1ForCausalLM"), "vLLM dropped it in 0.23"),
}
"""Architectures whose experts F could read, but which the Attention side cannot run: refused, with the reason."""
