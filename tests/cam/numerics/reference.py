"""W4A8 and W8A8 experts in float64: ``ideal`` rounds nothing, ``msd`` rounds both int4 halves to float16.

Shares nothing with the oracle but numpy: products are taken of dequantized weights, not of integers.
"""

from __future__ import annotations

import numpy as np


def product(q: np.ndarray, x_scale: np.ndarray, w: np.ndarray, scale: np.ndarray, mode: str) -> np.ndarray:
    """q int8 [n, k] with x_scale [n], w integers [k, m] with scale [m] -> float64 [n, m]."""
    real = w.astype(np.float64) * scale.astype(np.float64)
    if mode == "ideal":
        return (q.astype(np.float64) @ real) * x_scale.astype(np.float64)[:, None]
    high = np.floor(q.astype(np.float64) / 16)
    low = q - 16 * high - 8
    halves = [(half @ real).astype(np.float16).astype(np.float64) for half in (high, low)]
    return (16 * halves[0] + halves[1] + 8 * real.sum(0)) * x_scale.astype(np.float64)[:, None]


def activated(values: np.ndarray, limit: float | None) -> np.ndarray:
    half = values.shape[1] // 2
    gate, up = values[:, :half], values[:, half:]
    if limit is not None:
        gate, up = np.minimum(gate, limit), np.clip(up, -limit, limit)
    return gate / (1 + np.exp(-gate)) * up


def expert(
    q: np.ndarray, x_scale: np.ndarray, weights: tuple[np.ndarray, ...], mode: str, limit: float | None = None
) -> np.ndarray:
    """weights = w13, scale13, w2, scale2. The activation between the products is not quantized in ``ideal``."""
    w13, scale13, w2, scale2 = weights
    middle = activated(product(q, x_scale, w13, scale13, mode), limit)
    scale = np.abs(middle).max(1) / 127
    if mode == "ideal":
        return product(middle / scale[:, None], scale, w2, scale2, mode)
    return product(np.rint(middle / scale[:, None]), scale, w2, scale2, mode)
