"""One chunk of rows through the experts of a layer that the device picks: two layered operators, no host reads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ffn_faas.ascend.numerics import rows as int8_rows
from ffn_faas.errors import UsageError

if TYPE_CHECKING:
    import torch

    from ffn_faas.ascend.op_module import OpModule
    from ffn_faas.ascend.resident import ResidentExperts

COUNTS = 1
"""group_list holds the rows of each expert, not their sums."""
SPLIT_ITEM = 3


@dataclass(frozen=True)
class Arithmetic:
    """What is computed beside the two products. ``dtype``: bfloat16 or float16, of the result.

    ``swiglu_limit``: the published first operator has no such argument, so with a limit the activation runs between
    two plain products, one rounding to ``dtype`` more; w4a8 only. ``routed_scale``: for an Attention that leaves it out
    of its weights and its own sum; the one of this package never does, and 1 multiplies nothing.
    """

    dtype: str = "bfloat16"
    swiglu_limit: float | None = None
    routed_scale: float = 1.0


class LayeredExperts:
    """Callable; owns nothing. Its input may be overwritten: the second operator uses its own as scratch memory."""

    def __init__(self, ops: OpModule, weights: ResidentExperts, arithmetic: Arithmetic = Arithmetic()) -> None:
        import torch

        self._ops = ops
        self._weights = weights
        self._dtype = getattr(torch, arithmetic.dtype)
        self._limit = arithmetic.swiglu_limit
        self._routed_scale = arithmetic.routed_scale
        if self._limit is not None and not weights.w13_bias:
            raise UsageError("npu-async-cam applies a SwiGLU limit to w4a8 experts only", remedy="serve w4a8 experts")

    def __call__(
        self, x: torch.Tensor, scales: torch.Tensor, counts: torch.Tensor, layer: torch.Tensor
    ) -> torch.Tensor:
        """``x`` [rows, H] int8 with ``scales`` f32 [rows], or float rows; ``counts`` i64 [E] of valid rows, in order of
        experts; ``layer`` i64 [1], place in the lists, a storage of its own. Returns [rows, H] in ``dtype``; rows
        beyond the valid ones are garbage.
        """
        if x.is_floating_point():
            x, scales = quantize(x)
        q, scale = self._activation(x, scales, counts, layer)
        weights = self._weights
        out = self._product(q, scale, counts, layer, weights.w2, weights.w2_bias, weights.w2_scale)
        return out if self._routed_scale == 1.0 else out.mul_(self._routed_scale)

    def _activation(
        self, x: torch.Tensor, scales: torch.Tensor, counts: torch.Tensor, layer: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        weights = self._weights
        if self._limit is None:
            q, scale = self._ops.gmm_swiglu_quant_v2_layered(
                x, weights.w13, weights.w13_scale, weights.w13_bias, scales, counts, layer, 0, 0, COUNTS, None
            )
            return q, scale
        wide = self._product(x, scales, counts, layer, weights.w13, weights.w13_bias, weights.w13_scale)
        q, scale = int8_rows.activation(int8_rows.swiglu(wide.float(), self._limit))
        return q, scale

    def _product(
        self,
        x: torch.Tensor,
        scales: torch.Tensor,
        counts: torch.Tensor,
        layer: torch.Tensor,
        weights: list[torch.Tensor],
        bias: list[torch.Tensor],
        weight_scale: list[torch.Tensor],
    ) -> torch.Tensor:
        result: torch.Tensor = self._ops.grouped_matmul_layered(
            [x], weights, bias, weight_scale, layer, counts, scales, COUNTS, SPLIT_ITEM, self._dtype
        )[0]
        return result


def quantize(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows that travelled in ``dtype`` (dynamicQuant 0) -> int8 rows and their scales, on their own device."""
    if x.device.type == "npu":
        import torch_npu

        q, scale = torch_npu.npu_dynamic_quant(x)
        return q, scale
    q, scale = int8_rows.activation(x.float())
    return q, scale
