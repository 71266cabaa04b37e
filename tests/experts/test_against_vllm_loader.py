"""The resident weights equal, byte for byte, what stock vLLM loads from the same directory."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from ffn_faas.experts.checkpoint import Checkpoint
from ffn_faas.experts.kernels.torch_kernel import TorchKernel
from ffn_faas.experts.loader import load_experts
from ffn_faas.experts.spec import MoESpec
from ffn_faas.protocol.topology import expert_range
from tests.data import TinyModel

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
]


@pytest.mark.parametrize(
    ("shards", "dtype", "extra"),
    [
        (1, "bfloat16", {}),
        (3, "bfloat16", {"mlp_only_layers": [0]}),
        (1, "float32", {}),
    ],
)
def test_loaded_weights_equal_those_of_vllm_byte_for_byte(
    tmp_path: Path, shards: int, dtype: str, extra: dict[str, object]
) -> None:
    model = TinyModel(layers=3, dtype=dtype, extra=extra)
    directory, dump = model.write(tmp_path / "model", shards), tmp_path / "vllm.safetensors"
    command = [sys.executable, "-m", "tests.experts.vllm_weights", str(directory), str(dump)]
    result = subprocess.run(
        command, cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=240, check=False
    )
    assert result.returncode == 0, result.stderr[-4000:]
    theirs = load_file(dump)
    spec = MoESpec.from_model_dir(directory)
    assert {name.rsplit(".", 1)[0] for name in theirs} == set(spec.layers)
    for rank in range(2):
        experts = expert_range(spec.num_experts, 2, rank)
        kernel = TorchKernel(spec)
        load_experts(spec, Checkpoint.open(directory), experts, kernel, lambda done, total: None)
        for layer, name in enumerate(spec.layers):
            for ours, matrix in zip(kernel.layer_buffers(layer), ("w13", "w2"), strict=True):
                expected = theirs[f"{name}.{matrix}"][experts.start : experts.stop]
                assert ours.dtype == expected.dtype
                assert torch.equal(ours.view(torch.uint8), expected.view(torch.uint8))
