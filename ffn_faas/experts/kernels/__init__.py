"""--moe-kernel to an ExpertKernel; a kernel's module, and what it needs, is imported when it is asked for."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING

from ffn_faas import native
from ffn_faas.errors import ModelRefused, NativeMissing, UsageError
from ffn_faas.experts.kernels.base import ExpertKernel

if TYPE_CHECKING:
    from ffn_faas.experts.spec import MoESpec

log = logging.getLogger(__name__)

_KERNELS: Mapping[str, tuple[str, str]] = {
    "native": ("ffn_faas.experts.kernels.native_kernel", "NativeKernel"),
    "torch": ("ffn_faas.experts.kernels.torch_kernel", "TorchKernel"),
    "vllm": ("ffn_faas.experts.kernels.vllm_kernel", "VllmKernel"),
    "zero": ("ffn_faas.experts.kernels.zero_kernel", "ZeroKernel"),
}

KERNEL_NAMES = ("auto", *_KERNELS)


def create_kernel(name: str, spec: MoESpec) -> ExpertKernel:
    """``name`` is one of KERNEL_NAMES. Takes no weight memory yet.

    Raises UsageError for another name, ModelRefused when the kernel does not carry what the experts need.
    """
    chosen = choose_kernel(name, spec)
    module, attribute = _KERNELS.get(chosen, ("", ""))
    if not module:
        raise UsageError(f"MoE kernel {name!r} is unknown", remedy="known: " + ", ".join(KERNEL_NAMES))
    refusal = kernel_refusal(chosen, spec, 1)
    if refusal:
        raise ModelRefused(refusal, remedy="use --moe-kernel torch")
    kernel: ExpertKernel = getattr(importlib.import_module(module), attribute)(spec)
    return kernel


def choose_kernel(name: str, spec: MoESpec) -> str:
    """What "auto" stands for on this machine and for this model; other names as they are."""
    if name != "auto":
        return name
    try:
        built = hasattr(native.load(), "ExpertsCpu")
    except NativeMissing:
        built = False
    missing = _missing("native", spec)
    if built and missing:
        log.info("kernel torch: the native kernel does not carry %s of %s", missing, spec.architecture)
    return "native" if built and not missing else "torch"


def kernel_refusal(kernel: str, spec: MoESpec, num_local_experts: int) -> str | None:
    """Why a kernel cannot hold so many experts of each layer; None when it can. Needs no library and no memory."""
    missing = _missing(kernel, spec)
    if missing:
        return f"the {kernel} kernel does not carry {missing} of {spec.architecture}"
    if kernel == "vllm":
        from ffn_faas.experts.kernels.vllm_kernel import shape_refusal

        return shape_refusal(spec, num_local_experts)
    return None


def _missing(kernel: str, spec: MoESpec) -> str:
    """What of ``spec`` the kernel does not carry, in words; "" when it carries all."""
    limit = [] if spec.swiglu_limit is None else [f"the SwiGLU limit {spec.swiglu_limit:g}"]
    if kernel == "vllm":
        return " and ".join(limit)
    if kernel != "native":
        return ""
    biases = ["the expert biases"] if spec.has_bias else []
    return " and ".join([*biases, *([] if spec.activation == "silu" else [f"activation {spec.activation}"]), *limit])
