"""Small quantized checkpoints for the tests of CAM, and their experts as the oracle takes them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from ffn_faas.demo.quantized import convert
from ffn_faas.experts.spec import MoESpec
from tests.cam import oracle

DENSE = (0, 3)
"""Layers without experts, so that the numbers of the others have gaps."""


@dataclass(frozen=True)
class TinyModel:
    """A model of ``layers`` layers, of which those of DENSE have no experts."""

    hidden: int = 64
    inter: int = 32
    experts: int = 6
    top_k: int = 3
    layers: int = 6
    dtype: str = "bfloat16"

    def config(self) -> dict:
        return {
            "architectures": ["Qwen3MoeForCausalLM"],
            "model_type": "qwen3_moe",
            "hidden_size": self.hidden,
            "moe_intermediate_size": self.inter,
            "num_experts": self.experts,
            "num_experts_per_tok": self.top_k,
            "num_hidden_layers": self.layers,
            "mlp_only_layers": list(DENSE),
            "hidden_act": "silu",
            "dtype": self.dtype,
        }

    @property
    def numbers(self) -> list[int]:
        return [layer for layer in range(self.layers) if layer not in DENSE]

    def write(self, directory: Path, kind: str) -> Path:
        """``kind``: W4A8_DYNAMIC or W8A8_DYNAMIC. Returns the quantized checkpoint's directory."""
        plain, target = directory / "plain", directory / kind
        plain.mkdir(parents=True, exist_ok=True)
        (plain / "config.json").write_text(json.dumps(self.config()))
        generator = torch.Generator().manual_seed(0)
        tensors = {"model.embed_tokens.weight": torch.randn(8, self.hidden, generator=generator)}
        for layer in self.numbers:
            for expert in range(self.experts):
                for name, out, fan_in in (
                    ("gate_proj", self.inter, self.hidden),
                    ("up_proj", self.inter, self.hidden),
                    ("down_proj", self.hidden, self.inter),
                ):
                    weight = torch.randn(out, fan_in, generator=generator) / fan_in**0.5
                    tensors[f"model.layers.{layer}.mlp.experts.{expert}.{name}.weight"] = weight
        save_file(tensors, plain / "model.safetensors")
        convert(plain, target, kind)
        return target


class Reference:
    """Experts straight from the files, unpacked by code of its own."""

    def __init__(self, directory: Path) -> None:
        self._spec = MoESpec.from_model_dir(directory)
        self._tensors = {}
        for path in directory.glob("*.safetensors"):
            self._tensors |= load_file(path)

    @cache  # noqa: B019 - lives as long as the test
    def _expert(self, layer: int, expert: int):
        prefix = f"model.layers.{layer}.mlp.experts.{expert}"

        def matrix(name):
            stored = self._tensors[f"{prefix}.{name}.weight"].numpy()
            scale = self._tensors[f"{prefix}.{name}.weight_scale"].float().numpy()[:, 0]
            if self._spec.quantization == "w4a8":
                low, high = (stored.astype(np.int16) & 15), ((stored.astype(np.int16) >> 4) & 15)
                pairs = np.stack([low, high], axis=1).reshape(-1, stored.shape[1])
                stored = np.where(pairs > 7, pairs - 16, pairs).astype(np.int8)
            return stored.T, scale

        (gate, gate_scale), (up, up_scale), (down, down_scale) = map(matrix, ("gate_proj", "up_proj", "down_proj"))
        wide, wide_scale = np.concatenate([gate, up], axis=1), np.concatenate([gate_scale, up_scale])
        if self._spec.quantization == "w4a8":
            return oracle.Int4Expert(wide, wide_scale, down, down_scale)
        if self._spec.dtype == "bfloat16":
            down_scale = oracle.rounded(down_scale, torch.bfloat16)
        return oracle.Int8Expert(wide, wide_scale, down, down_scale)

    def __call__(self, layer: int, expert: int, rows):
        return self._expert(layer, expert)(rows)

    def layer(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, layer: int) -> torch.Tensor:
        """What one A rank must get back where rows travel quantized; ``layer`` is the model's number."""
        return oracle.attention_output(x, ids, weights, layer, self, quant=True)
