"""Qwen3-MoE as the demo makes it: configuration and tensors, with a scale for each.

Random weights make a poor subject unless they are shaped with care: answers must hang on the experts, not circle, and
the best token must stand clear of the second, or rounding would choose. So each neuron of an expert remembers one
token: its column of down_proj is that token's direction in the output head, with a log-normal strength. Few neurons
then decide, experts write more strongly than attention, and without them nearly every answer changes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from ffn_faas.demo.shapes import Shape

HEAD = "lm_head.weight"
HEADS, KV_HEADS, HEAD_DIM = 4, 2, 64
ATTENTION_GAIN = 0.5
EXPERT_GAIN = 0.7
ROUTER_GAIN = 2.0
HEAD_GAIN = 4.0


@dataclass(frozen=True)
class TensorSpec:
    """One tensor of the checkpoint; demo.weights draws it.

    ``kind``: ``ones``; ``normal`` with ``std``; ``head``, normal rows per token of the vocabulary; ``memory``,
    columns of root mean square ``std`` along rows of the head.
    """

    name: str
    shape: tuple[int, ...]
    std: float = 1.0
    kind: Literal["ones", "normal", "head", "memory"] = "normal"

    @property
    def nbytes(self) -> int:
        return 2 * math.prod(self.shape)


def config(shape: Shape, vocabulary: int, end_of_text: int) -> dict[str, Any]:
    """config.json of a ``Qwen3MoeForCausalLM``."""
    return {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": end_of_text,
        "decoder_sparse_step": 1,
        "eos_token_id": end_of_text,
        "head_dim": HEAD_DIM,
        "hidden_act": "silu",
        "hidden_size": shape.hidden,
        "initializer_range": 0.02,
        "intermediate_size": shape.intermediate * shape.top_k,
        "max_position_embeddings": 4096,
        "mlp_only_layers": [],
        "moe_intermediate_size": shape.intermediate,
        "norm_topk_prob": True,
        "num_attention_heads": HEADS,
        "num_experts": shape.experts,
        "num_experts_per_tok": shape.top_k,
        "num_hidden_layers": shape.layers,
        "num_key_value_heads": KV_HEADS,
        "rms_norm_eps": 1e-06,
        "rope_theta": 10000.0,
        "router_aux_loss_coef": 0.001,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "use_sliding_window": False,
        "vocab_size": vocabulary,
    }


def tensors(shape: Shape, vocabulary: int) -> Iterator[TensorSpec]:
    """Every tensor in checkpoint order. Inputs of each matrix are about unit normal, hence the 1/sqrt(fan-in)."""
    hidden, inter = shape.hidden, shape.intermediate
    fan_in, queries, keys = hidden**-0.5, HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
    yield TensorSpec("model.embed_tokens.weight", (vocabulary, hidden), 1.0)
    for layer in range(shape.layers):
        prefix = f"model.layers.{layer}"
        yield TensorSpec(f"{prefix}.input_layernorm.weight", (hidden,), kind="ones")
        yield TensorSpec(f"{prefix}.self_attn.q_proj.weight", (queries, hidden), fan_in)
        yield TensorSpec(f"{prefix}.self_attn.k_proj.weight", (keys, hidden), fan_in)
        yield TensorSpec(f"{prefix}.self_attn.v_proj.weight", (keys, hidden), fan_in)
        yield TensorSpec(f"{prefix}.self_attn.o_proj.weight", (hidden, queries), ATTENTION_GAIN * queries**-0.5)
        yield TensorSpec(f"{prefix}.self_attn.q_norm.weight", (HEAD_DIM,), kind="ones")
        yield TensorSpec(f"{prefix}.self_attn.k_norm.weight", (HEAD_DIM,), kind="ones")
        yield TensorSpec(f"{prefix}.post_attention_layernorm.weight", (hidden,), kind="ones")
        yield TensorSpec(f"{prefix}.mlp.gate.weight", (shape.experts, hidden), ROUTER_GAIN * fan_in)
        for expert in range(shape.experts):
            path = f"{prefix}.mlp.experts.{expert}"
            down = EXPERT_GAIN * inter**-0.5
            yield TensorSpec(f"{path}.gate_proj.weight", (inter, hidden), fan_in)
            yield TensorSpec(f"{path}.up_proj.weight", (inter, hidden), fan_in)
            yield TensorSpec(f"{path}.down_proj.weight", (hidden, inter), down, "memory")
    yield TensorSpec("model.norm.weight", (hidden,), kind="ones")
    yield TensorSpec(HEAD, (vocabulary, hidden), HEAD_GAIN * fan_in, "head")
