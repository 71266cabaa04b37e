"""What a package without its compiled part says."""

import sys
from pathlib import Path

import pytest

from ffn_faas import native
from ffn_faas.attention import ops
from ffn_faas.connectors.shm import ShmConnector
from ffn_faas.errors import NativeMissing


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
