"""Random experts for --load-format dummy: the same for an expert however the experts are split over ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from ffn_faas.experts.spec import MoESpec

_POOL = (1 << 20) + 7
_SCALE = 0.02
_MATRICES = 6


class DummyWeights:
    """Uniform in ±0.02, drawn once into a pool; each matrix is a copy that starts at its own place of it.

    Drawing every element would take minutes for a large model, copying runs at memory speed.
    """

    def __init__(self, spec: MoESpec, seed: int) -> None:
        import torch

        generator = torch.Generator().manual_seed(seed)
        pool = (torch.rand(_POOL, generator=generator) * 2 - 1) * _SCALE
        self._pool = pool.to(getattr(torch, spec.dtype))
        self._num_experts = spec.num_experts

    @property
    def pool(self) -> torch.Tensor:
        """All values there are; a matrix holds those from ``start`` on, again and again."""
        return self._pool

    def start(self, layer: int, expert: int, matrix: int) -> int:
        """Where in the pool a matrix begins; ``matrix`` as experts.layouts numbers it; ``expert`` global."""
        return ((layer * self._num_experts + expert) * _MATRICES + matrix) * 1_299_709 % _POOL

    def fill(self, destination: torch.Tensor, layer: int, expert: int, matrix: int) -> None:
        """Write ``destination``, contiguous; the others as ``start`` takes them."""
        flat = destination.view(-1)
        start = self.start(layer, expert, matrix)
        done = 0
        while done < flat.numel():
            piece = self._pool[start : start + flat.numel() - done]
            flat[done : done + piece.numel()] = piece
            done += piece.numel()
            start = 0
