"""Draws the tensors of a demo checkpoint from a seed. A tensor's values do not depend on the sharding."""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING

from ffn_faas.demo.qwen3_moe import TensorSpec

if TYPE_CHECKING:
    import torch

MEMORY_SPREAD = 1.5
"""Standard deviation of the logarithm of a neuron's strength."""


class Weights:
    """``spoken`` are the token ids that the model may say: rows of the head beside them are zero."""

    def __init__(self, seed: int, head: TensorSpec, spoken: list[int]) -> None:
        self._seed = seed
        self._spoken = spoken
        self._head = self._normal(head)[spoken]
        self._directions = self._head / self._head.norm(dim=1, keepdim=True)

    def draw(self, spec: TensorSpec) -> torch.Tensor:
        """The tensor in bfloat16."""
        import torch

        if spec.kind == "ones":
            return torch.ones(spec.shape, dtype=torch.bfloat16)
        if spec.kind == "head":
            values = torch.zeros(spec.shape)
            values[self._spoken] = self._head
        elif spec.kind == "memory":
            values = self._memory(spec)
        else:
            values = self._normal(spec)
        return values.to(torch.bfloat16)

    def _generator(self, name: str) -> torch.Generator:
        import torch

        return torch.Generator().manual_seed(zlib.crc32(f"{self._seed} {name}".encode()))

    def _normal(self, spec: TensorSpec) -> torch.Tensor:
        import torch

        return torch.randn(spec.shape, generator=self._generator(spec.name)).mul_(spec.std)

    def _memory(self, spec: TensorSpec) -> torch.Tensor:
        import torch

        hidden, neurons = spec.shape
        generator = self._generator(spec.name)
        tokens = torch.randint(len(self._spoken), (neurons,), generator=generator)
        strength = torch.exp(MEMORY_SPREAD * torch.randn(neurons, 1, generator=generator))
        strength *= spec.std * hidden**0.5 / strength.square().mean().sqrt()
        return (self._directions[tokens] * strength).T.contiguous()
