"""What others make of the same layer on one GPU, weights local: called through their public functions, in a graph."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import TYPE_CHECKING

from ffn_faas.errors import UsageError

if TYPE_CHECKING:
    import torch

    from ffn_faas.bench.gpu_rig import Batch, LayerShape, Weights

EAGER = ("liger",)
"""These read sizes back to the host, so no graph can hold them: launched one by one."""

Layer = Callable[[int, "Batch"], "torch.Tensor"]
"""(layer, batch on F's device) -> result."""


def rival(name: str, shape: LayerShape, weights: Weights) -> Layer:
    """``vllm``, ``liger`` or ``grouped_mm``; their packages are imported here. Raises UsageError, ImportError."""
    if name not in _RIVALS:
        raise UsageError(f"--vs {name} is not known", remedy="one of " + ", ".join(_RIVALS))
    return _RIVALS[name](shape, weights)


def _slices(shape: LayerShape, weights: Weights, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
    rows = slice(layer * shape.experts, (layer + 1) * shape.experts)
    return weights.w13[rows], weights.w2[rows]


def _vllm(shape: LayerShape, weights: Weights) -> Layer:
    fused_moe = importlib.import_module("vllm.model_executor.layers.fused_moe.fused_moe")

    def layer(index: int, batch: Batch) -> torch.Tensor:
        w13, w2 = _slices(shape, weights, index)
        result: torch.Tensor = fused_moe.fused_experts(batch.x, w13, w2, batch.weights, batch.ids)
        return result

    return layer


def _liger(shape: LayerShape, weights: Weights) -> Layer:
    function = importlib.import_module("liger_kernel.ops.fused_moe").LigerFusedMoEFunction

    def layer(index: int, batch: Batch) -> torch.Tensor:
        w13, w2 = _slices(shape, weights, index)
        result: torch.Tensor = function.apply(batch.x, w13, w2, batch.ids, batch.weights)
        return result

    return layer


def _grouped_mm(shape: LayerShape, weights: Weights) -> Layer:
    import torch

    def layer(index: int, batch: Batch) -> torch.Tensor:
        w13, w2 = _slices(shape, weights, index)
        experts, order = batch.ids.flatten().sort()
        ends = torch.searchsorted(experts, torch.arange(shape.experts, device=experts.device), right=True).int()
        rows = order // shape.top_k
        grouped = torch._grouped_mm  # noqa: SLF001 - torch has no public name for it yet
        gate, up = grouped(batch.x[rows], w13.transpose(1, 2), offs=ends).chunk(2, -1)
        partial = grouped(torch.nn.functional.silu(gate) * up, w2.transpose(1, 2), offs=ends)
        partial = partial * batch.weights.flatten()[order].unsqueeze(1)
        return torch.zeros_like(batch.x, dtype=torch.float32).index_add_(0, rows, partial.float()).bfloat16()

    return layer


_RIVALS: dict[str, Callable[[LayerShape, Weights], Layer]] = {
    "vllm": _vllm,
    "liger": _liger,
    "grouped_mm": _grouped_mm,
}
