"""What a package without its compiled part says."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from ffn_faas import native
from ffn_faas.attention import ops
from ffn_faas.connectors.shm import ShmConnector
from ffn_faas.errors import NativeMissing
from ffn_faas.experts.kernels import vllm_experts


def test_a_missing_native_module_is_named_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ffn_faas._native", None)
    with pytest.raises(NativeMissing, match=r"ffn_faas._native .*C\+\+17 compiler and CMake.*pip install"):
        ShmConnector()


def test_missing_ops_name_the_order_of_installation(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import ffn_faas

    monkeypatch.setattr(ffn_faas, "__path__", [str(tmp_path)])
    monkeypatch.setattr(ops, "_library", None)
    with pytest.raises(NativeMissing, match=r"without the Attention ops .*install torch >= 2.11 first"):
        ops.load()


def test_ops_that_do_not_load_name_the_torch_at_hand(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "attention_ops.so").write_bytes(b"not a library")
    monkeypatch.setattr(native, "attention_ops_library", lambda: tmp_path / "attention_ops.so")
    monkeypatch.setattr(ops, "_library", None)
    with pytest.raises(NativeMissing, match=r"do not load into torch "):
        ops.load()


def test_a_missing_caller_of_vllms_kernel_names_the_order_of_installation(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    import ffn_faas

    monkeypatch.setattr(ffn_faas, "__path__", [str(tmp_path)])
    with pytest.raises(NativeMissing, match=r"without what calls vLLM's kernel.*install torch >= 2.11 first"):
        vllm_experts.load()
    (tmp_path / "_lib").mkdir()
    (tmp_path / "_lib" / "vllm_experts.so").write_bytes(b"not a library")
    with pytest.raises(NativeMissing, match=r"does not load into torch "):
        vllm_experts.load()


def test_a_caller_of_vllms_kernel_without_vllm_raises_and_does_not_abort() -> None:
    make = "VllmExperts((1, 32, 32), 'float32', 'silu', 'vec', scratch_bytes=1)"
    result = subprocess.run(
        [sys.executable, "-c", f"from ffn_faas.experts.kernels.vllm_experts import VllmExperts; {make}"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 1, result.stderr
    assert "vLLM's kernel cannot be called: Could not find schema for _C::cpu_fused_moe" in result.stderr
    assert "ResourceError" in result.stderr


def test_a_caller_of_vllms_kernel_made_for_another_torch_names_both(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "2.99.0+cpu")
    with pytest.raises(NativeMissing, match=r"was built for torch 2\.\d+\.\d+, this is 2\.99\.0\+cpu"):
        vllm_experts.load()
