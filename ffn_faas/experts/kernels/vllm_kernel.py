"""vLLM's own CPU kernel: what stock vLLM computes, bit for bit, where one F rank holds all experts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ffn_faas.errors import ModelRefused, ResourceError
from ffn_faas.experts.kernels import vllm_experts
from ffn_faas.experts.kernels.base import LayerKernel, empty
from ffn_faas.experts.kernels.vllm_experts import VllmExperts
from ffn_faas.experts.kernels.vllm_ops import isa, load_ops, ops

if TYPE_CHECKING:
    import torch

    from ffn_faas.experts.spec import MoESpec

_ALIGNMENT = 32
_INT32_MAX = (1 << 31) - 1
"""The kernel's offsets, into a layer's weights and into its scratch memory, are 32-bit."""
_SCRATCH_BYTES = _INT32_MAX // 2


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

    How an item becomes calls that give stock's bits is said in ``native/experts_vllm``, which makes them.
    """

    name = "vllm"

    def __init__(self, spec: MoESpec) -> None:
        super().__init__(spec)
        self._hidden, self._inter = spec.hidden_size, spec.intermediate_size
        self._padded = _padded(self._inter)
        self._interleaved = spec.activation == "swigluoai"
        self._experts: VllmExperts | None = None

    @property
    def native_address(self) -> int:
        """Address of the ``ffn_expert_kernel``: the connector then steps without the GIL. Valid until ``release``."""
        return self._resident.native_address

    def prepare(self) -> None:
        super().prepare()
        load_ops()
        vllm_experts.load()
        vllm_experts.check_operator()

    def allocate(self, experts: range) -> None:
        super().allocate(experts)
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
        self._isa = isa(self.spec.dtype)
        self._packed = [
            (
                empty((count, 2 * self._padded, self._hidden), self.spec.dtype),
                empty((count, self._hidden, self._padded), self.spec.dtype),
            )
            for _ in range(self.spec.num_layers)
        ]
        self._experts = VllmExperts(
            (count, self._hidden, self._padded),
            self.spec.dtype,
            self.spec.activation,
            self._isa,
            scratch_bytes=_SCRATCH_BYTES,
        )

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
        biases = (self._halves(b13).clone(), b2.clone()) if self.spec.has_bias else (None, None)
        self._resident.add_layer(self._packed[layer], biases)

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
        addresses = (tensor.data_ptr() for tensor in (hidden, expert_ids, weights, out))
        if self._resident.compute(layer, rows, top_k, *addresses):
            raise ResourceError(f"vLLM's kernel failed on {rows} rows of layer {layer}")

    def release(self) -> None:
        self._packed, self._experts = [], None
        self.finish()

    @property
    def _resident(self) -> VllmExperts:
        if self._experts is None:
            raise ResourceError("the vllm kernel holds no experts: allocate it first")
        return self._experts
