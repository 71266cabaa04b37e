"""The weights of every MoE layer as the layered operators take them: lists with one tensor per layer."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

FRACTAL_NZ = 29
"""Number of the format among those of CANN."""


@dataclass
class ResidentExperts:
    """``E`` experts of this rank. int4 weights are int32 words of eight columns; int8 ones are int8.

    w13 [E, H, 2I or 2I/8], gate columns first; its scales [E, 2I] (int64 words of float bits, or float32); its biases
    float32 [E, 2I], int4 only. w2 [E, I, H or H/8]; scales [E, 1, H] int64, or [E, H]; biases [E, H] float32, or
    int32 zeros. Owned here, on the device; never moved: recorded plans hold their addresses.
    """

    w13: list[torch.Tensor] = field(default_factory=list)
    w13_scale: list[torch.Tensor] = field(default_factory=list)
    w13_bias: list[torch.Tensor] = field(default_factory=list)
    w2: list[torch.Tensor] = field(default_factory=list)
    w2_scale: list[torch.Tensor] = field(default_factory=list)
    w2_bias: list[torch.Tensor] = field(default_factory=list)

    def append(
        self,
        w13: torch.Tensor,
        w13_scale: torch.Tensor,
        w13_bias: torch.Tensor | None,
        w2: torch.Tensor,
        w2_scale: torch.Tensor,
        w2_bias: torch.Tensor,
        *,
        device: Any,
    ) -> None:
        """One more layer, moved to ``device``."""
        pairs = (
            (self.w13, blocked(w13, device)),
            (self.w13_scale, w13_scale),
            (self.w13_bias, w13_bias),
            (self.w2, blocked(w2, device)),
            (self.w2_scale, w2_scale),
            (self.w2_bias, w2_bias),
        )
        for where, tensor in pairs:
            if tensor is not None:
                where.append(tensor.to(device))

    @property
    def tensors(self) -> list[torch.Tensor]:
        return [*self.w13, *self.w13_scale, *self.w13_bias, *self.w2, *self.w2_scale, *self.w2_bias]

    @property
    def nbytes(self) -> int:
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors)


def blocked(weight: torch.Tensor, device: Any) -> torch.Tensor:
    """``weight`` on ``device``; on an NPU in the storage format FRACTAL_NZ, which changes neither shape nor values.

    Words of int4 are laid out as the bytes that they consist of. Never run on a device.
    """
    import torch

    if torch.device(device).type != "npu":
        return weight.to(device)
    import torch_npu

    moved = torch_npu.npu_format_cast(weight.to(device).view(torch.int8), FRACTAL_NZ)
    words: torch.Tensor = moved.view(torch.int32) if weight.dtype == torch.int32 else moved
    return words
