"""The compiled CPU kernel (native/experts_cpu): packed weights, own threads, results that no neighbour changes."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import numpy as np

from ffn_faas import env, native
from ffn_faas.errors import ResourceError
from ffn_faas.experts.kernels.base import ExpertKernel, empty
from ffn_faas.experts.spec import ELEMENT_SIZES

if TYPE_CHECKING:
    import torch

    from ffn_faas import _native
    from ffn_faas.experts.spec import MoESpec

_LARGEST_WEIGHTS = 1 << 56
"""Bytes; no machine maps more, and byte counts stay far inside an int64."""


class NativeKernel(ExpertKernel):
    """Each matrix goes through a buffer of its loading thread into the packed layout: nothing is held twice.

    A row's result is the same bits whatever shares its item, and for any number of threads. ``path`` names an
    instruction set of ``ExpertsCpu.paths``; "auto" is the best that this CPU has.
    """

    name = "native"

    def __init__(self, spec: MoESpec, *, threads: int | None = None, path: str = "auto") -> None:
        super().__init__(spec)
        self._native = native.load()
        self._dtype = {"float32": self._native.F32, "float16": self._native.F16, "bfloat16": self._native.BF16}[
            spec.dtype
        ]
        self._threads = threads or env.num_threads()
        self._path = path
        self._experts: _native.ExpertsCpu | None = None
        self._buffers = threading.local()

    @property
    def native_address(self) -> int:
        """Address of the ``ffn_expert_kernel``: the connector then steps without the GIL. Valid until ``release``."""
        return self._resident.address

    @property
    def path(self) -> str:
        """The instruction set that computes."""
        return self._resident.path

    @property
    def description(self) -> str:
        refused = self._native.ExpertsCpu.refused(self._dtype)
        return f"{self.name}, path {self.path}" + (f" (not allowed: {refused})" if refused else "")

    def allocate(self, experts: range) -> None:
        super().allocate(experts)
        spec = self.spec
        nbytes = spec.num_layers * len(experts) * spec.expert_bytes
        try:
            if nbytes > _LARGEST_WEIGHTS:
                raise MemoryError
            self._experts = self._native.ExpertsCpu(
                layers=spec.num_layers,
                experts=len(experts),
                hidden_size=spec.hidden_size,
                intermediate_size=spec.intermediate_size,
                dtype=self._dtype,
                threads=self._threads,
                path=self._path,
            )
        except MemoryError:
            raise ResourceError(
                f"cannot allocate {nbytes} bytes for experts", remedy="use more F ranks or a larger host"
            ) from None

    def matrix_buffer(self, layer: int, expert: int, matrix: int) -> torch.Tensor:  # noqa: ARG002
        import torch

        flat = torch.frombuffer(self._buffer(), dtype=getattr(torch, self.spec.dtype))
        return flat.view(self.spec.matrix_shape(matrix))

    def matrix_address(self, layer: int, expert: int, matrix: int) -> int:  # noqa: ARG002
        address: int = self._buffer().ctypes.data
        return address

    def finish_matrix(self, layer: int, expert: int, matrix: int) -> None:
        self._resident.pack(layer, expert, matrix, self._buffer().ctypes.data)

    def _buffer(self) -> np.ndarray:
        """This thread's: the bytes of one matrix."""
        if not hasattr(self._buffers, "memory"):
            spec = self.spec
            nbytes = spec.intermediate_size * spec.hidden_size * ELEMENT_SIZES[spec.dtype]
            self._buffers.memory = np.empty(nbytes, np.uint8)
        memory: np.ndarray = self._buffers.memory
        return memory

    def finish(self) -> None:
        self._buffers = threading.local()

    def unpacked(self, layer: int, expert: int, matrix: int) -> torch.Tensor:
        """A copy of a matrix of a local expert as ``matrix_buffer`` had it: for tests and for looking at a model."""
        result = empty(self.spec.matrix_shape(matrix), self.spec.dtype)
        self._resident.unpack(layer, expert, matrix, result.data_ptr())
        return result

    @property
    def resident_bytes(self) -> int:
        return self._experts.nbytes if self._experts is not None else 0

    def compute(
        self,
        layer: int,
        hidden: torch.Tensor,
        expert_ids: torch.Tensor,
        weights: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        rows, top_k = expert_ids.shape
        code = self._resident.compute(
            layer, rows, top_k, hidden.data_ptr(), expert_ids.data_ptr(), weights.data_ptr(), out.data_ptr()
        )
        if code:
            raise ResourceError(f"the native kernel failed with code {code} on {rows} rows")

    def warm_up(self) -> None:
        """As the base class does, without torch."""
        spec = self.spec
        buffers: tuple[np.ndarray, ...] = (
            np.zeros(spec.hidden_size * ELEMENT_SIZES[spec.dtype], np.uint8),
            np.array([0] + [-1] * (spec.top_k - 1), np.int32),
            np.ones(spec.top_k, np.float32),
            np.empty(spec.hidden_size, np.float32),
        )
        for layer in range(spec.num_layers):
            self._resident.compute(layer, 1, spec.top_k, *(buffer.ctypes.data for buffer in buffers))

    def release(self) -> None:
        self._experts = None

    @property
    def _resident(self) -> _native.ExpertsCpu:
        if self._experts is None:
            raise ResourceError("the native kernel holds no experts: allocate it first")
        return self._experts
