"""Random experts for --load-format dummy: the same for an expert however the experts are split over ranks. No torch."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

import numpy as np

from ffn_faas.experts.spec import ELEMENT_SIZES

if TYPE_CHECKING:
    from ffn_faas.experts.spec import MoESpec

_POOL = (1 << 20) + 7
_SCALE = 0.02
_MATRICES = 6


class DummyWeights:
    """Uniform in ±0.02, drawn once into a pool; each matrix is a copy that starts at its own place of it.

    Drawing every element would take minutes for a large model, copying runs at memory speed.
    """

    def __init__(self, spec: MoESpec, seed: int) -> None:
        drawn = (np.random.default_rng(seed).random(_POOL, np.float32) * 2 - 1) * np.float32(_SCALE)
        self._values = _stored(drawn, spec.dtype)
        self._spec = spec

    @property
    def values(self) -> np.ndarray:
        """1-D, in the spec's dtype (bfloat16 as its bits): a matrix holds those from ``start`` on, again and again."""
        return self._values

    def start(self, layer: int, expert: int, matrix: int) -> int:
        """Where in the pool a matrix begins; ``matrix`` as experts.layouts numbers it; ``expert`` global."""
        return ((layer * self._spec.num_experts + expert) * _MATRICES + matrix) * 1_299_709 % _POOL

    def write(self, address: int, layer: int, expert: int, matrix: int) -> None:
        """Fill the contiguous matrix at ``address``; the others as ``start`` takes them."""
        size = ELEMENT_SIZES[self._spec.dtype]
        nbytes = size * int(np.prod(self._spec.matrix_shape(matrix)))
        start, done = size * self.start(layer, expert, matrix), 0
        while done < nbytes:
            count = min(nbytes - done, self._values.nbytes - start)
            ctypes.memmove(address + done, self._values.ctypes.data + start, count)
            done += count
            start = 0


def _stored(values: np.ndarray, dtype: str) -> np.ndarray:
    """float32 in ``dtype``; bfloat16, which NumPy lacks, as its bits in an int16: rounded to nearest, ties to even."""
    if dtype != "bfloat16":
        converted: np.ndarray = values.astype(dtype)
        return converted
    bits = values.view(np.uint32)
    rounded: np.ndarray = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16).view(np.int16)
    return rounded
