"""What an item's result is, in float64, from the definition; shares no code with the kernels.

``moe`` is sum over k of weights[t, k] * down(silu(gate(x_t)) * up(x_t)) of expert ids[t, k]; an id below zero adds
nothing. Inputs are taken as they are (bf16 and so on, exactly representable in float64).

Errors are relative to the whole result: ``l2_error`` = |y - ref| / |ref| over all elements, ``max_error`` =
max |y - ref| / max |ref|. The first says how exact a kernel is, even on one row. The second catches a single element
gone wrong; in a small item it hangs on how one element happens to round, so compare it over many rows.
"""

from __future__ import annotations

import numpy as np
import torch


def moe(
    hidden: torch.Tensor, w13: torch.Tensor, w2: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor
) -> np.ndarray:
    """hidden [T, H], w13 [E, 2I, H], w2 [E, H, I], ids [T, K], weights [T, K] -> [T, H] float64."""
    x, up_weights, down_weights = (_double(tensor) for tensor in (hidden, w13, w2))
    inter = down_weights.shape[2]
    result = np.zeros(x.shape)
    for token, (row_ids, row_weights) in enumerate(zip(ids.tolist(), weights.tolist(), strict=True)):
        for expert, weight in zip(row_ids, row_weights, strict=True):
            if expert < 0:
                continue
            gate = up_weights[expert, :inter] @ x[token]
            up = up_weights[expert, inter:] @ x[token]
            result[token] += weight * (down_weights[expert] @ (gate / (1.0 + np.exp(-gate)) * up))
    return result


def l2_error(result: torch.Tensor, reference: np.ndarray) -> float:
    return float(np.linalg.norm(_double(result) - reference) / np.linalg.norm(reference))


def max_error(result: torch.Tensor, reference: np.ndarray) -> float:
    return float(np.abs(_double(result) - reference).max() / np.abs(reference).max())


def _double(tensor: torch.Tensor) -> np.ndarray:
    return tensor.double().numpy()
