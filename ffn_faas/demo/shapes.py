"""How large a demo checkpoint is: from a wanted number of expert bytes to a model's shape. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ffn_faas.units import MIB

_BF16 = 2


@dataclass(frozen=True)
class Shape:
    """Sizes of a Mixture-of-Experts decoder; every layer is sparse. Hidden and intermediate are multiples of 32."""

    hidden: int
    intermediate: int
    experts: int
    top_k: int
    layers: int

    @property
    def expert_bytes(self) -> int:
        """Bytes of all routed experts in bfloat16."""
        return self.layers * self.experts * 3 * self.hidden * self.intermediate * _BF16


def shape_for(size_bytes: int | None, num_experts: int | None = None) -> Shape:
    """The smallest shape with at least ``size_bytes`` of experts; a tiny one when no size is given."""
    size = size_bytes or 0
    if size <= 16 * MIB:
        hidden, intermediate, experts, top_k, floor = 256, 128, 8, 2, 4
    elif size <= 256 * MIB:
        hidden, intermediate, experts, top_k, floor = 512, 256, 32, 4, 3
    else:
        hidden, intermediate, experts, top_k, floor = 1024, 512, 64, 4, 3
    experts = num_experts or experts
    per_layer = Shape(hidden, intermediate, experts, top_k, 1).expert_bytes
    return Shape(hidden, intermediate, experts, min(top_k, experts), max(floor, math.ceil(size / per_layer)))
