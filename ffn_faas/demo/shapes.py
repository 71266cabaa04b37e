"""How large a demo checkpoint is: from a wanted number of expert bytes to a model's shape. Pure."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from ffn_faas.errors import UsageError

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
_UNITS = {"": 1, "b": 1, "kib": KIB, "mib": MIB, "gib": GIB, "kb": 10**3, "mb": 10**6, "gb": 10**9}
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


def parse_size(text: str) -> int:
    """``64MiB``, ``1 GiB`` or ``500MB`` in bytes. Raises UsageError."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text)
    if match is None or match[2].lower() not in _UNITS:
        raise UsageError(f"{text!r} is not a size", remedy="write it like 64MiB or 1GiB")
    return int(float(match[1]) * _UNITS[match[2].lower()])


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
