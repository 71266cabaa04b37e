"""The resident weights equal, byte for byte, what stock vLLM loads from the same directory."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from ffn_faas.attention.loader import checkpoint_names
from ffn_faas.demo.checkpoint import make_checkpoint
from ffn_faas.demo.families import FAMILIES
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
QWEN3_MOE = {
    "one-file": (1, TinyModel(layers=3)),
    "three-files-and-a-dense-layer": (3, TinyModel(layers=3, extra={"mlp_only_layers": [0]})),
    "float32": (1, TinyModel(layers=3, dtype="float32")),
}


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, dict[str, torch.Tensor]]]:
    """Each model's directory, and what vLLM holds of it; all in one process, which imports vLLM once."""
    root = tmp_path_factory.mktemp("models")
    models = {name: model.write(root / name, shards) for name, (shards, model) in QWEN3_MOE.items()}
    for arch in FAMILIES:
        make_checkpoint(root / arch, arch, num_experts=8)
        models[arch] = root / arch
    pairs = [str(path) for name, model in models.items() for path in (model, root / f"{name}.safetensors")]
    result = subprocess.run(
        [sys.executable, "-m", "tests.experts.vllm_weights", *pairs],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert result.returncode == 0, result.stderr[-4000:]
    return {name: (model, load_file(root / f"{name}.safetensors")) for name, model in models.items()}


@pytest.mark.parametrize("name", [*QWEN3_MOE, *FAMILIES])
def test_loaded_weights_equal_those_of_vllm_byte_for_byte(
    loaded: dict[str, tuple[Path, dict[str, torch.Tensor]]], name: str
) -> None:
    directory, theirs = loaded[name]
    spec = MoESpec.from_model_dir(directory)
    built = list(dict.fromkeys(tensor.rsplit(".", 1)[0] for tensor in theirs))
    assert sorted(checkpoint_names(built, spec.layers)) == sorted(spec.layers)
    vllm_names = dict(zip(checkpoint_names(built, spec.layers), built, strict=True))
    for rank in range(2):
        experts = expert_range(spec.num_experts, 2, rank)
        kernel = TorchKernel(spec)
        load_experts(spec, Checkpoint.open(directory), experts, kernel, lambda done, total: None)
        for layer, prefix in enumerate(spec.layers):
            ours = dict(zip(("w13", "w2"), kernel.layer_buffers(layer), strict=True))
            if spec.has_bias:
                ours.update(zip(("w13_bias", "w2_bias"), kernel.layer_biases(layer), strict=True))
            assert {f"{vllm_names[prefix]}.{matrix}" for matrix in ours} <= set(theirs)
            for matrix, held in ours.items():
                expected = theirs[f"{vllm_names[prefix]}.{matrix}"][experts.start : experts.stop]
                if matrix.startswith("w13") and spec.activation == "swigluoai":
                    expected = torch.cat([expected[:, 0::2], expected[:, 1::2]], dim=1)  # vLLM keeps them interleaved
                assert held.dtype == expected.dtype
                assert torch.equal(held.view(torch.uint8), expected.contiguous().view(torch.uint8))
