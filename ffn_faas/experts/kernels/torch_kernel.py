"""Portable kernel: plain torch, one pass per hit expert. Reads each hit expert's weights once per item."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ffn_faas.experts.kernels.activations import activate
from ffn_faas.experts.kernels.base import LayerKernel, empty

if TYPE_CHECKING:
    import torch

_SCRATCH_ELEMENTS = 1 << 19
"""f32 copies of weights are made in blocks of this many elements (2 MiB), so that they stay in cache."""
_FEW_ROWS = 2
"""Up to here torch multiplies weights of two bytes faster than they are widened."""


class TorchKernel(LayerKernel):
    """All layers in one tensor per matrix: the row of an expert is ``layer * E_local + local id``.

    For more than a few rows, weights of two bytes are widened to f32 block by block: without bf16 instructions that
    is faster than torch's bf16 product, and more exact. For a few rows the latter reads half as much; it rounds each
    result, which adds up to about half of the error of vLLM's kernel.
    """

    name = "torch"

    def allocate(self, experts: range) -> None:
        super().allocate(experts)
        spec = self.spec
        rows = spec.num_layers * len(experts)
        self._w13 = empty((rows, 2 * spec.intermediate_size, spec.hidden_size), spec.dtype)
        self._w2 = empty((rows, spec.hidden_size, spec.intermediate_size), spec.dtype)
        biased = rows if spec.has_bias else 0
        self._b13 = empty((biased, 2 * spec.intermediate_size), spec.dtype)
        self._b2 = empty((biased, spec.hidden_size), spec.dtype)
        widest = max(spec.hidden_size, spec.intermediate_size)
        self._scratch = empty((max(_SCRATCH_ELEMENTS, widest),), "float32")

    def layer_buffers(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        rows = self._rows(layer)
        return self._w13[rows], self._w2[rows]

    def layer_biases(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        rows = self._rows(layer)
        return self._b13[rows], self._b2[rows]

    def _rows(self, layer: int) -> slice:
        return slice(layer * self.num_local_experts, (layer + 1) * self.num_local_experts)

    @property
    def resident_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in (self._w13, self._w2, self._b13, self._b2))

    def compute(
        self,
        layer: int,
        hidden: torch.Tensor,
        expert_ids: torch.Tensor,
        weights: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        import torch

        out.zero_()
        # Slots (row, k) that name an expert, sorted by expert.
        experts = expert_ids.reshape(-1).long()
        slots = (experts >= 0).nonzero().squeeze(1)
        experts, order = experts[slots].sort(stable=True)
        slots = slots[order]
        if not slots.numel():
            return
        rows = torch.div(slots, expert_ids.shape[1], rounding_mode="floor")
        slot_weights = weights.reshape(-1)[slots].unsqueeze(1)
        inputs = hidden[rows]
        hit, counts = torch.unique_consecutive(experts, return_counts=True)
        begin = 0
        for expert, count in zip(hit.tolist(), counts.tolist(), strict=True):
            part = slice(begin, begin + count)
            begin += count
            row = layer * self.num_local_experts + expert
            gate_up = self._product(inputs[part], self._w13[row])
            if self.spec.has_bias:
                gate_up += self._b13[row]
            gate, up = gate_up.chunk(2, dim=1)
            result = self._product(activate(self.spec.activation, gate, up, self.spec.swiglu_limit), self._w2[row])
            if self.spec.has_bias:
                result += self._b2[row]
            out.index_add_(0, rows[part], result.mul_(slot_weights[part]))

    def _product(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """``x`` [n, in] times ``weight`` [out, in] transposed, as f32."""
        import torch

        if weight.dtype == torch.float32 or x.shape[0] <= _FEW_ROWS:
            return torch.mm(x.to(weight.dtype), weight.t()).float()
        x = x.float()
        width = weight.shape[1]
        block = self._scratch.numel() // width
        result = x.new_empty(x.shape[0], weight.shape[0])
        for begin in range(0, weight.shape[0], block):
            part = weight[begin : begin + block]
            wide = self._scratch[: part.numel()].view(part.shape).copy_(part)
            result[:, begin : begin + block] = torch.mm(x, wide.t())
        return result

    def release(self) -> None:
        self._w13 = self._w2 = self._b13 = self._b2 = self._scratch = empty((0,), "float32")
