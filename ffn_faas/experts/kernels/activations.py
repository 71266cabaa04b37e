"""Gated activations as vLLM's CPU kernel computes them, in float32. The gate's half and the up half come apart."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ffn_faas.experts.architectures import SWIGLU_OAI_LIMIT

if TYPE_CHECKING:
    import torch

SWIGLU_OAI_ALPHA = 1.702


def activate(name: str, gate: torch.Tensor, up: torch.Tensor, limit: float | None = None) -> torch.Tensor:
    """[n, I] and [n, I] to [n, I]; ``name``, ``limit`` as in ``MoESpec``. ``gate`` and ``up`` may be written."""
    import torch

    if name == "silu":
        if limit is not None:
            gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
        return torch.nn.functional.silu(gate).mul_(up)
    gate, up = gate.clamp(max=SWIGLU_OAI_LIMIT), up.clamp(-SWIGLU_OAI_LIMIT, SWIGLU_OAI_LIMIT)
    return gate.mul_(torch.sigmoid(gate * SWIGLU_OAI_ALPHA)).mul_(up.add_(1.0))
