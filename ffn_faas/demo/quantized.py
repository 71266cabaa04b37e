"""Turns float experts into the W4A8 or W8A8 ones of a converted checkpoint, by msModelSlim's names and shapes."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from ffn_faas.ascend.numerics import int4, scales
from ffn_faas.experts.quantized import DESCRIPTION, UNQUANTIZED
from ffn_faas.experts.safetensors_header import read_header

if TYPE_CHECKING:
    import torch

BIAS_PARTS = 16
"""scale_bias of the second matrix comes in so many parts, which are summed when it is loaded."""


def quantized(name: str, weight: torch.Tensor, kind: str) -> dict[str, torch.Tensor]:
    """Tensors of one matrix [out, in], ``kind`` W4A8_DYNAMIC or W8A8_DYNAMIC, by name; ``name`` ends with .weight."""
    import torch

    most = 7 if kind == "W4A8_DYNAMIC" else 127
    values = weight.float()
    scale = (values.abs().amax(-1, keepdim=True) / most).clamp_min(1e-8)
    q = (values / scale).round().clamp(-most - 1, most).to(torch.int8)
    tensors = {name: q, f"{name}_scale": scale, f"{name}_offset": torch.zeros_like(scale)}
    if kind == "W4A8_DYNAMIC":
        bias = scales.compensation(q.t(), scale.squeeze(-1)).unsqueeze(-1)
        if ".down_proj." in name:
            # Halves in two of the parts: their sum is exact in any order.
            parts = torch.zeros(BIAS_PARTS)
            parts[[0, -1]] = 0.5
            bias = bias * parts
        tensors[name] = int4.to_pairs(q)
        tensors[f"{name.removesuffix('weight')}scale_bias"] = bias.contiguous()
    return tensors


def convert(source: Path, target: Path, kind: str) -> None:
    """Write ``source`` with its routed experts quantized to ``target``, which must not exist; the rest is copied."""
    from safetensors.torch import load_file, save_file

    shutil.copytree(source, target, ignore=shutil.ignore_patterns("*.safetensors", "*.index.json"))
    description = {"model_quant_type": kind, "version": "1.0.0", "group_size": 0}
    weight_map = {}
    for path in sorted(source.glob("*.safetensors")):
        converted: dict[str, torch.Tensor] = {}
        for name, tensor in load_file(path).items():
            is_expert = ".experts." in name and name.endswith(".weight")
            made = quantized(name, tensor, kind) if is_expert else {name: tensor}
            converted |= made
            description |= dict.fromkeys(made, kind if is_expert else UNQUANTIZED)
        save_file(converted, target / path.name, {"format": "pt"})
        weight_map.update(dict.fromkeys(converted, path.name))
    if len(set(weight_map.values())) > 1:
        total = sum(entry.nbytes for path in target.glob("*.safetensors") for entry in read_header(path))
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (target / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
    (target / DESCRIPTION).write_text(json.dumps(description, indent=2) + "\n")
