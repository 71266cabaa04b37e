"""Which tests need an NPU, and why they are skipped where there is none."""

from __future__ import annotations

import importlib.util
import os

import pytest

REASONS = [
    reason
    for holds, reason in (
        (importlib.util.find_spec("torch_npu") is not None, "torch_npu is not installed"),
        (os.environ.get("SOC_VERSION", "").lower() in ("910c", "ascend910_93"), "SOC_VERSION is not 910c"),
    )
    if not holds
]
ON_DEVICE = [pytest.mark.npu, pytest.mark.skipif(bool(REASONS), reason="; ".join(REASONS))]
