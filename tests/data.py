"""Inputs for tests: tiny checkpoints whose tensors are known, and random routing."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file


@dataclass(frozen=True)
class TinyModel:
    """A Qwen3-MoE too small to speak. ``config()`` takes changes, ``tensors()`` depends on ``seed`` only."""

    hidden: int = 64
    inter: int = 32
    experts: int = 8
    top_k: int = 2
    layers: int = 2
    dtype: str = "bfloat16"
    seed: int = 0
    extra: dict[str, Any] = field(default_factory=dict)

    def config(self, **changes: Any) -> dict[str, Any]:
        return {
            "architectures": ["Qwen3MoeForCausalLM"],
            "model_type": "qwen3_moe",
            "hidden_size": self.hidden,
            "moe_intermediate_size": self.inter,
            "intermediate_size": 2 * self.inter,
            "num_experts": self.experts,
            "num_experts_per_tok": self.top_k,
            "num_hidden_layers": self.layers,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "head_dim": 32,
            "vocab_size": 96,
            "max_position_embeddings": 128,
            "hidden_act": "silu",
            "norm_topk_prob": True,
            "torch_dtype": self.dtype,
            **self.extra,
            **changes,
        }

    def tensors(self) -> dict[str, torch.Tensor]:
        """Every tensor that stock vLLM wants, in checkpoint order."""
        hidden, inter, dtype = self.hidden, self.inter, getattr(torch, self.dtype)
        generator = torch.Generator().manual_seed(self.seed)

        def draw(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator).mul_(shape[-1] ** -0.5).to(dtype)

        tensors = {"model.embed_tokens.weight": draw(96, hidden)}
        for layer in range(self.layers):
            prefix = f"model.layers.{layer}"
            for name, shape in (
                ("input_layernorm", (hidden,)),
                ("post_attention_layernorm", (hidden,)),
                ("self_attn.q_proj", (64, hidden)),
                ("self_attn.k_proj", (32, hidden)),
                ("self_attn.v_proj", (32, hidden)),
                ("self_attn.o_proj", (hidden, 64)),
                ("self_attn.q_norm", (32,)),
                ("self_attn.k_norm", (32,)),
            ):
                tensors[f"{prefix}.{name}.weight"] = draw(*shape)
            dense = layer in self.extra.get("mlp_only_layers", [])
            width = 2 * inter if dense else inter
            matrices = (("gate", (width, hidden)), ("up", (width, hidden)), ("down", (hidden, width)))
            if not dense:
                tensors[f"{prefix}.mlp.gate.weight"] = draw(self.experts, hidden)
            for path in ["mlp"] if dense else [f"mlp.experts.{expert}" for expert in range(self.experts)]:
                for name, shape in matrices:
                    tensors[f"{prefix}.{path}.{name}_proj.weight"] = draw(*shape)
        tensors["model.norm.weight"] = draw(hidden)
        tensors["lm_head.weight"] = draw(96, hidden)
        return tensors

    def write(self, directory: Path, shards: int = 1, **changes: Any) -> Path:
        """config.json and ``shards`` safetensors files (with an index when there are several)."""
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "config.json").write_text(json.dumps(self.config(**changes)))
        write_tensors(directory, self.tensors(), shards)
        return directory

    def expert_weights(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """w13 [E, 2I, H], gate rows first, and w2 [E, H, I] of a layer."""
        tensors = self.tensors()
        w13, w2 = [], []
        for expert in range(self.experts):
            prefix = f"model.layers.{layer}.mlp.experts.{expert}"
            w13.append(torch.cat([tensors[f"{prefix}.gate_proj.weight"], tensors[f"{prefix}.up_proj.weight"]]))
            w2.append(tensors[f"{prefix}.down_proj.weight"])
        return torch.stack(w13), torch.stack(w2)


def write_tensors(directory: Path, tensors: dict[str, torch.Tensor], shards: int = 1) -> None:
    """Deal the tensors out over ``shards`` files in turn, so that every layer is spread over all of them."""
    if shards == 1:
        save_file(tensors, directory / "model.safetensors")
        return
    weight_map = {}
    for shard in range(shards):
        name = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        part = dict(list(tensors.items())[shard::shards])
        save_file(part, directory / name)
        weight_map.update(dict.fromkeys(part, name))
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def routing(tokens: int, experts: int, top_k: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """ids [T, K] i32, distinct in a row, and weights [T, K] f32 that sum to one, as a softmax router makes them."""
    generator = torch.Generator().manual_seed(seed)
    weights, ids = torch.randn(tokens, experts, generator=generator).softmax(-1).topk(top_k)
    return ids.int(), (weights / weights.sum(-1, keepdim=True)).contiguous()
