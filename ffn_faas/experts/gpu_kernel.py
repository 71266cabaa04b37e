"""Experts resident in GPU memory, in the row order that the grouped product wants. bf16."""

from __future__ import annotations

import ctypes
import math
import threading
from typing import TYPE_CHECKING

from ffn_faas.connectors import m2n_library
from ffn_faas.errors import ModelRefused
from ffn_faas.experts.gpu_layout import down_rows, gate_up_rows, places
from ffn_faas.experts.kernels.base import DOWN, ExpertKernel

if TYPE_CHECKING:
    import torch

    from ffn_faas.experts.dummy import DummyWeights
    from ffn_faas.experts.spec import MoESpec


class GpuExperts(ExpertKernel):
    """w13 [layers * E_local, 2I, H] and w2 [layers * E_local, H, I]; an expert's row is layer * E_local + local id.

    Each thread that reads has two pinned buffers of one matrix: while one is filled from the file, the other one is
    copied and put in order. Nothing of a layer is ever held twice. The product runs in the step's graph, never
    through ``compute``.
    """

    name = "cuda"
    on_host = False

    def __init__(self, spec: MoESpec) -> None:
        super().__init__(spec)
        self.w13 = self.w2 = 0
        self._place: list[int] = []
        self._pool = 0
        self._device = 0
        self._thread = threading.local()
        self._uploaders: list[Uploader] = []

    def prepare(self) -> None:
        spec = self.spec
        refused = {
            f"dtype {spec.dtype}": spec.dtype != "bfloat16",
            f"activation {spec.activation}": spec.activation != "silu",
            "expert biases": spec.has_bias,
            f"SwiGLU limit {spec.swiglu_limit}": spec.swiglu_limit is not None,
            f"hidden size {spec.hidden_size}": spec.hidden_size % 128 != 0,
            f"intermediate size {spec.intermediate_size}": spec.intermediate_size % 64 != 0,
            f"top-k {spec.top_k}": spec.top_k > 32,
        }
        for what, is_refused in refused.items():
            if is_refused:
                raise ModelRefused(
                    f"the GPU backend does not carry {what} (bfloat16, silu, no biases, hidden size a multiple of 128, "
                    "intermediate size of 64, top-k up to 32)"
                )

    def allocate(self, experts: range) -> None:
        super().allocate(experts)
        spec, count = self.spec, len(experts)
        if count > 1024:
            raise ModelRefused(f"{count} experts a layer on one F rank, at most 1024", remedy="use more F ranks")
        library = m2n_library.load()
        hidden, inter = spec.hidden_size, spec.intermediate_size
        self.w13 = library.allocate(2 * spec.num_layers * count * 2 * inter * hidden)
        self.w2 = library.allocate(2 * spec.num_layers * count * inter * hidden)
        wide, narrow = (_upload(places(order)) for order in (gate_up_rows(inter), down_rows(hidden)))
        self._place = [wide, wide + 4 * inter, narrow]

    def bind(self, device: int) -> None:
        """The GPU that threads which read use; before ``allocate``."""
        self._device = device

    def matrix_buffer(self, layer: int, expert: int, matrix: int) -> torch.Tensor:  # noqa: ARG002
        uploader = getattr(self._thread, "uploader", None)
        if uploader is None:
            nbytes = 2 * self.spec.intermediate_size * self.spec.hidden_size
            uploader = self._thread.uploader = Uploader(m2n_library.load(), self._device, nbytes)
            self._uploaders.append(uploader)
        return uploader.buffer(self.spec.matrix_shape(matrix))

    def finish_matrix(self, layer: int, expert: int, matrix: int) -> None:
        rows, width = self.spec.matrix_shape(matrix)
        self._thread.uploader.put(self._target(layer, expert, matrix), self._place[matrix], rows, 2 * width)

    def fill_dummy(self, layer: int, expert: int, local: int, matrix: int, dummy: DummyWeights) -> None:
        """On the device, from a copy of the pool there."""
        library, pool = m2n_library.load(), dummy.values
        if not self._pool:
            self._pool = library.allocate(pool.nbytes)
            library.call("copy", self._pool, pool.ctypes.data, pool.nbytes)
        rows, width = self.spec.matrix_shape(matrix)
        start = dummy.start(layer, expert, matrix)
        target = self._target(layer, local, matrix)
        library.call("fill_rows", target, self._place[matrix], self._pool, pool.size, start, rows, width)

    def finish(self) -> None:
        library = m2n_library.load()
        while self._uploaders:
            self._uploaders.pop().close()
        library.call("synchronize")
        for address in filter(None, (self._place[0], self._place[2], self._pool)):
            library.call("free", address)
        self._place, self._pool = [], 0

    def _target(self, layer: int, expert: int, matrix: int) -> int:
        """Where the expert's rows of this matrix's resident tensor begin."""
        nbytes = 2 * self.spec.intermediate_size * self.spec.hidden_size
        row = layer * self.num_local_experts + expert
        return self.w2 + row * nbytes if matrix == DOWN else self.w13 + row * 2 * nbytes

    @property
    def resident_bytes(self) -> int:
        return self.spec.num_layers * self.num_local_experts * self.spec.expert_bytes

    def compute(
        self, layer: int, hidden: torch.Tensor, expert_ids: torch.Tensor, weights: torch.Tensor, out: torch.Tensor
    ) -> None:
        raise NotImplementedError("items of the GPU backend never reach the host")

    def release(self) -> None:
        if self.w13:
            library = m2n_library.load()
            library.call("free", self.w13)
            library.call("free", self.w2)
            self.w13 = self.w2 = 0


class Uploader:
    """Two pinned buffers of one thread; ``buffer`` waits until the older one may be written."""

    def __init__(self, library: m2n_library.Library, device: int, nbytes: int) -> None:
        self._library = library
        self._handle = ctypes.c_void_p()
        library.call("use_device", device)
        library.call("uploader_create", nbytes, ctypes.byref(self._handle))

    def buffer(self, shape: tuple[int, ...]) -> torch.Tensor:
        """bf16, of ``shape``; valid until ``put``."""
        import torch

        host = ctypes.c_void_p()
        self._library.call("uploader_buffer", self._handle, ctypes.byref(host))
        count = math.prod(shape)
        raw = (ctypes.c_char * (2 * count)).from_address(int(host.value or 0))
        return torch.frombuffer(raw, dtype=torch.bfloat16, count=count).view(shape)

    def put(self, target: int, place: int, rows: int, row_bytes: int) -> None:
        """Send what ``buffer`` gave last to rows ``place`` of ``target``; returns at once."""
        self._library.call("uploader_put", self._handle, target, place, rows, row_bytes)

    def close(self) -> None:
        """Wait for what was put, free the buffers."""
        self._library.call("uploader_finish", self._handle)
        self._library.call("uploader_destroy", self._handle)


def _upload(order: list[int]) -> int:
    """An i32 array on the device."""
    library = m2n_library.load()
    values = (ctypes.c_int32 * len(order))(*order)
    address = library.allocate(ctypes.sizeof(values))
    library.call("copy", address, ctypes.cast(values, ctypes.c_void_p), ctypes.sizeof(values))
    return address
