"""Experts resident in GPU memory, in the row order that the grouped product wants. bf16."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

from ffn_faas.connectors import m2n_library
from ffn_faas.errors import ModelRefused
from ffn_faas.experts.gpu_layout import down_rows, gate_up_rows
from ffn_faas.experts.kernels.base import LayerKernel, empty

if TYPE_CHECKING:
    import torch

    from ffn_faas.experts.spec import MoESpec


class GpuExperts(LayerKernel):
    """w13 [layers * E_local, 2I, H] and w2 [layers * E_local, H, I]; an expert's row is layer * E_local + local id.

    A layer is read into one staging buffer on the host, copied, and put in order on the device. The product itself
    runs in the step's graph, never through ``compute``.
    """

    name = "cuda"

    def __init__(self, spec: MoESpec) -> None:
        super().__init__(spec)
        self.w13 = self.w2 = 0
        self._scratch: list[int] = []

    def prepare(self) -> None:
        spec = self.spec
        refused = {
            f"dtype {spec.dtype}": spec.dtype != "bfloat16",
            f"activation {spec.activation}": spec.activation != "silu",
            "expert biases": spec.has_bias,
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
        self._staging = (empty((count, 2 * inter, hidden), spec.dtype), empty((count, hidden, inter), spec.dtype))
        self.w13 = library.allocate(2 * spec.num_layers * self._staging[0].numel())
        self.w2 = library.allocate(2 * spec.num_layers * self._staging[1].numel())
        self._orders = [_upload(gate_up_rows(inter)), _upload(down_rows(hidden))]
        self._scratch = [library.allocate(self._staging[0].nbytes), *self._orders]

    def layer_buffers(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:  # noqa: ARG002
        return self._staging

    def finish_layer(self, layer: int) -> None:
        library = m2n_library.load()
        for resident, staging, order in zip((self.w13, self.w2), self._staging, self._orders, strict=True):
            count, rows, width = staging.shape
            library.call("copy", self._scratch[0], staging.data_ptr(), staging.nbytes)
            target = resident + layer * staging.nbytes
            library.call("permute_rows", target, self._scratch[0], order, count, rows, 2 * width)

    def finish(self) -> None:
        library = m2n_library.load()
        while self._scratch:
            library.call("free", self._scratch.pop())
        del self._staging

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


def _upload(order: list[int]) -> int:
    """An i32 array on the device."""
    library = m2n_library.load()
    values = (ctypes.c_int32 * len(order))(*order)
    address = library.allocate(ctypes.sizeof(values))
    library.call("copy", address, ctypes.cast(values, ctypes.c_void_p), ctypes.sizeof(values))
    return address
