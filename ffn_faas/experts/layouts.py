"""How a checkpoint stores the matrices of experts: one tensor each, or stacked for a layer. Pure; no torch."""

from __future__ import annotations

from dataclasses import dataclass

GATE, UP, DOWN, GATE_BIAS, UP_BIAS, DOWN_BIAS = range(6)
"""The matrices and vectors of an expert, as kernels and the native code number them: gate and up [I, H], down [H, I],
biases [I], [I], [H]."""
BIASES = (GATE_BIAS, UP_BIAS, DOWN_BIAS)


@dataclass(frozen=True)
class Source:
    """One tensor of the checkpoint, or with ``stacked`` the part of it that belongs to one expert.

    ``name`` follows the layer's prefix and a dot; ``{}`` in it is the number of the expert. A stacked tensor has the
    experts as its first dimension, so that an expert's part is one range of bytes. What is left holds ``matrices``
    one below the other as [out, in] (vectors: one after the other), ``interleaved`` row by row, or all of it
    ``transposed``.
    """

    name: str
    matrices: tuple[int, ...]
    stacked: bool = False
    transposed: bool = False
    interleaved: bool = False

    def shape(self, hidden: int, intermediate: int, num_experts: int) -> tuple[int, ...]:
        """What the whole tensor's shape must be."""
        rows = sum(matrix_shape(matrix, hidden, intermediate)[0] for matrix in self.matrices)
        part = (rows, *matrix_shape(self.matrices[0], hidden, intermediate)[1:])
        part = part[::-1] if self.transposed else part
        return (num_experts, *part) if self.stacked else part


def matrix_shape(matrix: int, hidden: int, intermediate: int) -> tuple[int, ...]:
    """Shape of one matrix or vector, as kernels take it."""
    wide = (intermediate, hidden)
    return (wide, wide, wide[::-1], wide[:1], wide[:1], wide[1:])[matrix]


def per_expert(gate: str = "gate_proj", up: str = "up_proj", down: str = "down_proj") -> tuple[Source, ...]:
    """``<prefix>.<expert>.<gate>.weight`` and so on."""
    return (
        Source(f"{{}}.{gate}.weight", (GATE,)),
        Source(f"{{}}.{up}.weight", (UP,)),
        Source(f"{{}}.{down}.weight", (DOWN,)),
    )


def stacked(
    gate_up: str = "gate_up_proj",
    down: str = "down_proj",
    *,
    transposed: bool = False,
    interleaved: bool = False,
    bias: str = "",
) -> tuple[Source, ...]:
    """Two tensors a layer; ``bias`` is what a bias's name has after that of its matrix, "" when there are none."""
    weights = (
        Source(gate_up, (GATE, UP), stacked=True, transposed=transposed, interleaved=interleaved),
        Source(down, (DOWN,), stacked=True, transposed=transposed),
    )
    if not bias:
        return weights
    return (
        *weights,
        Source(gate_up + bias, (GATE_BIAS, UP_BIAS), stacked=True, interleaved=interleaved),
        Source(down + bias, (DOWN_BIAS,), stacked=True),
    )
