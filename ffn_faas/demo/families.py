"""Every architecture that the demo can make beside Qwen3-MoE: a configuration and a decoder layer each."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ffn_faas.demo import blocks
from ffn_faas.demo.blocks import AnySpec
from ffn_faas.demo.qwen3_moe import HEAD, HEAD_DIM, HEAD_GAIN, HEADS, KV_HEADS, TensorSpec
from ffn_faas.demo.shapes import Shape

Part = Callable[[str, Shape], Iterator[AnySpec]]
"""(prefix of a layer, shape) to tensors."""
MIXTRAL_NAMES = ("w1", "w3", "w2")
ROUTED_SCALE = 1.5


@dataclass(frozen=True)
class Family:
    """``settings`` are the fields of config.json that are its own; ``feed_forward`` is for a layer with experts."""

    architecture: str
    model_type: str
    settings: Callable[[Shape], dict[str, Any]]
    attention: Part
    feed_forward: Part
    dense: Part | None = None
    """Feed-forward part of layer 0 where the first layer has no experts."""
    norm_bias: bool = False
    head_bias: bool = False

    def config(self, shape: Shape, vocabulary: int, end_of_text: int) -> dict[str, Any]:
        return {
            "architectures": [self.architecture],
            "model_type": self.model_type,
            "attention_bias": False,
            "attention_dropout": 0.0,
            "bos_token_id": end_of_text,
            "eos_token_id": end_of_text,
            "hidden_act": "silu",
            "hidden_size": shape.hidden,
            "initializer_range": 0.02,
            "max_position_embeddings": 4096,
            "num_attention_heads": HEADS,
            "num_experts_per_tok": shape.top_k,
            "num_hidden_layers": shape.layers,
            "num_key_value_heads": KV_HEADS,
            "rms_norm_eps": 1e-06,
            "rope_theta": 10000.0,
            "tie_word_embeddings": False,
            "torch_dtype": "bfloat16",
            "use_cache": True,
            "vocab_size": vocabulary,
            **self.settings(shape),
        }

    def tensors(self, shape: Shape, vocabulary: int) -> Iterator[AnySpec]:
        """Every tensor in checkpoint order."""
        hidden = shape.hidden
        yield TensorSpec("model.embed_tokens.weight", (vocabulary, hidden), 1.0)
        for layer in range(shape.layers):
            prefix = f"model.layers.{layer}"
            yield from blocks.norm(f"{prefix}.input_layernorm", hidden, self.norm_bias)
            yield from self.attention(f"{prefix}.self_attn", shape)
            yield from blocks.norm(f"{prefix}.post_attention_layernorm", hidden, self.norm_bias)
            yield from (self.dense if self.dense and layer == 0 else self.feed_forward)(prefix, shape)
        yield from blocks.norm("model.norm", hidden, self.norm_bias)
        yield TensorSpec(HEAD, (vocabulary, hidden), HEAD_GAIN * hidden**-0.5, "head")
        if self.head_bias:
            yield TensorSpec("lm_head.bias", (vocabulary,), blocks.BIAS_STD)


def _dense(prefix: str, shape: Shape) -> Iterator[AnySpec]:
    yield from blocks.dense(f"{prefix}.mlp", shape.hidden, _wide(shape))


def _wide(shape: Shape) -> int:
    return shape.intermediate * shape.top_k


def _qwen2_moe(prefix: str, shape: Shape) -> Iterator[AnySpec]:
    yield from blocks.router(f"{prefix}.mlp.gate", shape)
    yield from blocks.experts(f"{prefix}.mlp.experts", shape)
    yield from blocks.dense(f"{prefix}.mlp.shared_expert", shape.hidden, shape.intermediate)
    yield from blocks.linear(f"{prefix}.mlp.shared_expert_gate", 1, shape.hidden)


def _plain(prefix: str, shape: Shape) -> Iterator[AnySpec]:
    yield from blocks.router(f"{prefix}.mlp.gate", shape)
    yield from blocks.experts(f"{prefix}.mlp.experts", shape)


def _with_shared(prefix: str, shape: Shape) -> Iterator[AnySpec]:
    yield from _plain(prefix, shape)
    yield from blocks.dense(f"{prefix}.mlp.shared_experts", shape.hidden, shape.intermediate)


def _with_correction(prefix: str, shape: Shape) -> Iterator[AnySpec]:
    yield blocks.correction_bias(f"{prefix}.mlp.gate.e_score_correction_bias", shape)
    yield from _with_shared(prefix, shape)


def _ernie(prefix: str, shape: Shape) -> Iterator[AnySpec]:
    yield blocks.correction_bias(f"{prefix}.mlp.moe_statics.e_score_correction_bias", shape, lead=(1,))
    yield from _with_shared(prefix, shape)


def _block_sparse(prefix: str, shape: Shape) -> Iterator[AnySpec]:
    yield from blocks.router(f"{prefix}.block_sparse_moe.gate", shape)
    yield from blocks.experts(f"{prefix}.block_sparse_moe.experts", shape, MIXTRAL_NAMES)


def _granite(prefix: str, shape: Shape) -> Iterator[AnySpec]:
    path = f"{prefix}.block_sparse_moe"
    yield from blocks.router(f"{path}.router.layer", shape)
    yield from blocks.stacked_experts(f"{path}.input_linear.weight", f"{path}.output_linear.weight", shape)


def _gpt_oss(prefix: str, shape: Shape) -> Iterator[AnySpec]:
    path = f"{prefix}.mlp.experts"
    yield from blocks.router(f"{prefix}.mlp.router", shape, bias=True)
    names = f"{path}.gate_up_proj", f"{path}.down_proj"
    yield from blocks.stacked_experts(*names, shape, transposed=True, interleaved=True)
    yield from blocks.expert_biases(path, shape)


def _gpt_oss_attention(prefix: str, shape: Shape) -> Iterator[AnySpec]:
    yield from blocks.attention(prefix, shape.hidden, qkv_bias=True, o_bias=True)
    yield TensorSpec(f"{prefix}.sinks", (HEADS,))


def _llama4(prefix: str, shape: Shape) -> Iterator[AnySpec]:
    path = f"{prefix}.feed_forward"
    yield from blocks.router(f"{path}.router", shape)
    names = f"{path}.experts.gate_up_proj", f"{path}.experts.down_proj"
    yield from blocks.stacked_experts(*names, shape, transposed=True)
    yield from blocks.dense(f"{path}.shared_expert", shape.hidden, shape.intermediate)


def _llama4_dense(prefix: str, shape: Shape) -> Iterator[AnySpec]:
    yield from blocks.dense(f"{prefix}.feed_forward", shape.hidden, _wide(shape))


def _attention(**variant: Any) -> Part:
    return lambda prefix, shape: blocks.attention(prefix, shape.hidden, **variant)


def _latent(q_lora: bool) -> Part:
    return lambda prefix, shape: blocks.latent_attention(prefix, shape.hidden, q_lora)


def _deepseek(shape: Shape, **own: Any) -> dict[str, Any]:
    return {
        "first_k_dense_replace": 1,
        "intermediate_size": _wide(shape),
        "kv_lora_rank": blocks.KV_LORA,
        "moe_intermediate_size": shape.intermediate,
        "moe_layer_freq": 1,
        "n_group": 4,
        "n_routed_experts": shape.experts,
        "n_shared_experts": 1,
        "num_key_value_heads": HEADS,
        "num_nextn_predict_layers": 0,
        "q_lora_rank": None,
        "qk_nope_head_dim": blocks.NOPE_DIM,
        "qk_rope_head_dim": blocks.ROPE_DIM,
        "routed_scaling_factor": ROUTED_SCALE,
        "topk_group": 2,
        "v_head_dim": blocks.VALUE_DIM,
        **own,
    }


def _by_intermediate(shape: Shape, experts: str, **own: Any) -> dict[str, Any]:
    """Experts as wide as ``intermediate_size`` says."""
    return {"intermediate_size": shape.intermediate, experts: shape.experts, "head_dim": HEAD_DIM, **own}


FAMILIES: Mapping[str, Family] = {
    "qwen2_moe": Family(
        "Qwen2MoeForCausalLM",
        "qwen2_moe",
        lambda shape: {
            "decoder_sparse_step": 1,
            "intermediate_size": _wide(shape),
            "mlp_only_layers": [],
            "moe_intermediate_size": shape.intermediate,
            "norm_topk_prob": False,
            "num_experts": shape.experts,
            "shared_expert_intermediate_size": shape.intermediate,
            "use_sliding_window": False,
        },
        _attention(qkv_bias=True),
        _qwen2_moe,
    ),
    "deepseek_v2": Family(
        "DeepseekV2ForCausalLM",
        "deepseek_v2",
        lambda shape: _deepseek(
            shape, topk_method="group_limited_greedy", scoring_func="softmax", norm_topk_prob=False
        ),
        _latent(q_lora=False),
        _with_shared,
        dense=_dense,
    ),
    "deepseek_v3": Family(
        "DeepseekV3ForCausalLM",
        "deepseek_v3",
        lambda shape: _deepseek(
            shape, topk_method="noaux_tc", scoring_func="sigmoid", norm_topk_prob=True, q_lora_rank=blocks.Q_LORA
        ),
        _latent(q_lora=True),
        _with_correction,
        dense=_dense,
    ),
    "mixtral": Family(
        "MixtralForCausalLM",
        "mixtral",
        lambda shape: _by_intermediate(shape, "num_local_experts", sliding_window=None),
        _attention(),
        _block_sparse,
    ),
    "olmoe": Family(
        "OlmoeForCausalLM",
        "olmoe",
        lambda shape: _by_intermediate(shape, "num_experts", norm_topk_prob=False, clip_qkv=None),
        _attention(qk_norm="full"),
        _plain,
    ),
    "phimoe": Family(
        "PhiMoEForCausalLM",
        "phimoe",
        lambda shape: _by_intermediate(
            shape, "num_local_experts", attention_bias=True, lm_head_bias=True, sliding_window=None
        ),
        _attention(qkv_bias=True, o_bias=True),
        _block_sparse,
        norm_bias=True,
        head_bias=True,
    ),
    "glm4_moe": Family(
        "Glm4MoeForCausalLM",
        "glm4_moe",
        lambda shape: {
            "first_k_dense_replace": 1,
            "head_dim": HEAD_DIM,
            "intermediate_size": _wide(shape),
            "moe_intermediate_size": shape.intermediate,
            "n_group": 1,
            "n_routed_experts": shape.experts,
            "n_shared_experts": 1,
            "norm_topk_prob": True,
            "num_nextn_predict_layers": 0,
            "partial_rotary_factor": 0.5,
            "routed_scaling_factor": ROUTED_SCALE,
            "topk_group": 1,
            "use_qk_norm": True,
        },
        _attention(qk_norm="head"),
        _with_correction,
        dense=_dense,
    ),
    "ernie4_5_moe": Family(
        "Ernie4_5_MoeForCausalLM",
        "ernie4_5_moe",
        lambda shape: {
            "head_dim": HEAD_DIM,
            "intermediate_size": _wide(shape),
            "moe_intermediate_size": shape.intermediate,
            "moe_k": shape.top_k,
            "moe_layer_end_index": shape.layers - 1,
            "moe_layer_interval": 1,
            "moe_layer_start_index": 1,
            "moe_num_experts": shape.experts,
            "moe_num_shared_experts": 1,
            "use_bias": False,
        },
        _attention(),
        _ernie,
        dense=_dense,
    ),
    "granitemoe": Family(
        "GraniteMoeForCausalLM",
        "granitemoe",
        lambda shape: _by_intermediate(
            shape,
            "num_local_experts",
            attention_multiplier=HEAD_DIM**-0.5,
            embedding_multiplier=1.0,
            logits_scaling=1.0,
            residual_multiplier=1.0,
        ),
        _attention(),
        _granite,
    ),
    "gpt_oss": Family(
        "GptOssForCausalLM",
        "gpt_oss",
        lambda shape: _by_intermediate(
            shape,
            "num_local_experts",
            attention_bias=True,
            layer_types=["sliding_attention", "full_attention"] * (shape.layers // 2)
            + ["sliding_attention"] * (shape.layers % 2),
            rope_scaling={
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "factor": 32.0,
                "original_max_position_embeddings": 4096,
                "rope_type": "yarn",
                "truncate": False,
            },
            sliding_window=128,
            swiglu_limit=7.0,
        ),
        _gpt_oss_attention,
        _gpt_oss,
    ),
    "llama4": Family(
        "Llama4ForCausalLM",
        "llama4_text",
        lambda shape: _by_intermediate(
            shape,
            "num_local_experts",
            attention_chunk_size=2048,
            attn_temperature_tuning=False,
            interleave_moe_layer_step=1,
            intermediate_size_mlp=_wide(shape),
            moe_layers=list(range(shape.layers)),
            num_experts_per_tok=1,
            use_qk_norm=True,
        ),
        _attention(),
        _llama4,
    ),
}
