"""What an Attention rank must get back over the Async CAM operators, bit for bit, from their definition alone.

Nothing here has seen a dispatch receive: no batch_info, no counts, no order of rows. Every (token, place) is computed
on its own from the rank's inputs, so any loss, swap or leak on the way shows. numpy does the arithmetic, in float32 in
the order that the contract states; torch serves only to round to bfloat16.

An expert is a function (layer, global expert, rows) -> rows. Rows are float32 [n, H] that the row type can hold, or
``Quantized`` where dispatch quantizes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch


@dataclass(frozen=True)
class Quantized:
    q: np.ndarray  # int8 [n, H]
    scale: np.ndarray  # float32 [n]


Expert = Callable[[int, int, "np.ndarray | Quantized"], np.ndarray]


def attention_output(
    x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, layer: int, expert: Expert, *, quant: bool
) -> torch.Tensor:
    """x [B, H], ids [B, K], weights f32 [B, K] of one rank -> [B, H] of x's type.

    The sum over k runs in order in float32, rounded once at the end; what an expert gives is rounded to x's type.
    """
    rows, places = x.float().numpy(), weights.numpy()
    sums = np.zeros(rows.shape, np.float32)
    for token in range(x.shape[0]):
        row = rows[token : token + 1]
        payload = quantized(row) if quant else row
        for place, chosen in enumerate(ids[token].tolist()):
            result = rounded(expert(layer, chosen, payload), x.dtype)
            sums[token] += places[token, place] * result[0]
    return torch.from_numpy(sums).to(x.dtype)


def rounded(values: np.ndarray, dtype: torch.dtype) -> np.ndarray:
    """float32 values as ``dtype`` holds them, as float32."""
    return torch.from_numpy(np.ascontiguousarray(values, np.float32)).to(dtype).float().numpy()


def quantized(rows: np.ndarray) -> Quantized:
    """The quantization of dispatch: mul = 127 / amax, q = rint(x * mul), scale = 1 / mul."""
    factor = np.float32(127) / np.abs(rows).max(axis=1)
    return Quantized(np.rint(rows * factor[:, None]).astype(np.int8), np.float32(1) / factor)


def identity_like(layer: int, expert: int, rows: np.ndarray | Quantized) -> np.ndarray:
    """Each (layer, expert) multiplies by a power of two of its own sign and size, so that no two are alike."""
    factor = np.float32((-1) ** expert * 2.0 ** (expert % 5 - layer % 3))
    if isinstance(rows, Quantized):
        return rows.q.astype(np.float32) * rows.scale[:, None] * factor
    return rows * factor


@dataclass(frozen=True)
class QuantizedExpert(ABC):
    """Integers and one scale a column."""

    w13: np.ndarray  # int8 [H, 2 I]
    scale13: np.ndarray  # float32 [2 I]
    w2: np.ndarray  # int8 [I, H]
    scale2: np.ndarray  # float32 [H]

    def __call__(self, rows: Quantized, limit: float | None = None) -> np.ndarray:
        middle = requantized(swiglu(self._product(rows, self.w13, self.scale13), limit))
        return self._product(middle, self.w2, self.scale2)

    @staticmethod
    @abstractmethod
    def _product(rows: Quantized, weights: np.ndarray, scale: np.ndarray) -> np.ndarray:
        """float32 [n, columns of weights]."""


class Int4Expert(QuantizedExpert):
    """One W4A8 expert: integers -8..7."""

    @staticmethod
    def _product(rows: Quantized, weights: np.ndarray, scale: np.ndarray) -> np.ndarray:
        """x = 16 hi + lo + 8; each half's product is rounded to float16, the 8 comes back as a constant a column."""
        x = rows.q.astype(np.int64)
        high = x // 16
        low = x - 16 * high - 8
        wide = weights.astype(np.int64)
        constant = (8.0 * wide.sum(0).astype(np.float64) * scale.astype(np.float64)).astype(np.float32)
        halves = [
            ((half @ wide).astype(np.float32) * scale).astype(np.float16).astype(np.float32) for half in (high, low)
        ]
        return (np.float32(16) * halves[0] + halves[1] + constant) * rows.scale[:, None]


class Int8Expert(QuantizedExpert):
    """One W8A8 expert. ``scale2`` is a bfloat16 number held in float32."""

    @staticmethod
    def _product(rows: Quantized, weights: np.ndarray, scale: np.ndarray) -> np.ndarray:
        sums = (rows.q.astype(np.int64) @ weights.astype(np.int64)).astype(np.float32)
        return sums * scale * rows.scale[:, None]


def swiglu(values: np.ndarray, limit: float | None = None) -> np.ndarray:
    """float32 [n, 2 I], gate first; silu in float64, rounded, times up in float32."""
    gate, up = np.split(values, 2, axis=1)
    if limit is not None:
        gate, up = np.minimum(gate, np.float32(limit)), np.clip(up, np.float32(-limit), np.float32(limit))
    wide = gate.astype(np.float64)
    return (wide / (1.0 + np.exp(-wide))).astype(np.float32) * up


def requantized(values: np.ndarray) -> Quantized:
    """Between the two products: scale = amax / 127, q = value * (1 / scale), to float16 and then to the integer."""
    scale = np.abs(values).max(axis=1) / np.float32(127)
    halves = (values * (np.float32(1) / scale)[:, None]).astype(np.float16)
    return Quantized(np.rint(halves.astype(np.float32)).astype(np.int8), scale)
