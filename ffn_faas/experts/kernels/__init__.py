"""--moe-kernel to an ExpertKernel; a kernel's module, and what it needs, is imported when it is asked for."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import TYPE_CHECKING

from ffn_faas import native
from ffn_faas.errors import NativeMissing, UsageError
from ffn_faas.experts.kernels.base import ExpertKernel

if TYPE_CHECKING:
    from ffn_faas.experts.spec import MoESpec

_KERNELS: Mapping[str, tuple[str, str]] = {
    "native": ("ffn_faas.experts.kernels.native_kernel", "NativeKernel"),
    "torch": ("ffn_faas.experts.kernels.torch_kernel", "TorchKernel"),
    "vllm": ("ffn_faas.experts.kernels.vllm_kernel", "VllmKernel"),
    "zero": ("ffn_faas.experts.kernels.zero_kernel", "ZeroKernel"),
}

KERNEL_NAMES = ("auto", *_KERNELS)


def create_kernel(name: str, spec: MoESpec) -> ExpertKernel:
    """``name`` is one of KERNEL_NAMES. Takes no weight memory yet. Raises UsageError for another name."""
    module, attribute = _KERNELS.get(_auto() if name == "auto" else name, ("", ""))
    if not module:
        raise UsageError(f"MoE kernel {name!r} is unknown", remedy="known: " + ", ".join(KERNEL_NAMES))
    kernel: ExpertKernel = getattr(importlib.import_module(module), attribute)(spec)
    return kernel


def _auto() -> str:
    try:
        return "native" if hasattr(native.load(), "ExpertsCpu") else "torch"
    except NativeMissing:
        return "torch"
