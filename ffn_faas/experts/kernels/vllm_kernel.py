"""vLLM's own CPU kernel: what stock vLLM computes, bit for bit, where one F rank holds all experts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ffn_faas.errors import ModelRefused
from ffn_faas.experts.kernels.base import LayerKernel, empty
from ffn_faas.experts.kernels.vllm_ops import isa, load_ops, ops

if TYPE_CHECKING:
    import torch

    from ffn_faas.experts.spec import MoESpec

_ALIGNMENT = 32
_INT32_MAX = (1 << 31) - 1
"""The kernel's offsets, into a layer's weights and into its scratch memory, are 32-bit."""


def shape_refusal(spec: MoESpec, num_local_experts: int) -> str | None:
    """Why vLLM's kernel cannot hold so many experts of one layer; None when it can."""
    hidden, inter = spec.hidden_size, spec.intermediate_size
    if hidden % _ALIGNMENT:
        return f"the vllm kernel needs a hidden size divisible by {_ALIGNMENT}, this model has {hidden}"
    if spec.activation == "swigluoai" and inter % _ALIGNMENT:
        return (
            f"the vllm kernel needs an intermediate size divisible by {_ALIGNMENT} for activation swigluoai, this "
            f"model has {inter}"
        )
    if num_local_experts * 2 * _padded(inter) * hidden > _INT32_MAX:
        shape = f"[{2 * _padded(inter)}, {hidden}]"
        return f"the vllm kernel cannot address {num_local_experts} experts of {shape} in one layer"
    return None


def _padded(intermediate: int) -> int:
    return -(-intermediate // _ALIGNMENT) * _ALIGNMENT


class VllmKernel(LayerKernel):
    """Weights are packed layer by layer out of one staging buffer; the packed layout is vLLM's.

    The kernel takes no id below zero (it would write out of bounds), and its result is rounded to the weights'
    dtype. So an item whose rows have all their experts here is one call exactly as stock makes it. Else each
    (row, expert) pair becomes a row of its own with one expert, and the results are summed in f32: no foreign
    expert is computed and each hit expert is still read once.
    """

    name = "vllm"

    def __init__(self, spec: MoESpec) -> None:
        super().__init__(spec)
        self._hidden, self._inter = spec.hidden_size, spec.intermediate_size
        self._padded = _padded(self._inter)
        self._interleaved = spec.activation == "swigluoai"
        self._packed: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._biases: list[tuple[torch.Tensor | None, torch.Tensor | None]] = []

    def prepare(self) -> None:
        load_ops()

    def allocate(self, experts: range) -> None:
        super().allocate(experts)
        self._isa = isa(self.spec.dtype)
        count = len(experts)
        refusal = shape_refusal(self.spec, count)
        if refusal:
            raise ModelRefused(refusal, remedy="use more F ranks or --moe-kernel torch")
        self._staging = (
            empty((count, 2 * self._inter, self._hidden), self.spec.dtype),
            empty((count, self._hidden, self._inter), self.spec.dtype),
        )
        self._bias_staging = (
            empty((count, 2 * self._inter), self.spec.dtype),
            empty((count, self._hidden), self.spec.dtype),
        )
        self._biases = []
        self._packed = [
            (
                empty((count, 2 * self._padded, self._hidden), self.spec.dtype),
                empty((count, self._hidden, self._padded), self.spec.dtype),
            )
            for _ in range(self.spec.num_layers)
        ]

    def layer_buffers(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:  # noqa: ARG002
        return self._staging

    def layer_biases(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:  # noqa: ARG002
        return self._bias_staging

    def finish_layer(self, layer: int) -> None:
        w13, w2 = self._staging
        inter, padded = self._inter, self._padded
        if padded != inter:
            narrow2 = w2
            w2 = narrow2.new_zeros(narrow2.shape[0], self._hidden, padded)
            w2[:, :, :inter] = narrow2
        for weight, packed in zip((self._halves(w13), w2), self._packed[layer], strict=True):
            ops().prepack_moe_weight(weight, packed, self._isa)
        b13, b2 = self._bias_staging
        self._biases.append((self._halves(b13).clone(), b2.clone()) if self.spec.has_bias else (None, None))

    def _halves(self, wide: torch.Tensor) -> torch.Tensor:
        """[E, 2I, ...], gate then up, as the kernel wants it: row by row in turn, or each half padded with zeros."""
        inter, padded = self._inter, self._padded
        halves = wide.unflatten(1, (2, inter))
        if self._interleaved:
            return halves.transpose(1, 2).flatten(1, 2)
        if padded == inter:
            return wide
        result = wide.new_zeros(wide.shape[0], 2, padded, *wide.shape[2:])
        result[:, :, :inter] = halves
        return result.flatten(1, 2)

    def finish(self) -> None:
        self._staging = (empty((0,), "float32"), empty((0,), "float32"))
        self._bias_staging = self._staging

    @property
    def resident_bytes(self) -> int:
        weights = sum(w13.nbytes + w2.nbytes for w13, w2 in self._packed)
        return int(weights + sum(bias.nbytes for biases in self._biases for bias in biases if bias is not None))

    def compute(
        self,
        layer: int,
        hidden: torch.Tensor,
        expert_ids: torch.Tensor,
        weights: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        valid = expert_ids >= 0
        if valid.all():
            self._call(layer, hidden, expert_ids, weights, out)
            return
        out.zero_()
        occupied = valid.any(dim=1)
        if valid[occupied].all():
            # Whole rows without an expert are padding; the others are as stock has them.
            rows = occupied.nonzero().squeeze(1)
            result = out.new_empty(rows.numel(), out.shape[1])
            self._call(layer, hidden[rows], expert_ids[rows], weights[rows], result)
            out[rows] = result
            return
        rows, slots = valid.nonzero(as_tuple=True)
        result = out.new_empty(rows.numel(), out.shape[1])
        ids, pair_weights = expert_ids[rows, slots].unsqueeze(1), weights[rows, slots].unsqueeze(1)
        self._call(layer, hidden[rows], ids, pair_weights, result)
        out.index_add_(0, rows, result)

    def _call(
        self, layer: int, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, out: torch.Tensor
    ) -> None:
        """Stock's call; every id is valid. A row's result does not depend on the others, so that splitting is exact."""
        import torch

        w13, w2 = self._packed[layer]
        b13, b2 = self._biases[layer]
        activation = self.spec.activation
        per_row = ids.shape[1] * (4 * self._hidden + hidden.element_size() * self._padded + 8)
        step = max(1, (_INT32_MAX // 2) // max(1, per_row))
        for begin in range(0, hidden.shape[0], step):
            part = slice(begin, begin + step)
            rows = hidden[part]
            result = torch.empty_like(rows)
            ops().cpu_fused_moe(result, rows, w13, w2, b13, b2, weights[part], ids[part], False, activation, self._isa)
            out[part] = result

    def release(self) -> None:
        self._packed, self._biases = [], []
        self.finish()
