"""How rows become int8, one scale a row, in the two forms that the operators use; they are not the same function.

Dispatch multiplies by 127 / amax and stores the inverse of that factor. The first grouped matmul stores amax / 127
and multiplies by its inverse, through float16. Of random rows about every fourth has another scale, and every second
some other integer, off by one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def dispatch(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """float [T, H] -> (int8 [T, H], scale float32 [T]), as dispatch send does. A row of zeros is undefined there."""
    import torch

    values = rows.float()
    largest = values.abs().amax(-1)
    factor = torch.full_like(largest, 127.0) / largest  # 127.0 / tensor would be a product with the reciprocal
    return (values * factor.unsqueeze(-1)).round().to(torch.int8), 1.0 / factor


def activation(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """float32 [T, I] -> (int8 [T, I], scale float32 [T]), as the first grouped matmul does; zeros have scale 0."""
    import torch

    scale = values.abs().amax(-1) / 127.0
    inverse = torch.where(scale > 0, 1.0 / scale, torch.zeros_like(scale))
    halves = (values * inverse.unsqueeze(-1)).to(torch.float16)
    return halves.float().round().clamp(-128, 127).to(torch.int8), scale


def swiglu(values: torch.Tensor, limit: float | None = None) -> torch.Tensor:
    """float32 [T, 2 I], gate first -> silu(gate) * up, float32 [T, I].

    ``limit`` clamps the gate from above and up on both sides first. The published layered operator has none.
    """
    import torch

    gate, up = values.chunk(2, dim=-1)
    if limit is not None:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    wide = gate.double()
    return (wide / (1.0 + torch.exp(-wide))).float() * up
