"""Scales of the layered operators, and what they add because the device multiplies int4 halves of int8 rows.

A row x is split as x = 16 * hi + lo + 8 with both halves in -8..7 (``split``). The constant 8 contributes
8 * sum over k of w[k, n] * s[n] to column n whatever the row is: the ``compensation`` that travels with the weights.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def encode(scale: torch.Tensor) -> torch.Tensor:
    """float32 [...] -> int64 [...]: the float's bits, zero-extended."""
    import torch

    return scale.contiguous().view(torch.int32).to(torch.int64) & 0xFFFFFFFF


def decode(encoded: torch.Tensor) -> torch.Tensor:
    """The inverse of ``encode``; bits above the low 32 are ignored, as the operators do."""
    import torch

    low = encoded & 0xFFFFFFFF
    return torch.where(low >= 1 << 31, low - (1 << 32), low).to(torch.int32).view(torch.float32)


def compensation(weights: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """weights int8 [..., k, n] (unpacked int4), scale float32 [..., n] -> float32 [..., n]; rounded once."""
    import torch

    sums = weights.sum(-2, dtype=torch.int64)
    return (8 * sums.to(torch.float64) * scale.to(torch.float64)).to(torch.float32)


def split(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """int8 [...] -> (hi, lo), int8 in -8..7 each, with rows = 16 * hi + lo + 8."""
    return rows >> 4, (rows & 15) - 8
