"""The control: an F whose experts all return zeros, computed in C++ with the whole step. Never a default."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ffn_faas import native
from ffn_faas.experts.kernels.base import LayerKernel, empty

if TYPE_CHECKING:
    import torch

    from ffn_faas.experts.spec import MoESpec


class ZeroKernel(LayerKernel):
    """Reads the checkpoint like every kernel, layer by layer through one buffer, and keeps nothing of it."""

    name = "zero"

    def __init__(self, spec: MoESpec) -> None:
        super().__init__(spec)
        self._kernel = native.load().ZeroKernel()

    @property
    def native_address(self) -> int:
        """Address of the ``ffn_expert_kernel``: the connector then steps without the GIL."""
        return int(self._kernel.address)

    def allocate(self, experts: range) -> None:
        super().allocate(experts)
        spec, count = self.spec, len(experts)
        self._w13 = empty((count, 2 * spec.intermediate_size, spec.hidden_size), spec.dtype)
        self._w2 = empty((count, spec.hidden_size, spec.intermediate_size), spec.dtype)
        biased = count if spec.has_bias else 0
        self._biases = (
            empty((biased, 2 * spec.intermediate_size), spec.dtype),
            empty((biased, spec.hidden_size), spec.dtype),
        )

    def layer_buffers(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:  # noqa: ARG002
        return self._w13, self._w2

    def layer_biases(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:  # noqa: ARG002
        return self._biases

    def finish(self) -> None:
        self._w13 = self._w2 = empty((0,), "float32")

    @property
    def resident_bytes(self) -> int:
        return 0

    def compute(
        self,
        layer: int,  # noqa: ARG002
        hidden: torch.Tensor,  # noqa: ARG002
        expert_ids: torch.Tensor,  # noqa: ARG002
        weights: torch.Tensor,  # noqa: ARG002
        out: torch.Tensor,
    ) -> None:
        out.zero_()
