"""Each architecture's row: real configurations and checkpoint names, and layouts taken apart by hand."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from ffn_faas.errors import ModelRefused
from ffn_faas.experts.architectures import ARCHITECTURES
from ffn_faas.experts.checkpoint import Checkpoint
from ffn_faas.experts.fingerprint import fingerprint
from ffn_faas.experts.kernels import choose_kernel, create_kernel
from ffn_faas.experts.kernels.native_kernel import NativeKernel
from ffn_faas.experts.kernels.torch_kernel import TorchKernel
from ffn_faas.experts.layouts import BIASES, DOWN, DOWN_BIAS, GATE, GATE_BIAS, UP, UP_BIAS
from ffn_faas.experts.loader import StorageAccount, load_experts
from ffn_faas.experts.spec import MoESpec
from tests.data import routing, write_tensors

BASE = {"hidden_act": "silu", "torch_dtype": "bfloat16", "num_experts_per_tok": 8}
# As published: fields of config.json, then (layers with experts, first of them, experts, top k, hidden, intermediate).
PUBLISHED: dict[str, tuple[dict[str, Any], tuple[int, int, int, int, int, int], str]] = {
    "Qwen2MoeForCausalLM": (  # Qwen1.5-MoE-A2.7B
        {"num_experts": 60, "num_experts_per_tok": 4, "moe_intermediate_size": 1408, "hidden_size": 2048}
        | {"num_hidden_layers": 24, "decoder_sparse_step": 1, "intermediate_size": 5632},
        (24, 0, 60, 4, 2048, 1408),
        "model.layers.0.mlp.experts.59.gate_proj.weight",
    ),
    "Qwen3MoeForCausalLM": (  # Qwen3-30B-A3B
        {"num_experts": 128, "moe_intermediate_size": 768, "hidden_size": 2048, "num_hidden_layers": 48}
        | {"decoder_sparse_step": 1, "mlp_only_layers": []},
        (48, 0, 128, 8, 2048, 768),
        "model.layers.0.mlp.experts.127.gate_proj.weight",
    ),
    "DeepseekV2ForCausalLM": (  # DeepSeek-V2-Lite
        {"n_routed_experts": 64, "num_experts_per_tok": 6, "moe_intermediate_size": 1408, "hidden_size": 2048}
        | {"num_hidden_layers": 27, "first_k_dense_replace": 1, "moe_layer_freq": 1},
        (26, 1, 64, 6, 2048, 1408),
        "model.layers.1.mlp.experts.63.gate_proj.weight",
    ),
    "DeepseekV3ForCausalLM": (
        {"n_routed_experts": 256, "moe_intermediate_size": 2048, "hidden_size": 7168, "num_hidden_layers": 61}
        | {"first_k_dense_replace": 3, "moe_layer_freq": 1},
        (58, 3, 256, 8, 7168, 2048),
        "model.layers.3.mlp.experts.255.gate_proj.weight",
    ),
    "DeepseekV4ForCausalLM": (  # DeepSeek-V4-Flash, names as converted for Ascend
        {"n_routed_experts": 256, "num_experts_per_tok": 6, "moe_intermediate_size": 2048, "hidden_size": 4096}
        | {"num_hidden_layers": 43, "num_hash_layers": 3, "swiglu_limit": 10.0},
        (43, 0, 256, 6, 4096, 2048),
        "model.layers.0.mlp.experts.255.gate_proj.weight",
    ),
    "MixtralForCausalLM": (  # Mixtral-8x7B
        {"num_local_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 14336, "hidden_size": 4096}
        | {"num_hidden_layers": 32},
        (32, 0, 8, 2, 4096, 14336),
        "model.layers.0.block_sparse_moe.experts.7.w1.weight",
    ),
    "OlmoeForCausalLM": (  # OLMoE-1B-7B
        {"num_experts": 64, "intermediate_size": 1024, "hidden_size": 2048, "num_hidden_layers": 16},
        (16, 0, 64, 8, 2048, 1024),
        "model.layers.0.mlp.experts.63.gate_proj.weight",
    ),
    "PhiMoEForCausalLM": (  # Phi-3.5-MoE
        {"num_local_experts": 16, "num_experts_per_tok": 2, "intermediate_size": 6400, "hidden_size": 4096}
        | {"num_hidden_layers": 32},
        (32, 0, 16, 2, 4096, 6400),
        "model.layers.0.block_sparse_moe.experts.15.w1.weight",
    ),
    "Glm4MoeForCausalLM": (  # GLM-4.5-Air
        {"n_routed_experts": 128, "moe_intermediate_size": 1408, "hidden_size": 4096, "num_hidden_layers": 46}
        | {"first_k_dense_replace": 1},
        (45, 1, 128, 8, 4096, 1408),
        "model.layers.1.mlp.experts.127.gate_proj.weight",
    ),
    "Ernie4_5_MoeForCausalLM": (  # ERNIE-4.5-21B-A3B
        {"moe_num_experts": 64, "moe_k": 6, "moe_intermediate_size": 1536, "hidden_size": 2560}
        | {"num_hidden_layers": 28, "moe_layer_start_index": 1, "moe_layer_end_index": 27, "moe_layer_interval": 1},
        (27, 1, 64, 6, 2560, 1536),
        "model.layers.1.mlp.experts.63.gate_proj.weight",
    ),
    "GraniteMoeForCausalLM": (  # granite-3.0-1b-a400m
        {"num_local_experts": 32, "intermediate_size": 512, "hidden_size": 1024, "num_hidden_layers": 24},
        (24, 0, 32, 8, 1024, 512),
        "model.layers.0.block_sparse_moe.input_linear.weight",
    ),
    "GptOssForCausalLM": (  # gpt-oss-20b, in bfloat16
        {"num_local_experts": 32, "num_experts_per_tok": 4, "intermediate_size": 2880, "hidden_size": 2880}
        | {"num_hidden_layers": 24, "swiglu_limit": 7.0},
        (24, 0, 32, 4, 2880, 2880),
        "model.layers.0.mlp.experts.gate_up_proj",
    ),
    "Llama4ForCausalLM": (  # the text half of Llama-4-Maverick
        {"num_local_experts": 128, "num_experts_per_tok": 1, "intermediate_size": 8192, "hidden_size": 5120}
        | {"num_hidden_layers": 48, "interleave_moe_layer_step": 2, "intermediate_size_mlp": 16384},
        (24, 1, 128, 1, 5120, 8192),
        "model.layers.1.feed_forward.experts.gate_up_proj",
    ),
}
HIDDEN, INTER, EXPERTS = 64, 32, 4


def config(architecture: str, **changes: Any) -> dict[str, Any]:
    return {"architectures": [architecture], **BASE, **PUBLISHED[architecture][0], **changes}


def tiny(architecture: str, **changes: Any) -> MoESpec:
    """Two layers of four small experts, of which a token takes one."""
    row = ARCHITECTURES[architecture]
    sizes = {row.hidden_size: HIDDEN, row.intermediate_size: INTER, row.top_k: 1, row.num_experts[0]: EXPERTS}
    shape = {"num_hidden_layers": 2, "interleave_moe_layer_step": 1}
    return MoESpec.from_config(config(architecture, **sizes, **{**shape, **changes}))


def random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).bfloat16()


def loaded(
    tmp_path: Path, spec: MoESpec, tensors: dict[str, torch.Tensor], experts: range
) -> tuple[TorchKernel, StorageAccount]:
    write_tensors(tmp_path, {name: tensor.contiguous() for name, tensor in tensors.items()})
    kernel = TorchKernel(spec)
    return kernel, load_experts(spec, Checkpoint.open(tmp_path), experts, kernel, lambda done, total: None)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_published_configurations_are_read(architecture: str) -> None:
    _, (layers, first, *sizes), tensor = PUBLISHED[architecture]
    spec = MoESpec.from_config(config(architecture))
    assert [spec.num_experts, spec.top_k, spec.hidden_size, spec.intermediate_size] == sizes
    assert spec.num_layers == layers
    assert f".layers.{first}." in spec.layers[0]
    assert spec.expert_tensors(0, spec.num_experts - 1)[0] == tensor
    assert tensor.startswith(tuple(f"{prefix}." for prefix in spec.tensor_prefixes))


@pytest.mark.parametrize(
    ("architecture", "name"),
    [
        ("GraniteMoeForCausalLM", "model.layers.0.block_sparse_moe.router.layer.weight"),
        ("GptOssForCausalLM", "model.layers.0.mlp.router.weight"),
        ("Llama4ForCausalLM", "model.layers.1.feed_forward.shared_expert.up_proj.weight"),
        ("Ernie4_5_MoeForCausalLM", "model.layers.1.mlp.moe_statics.e_score_correction_bias"),
        ("DeepseekV3ForCausalLM", "model.layers.3.mlp.shared_experts.down_proj.weight"),
        ("Qwen2MoeForCausalLM", "model.layers.0.mlp.shared_expert_gate.weight"),
    ],
)
def test_routers_and_shared_experts_are_not_taken_for_experts(architecture: str, name: str) -> None:
    spec = MoESpec.from_config(config(architecture))
    assert not name.startswith(tuple(f"{prefix}." for prefix in spec.tensor_prefixes))


def test_stacked_experts_are_read_by_their_byte_ranges(tmp_path: Path) -> None:
    spec = tiny("GraniteMoeForCausalLM")
    stacked = {}
    for layer in range(2):
        prefix = f"model.layers.{layer}.block_sparse_moe"
        stacked[f"{prefix}.input_linear.weight"] = random(EXPERTS, 2 * INTER, HIDDEN) + layer
        stacked[f"{prefix}.output_linear.weight"] = random(EXPERTS, HIDDEN, INTER) - layer
    kernel, account = loaded(tmp_path, spec, stacked, range(1, 3))
    for layer in range(2):
        w13, w2 = kernel.layer_buffers(layer)
        assert torch.equal(w13, stacked[f"model.layers.{layer}.block_sparse_moe.input_linear.weight"][1:3])
        assert torch.equal(w2, stacked[f"model.layers.{layer}.block_sparse_moe.output_linear.weight"][1:3])
    assert account.bytes_read == 2 * 2 * 3 * HIDDEN * INTER * 2  # layers, experts, elements, bytes


def test_transposed_experts_are_turned(tmp_path: Path) -> None:
    spec = tiny("Llama4ForCausalLM")
    gate_up, down = random(EXPERTS, HIDDEN, 2 * INTER), random(EXPERTS, INTER, HIDDEN)
    prefixes = [f"model.layers.{layer}.feed_forward.experts" for layer in range(2)]
    tensors = {f"{prefix}.gate_up_proj": gate_up for prefix in prefixes}
    tensors |= {f"{prefix}.down_proj": down.clone() for prefix in prefixes}
    tensors[f"{prefixes[1]}.gate_up_proj"] = gate_up.clone()
    kernel, _ = loaded(tmp_path, spec, tensors, range(EXPERTS))
    for expert in range(EXPERTS):
        assert torch.equal(kernel.matrix_buffer(1, expert, GATE), gate_up[expert, :, :INTER].t())
        assert torch.equal(kernel.matrix_buffer(1, expert, UP), gate_up[expert, :, INTER:].t())
        assert torch.equal(kernel.matrix_buffer(1, expert, DOWN), down[expert].t())


def test_kernels_that_pack_while_they_load_get_the_same_matrices(tmp_path: Path) -> None:
    spec = tiny("Llama4ForCausalLM", num_hidden_layers=1)
    prefix = "model.layers.0.feed_forward.experts"
    gate_up, down = random(EXPERTS, HIDDEN, 2 * INTER), random(EXPERTS, INTER, HIDDEN)
    write_tensors(tmp_path, {f"{prefix}.gate_up_proj": gate_up, f"{prefix}.down_proj": down})
    kernel = NativeKernel(spec, threads=1)
    load_experts(spec, Checkpoint.open(tmp_path), range(1, 4), kernel, lambda done, total: None)
    for local, expert in enumerate(range(1, 4)):
        assert torch.equal(kernel.unpacked(0, local, GATE), gate_up[expert, :, :INTER].t())
        assert torch.equal(kernel.unpacked(0, local, UP), gate_up[expert, :, INTER:].t())
        assert torch.equal(kernel.unpacked(0, local, DOWN), down[expert].t())


def gpt_oss(tmp_path: Path, experts: range) -> tuple[TorchKernel, StorageAccount, dict[str, torch.Tensor]]:
    spec = replace(tiny("GptOssForCausalLM", num_hidden_layers=1), top_k=2)
    tensors = {
        "gate_up_proj": random(EXPERTS, HIDDEN, 2 * INTER),
        "gate_up_proj_bias": random(EXPERTS, 2 * INTER) * 4,
        "down_proj": random(EXPERTS, INTER, HIDDEN),
        "down_proj_bias": random(EXPERTS, HIDDEN) * 4,
    }
    stored = {f"model.layers.0.mlp.experts.{name}": tensor for name, tensor in tensors.items()}
    return (*loaded(tmp_path, spec, stored, experts), tensors)


def test_interleaved_experts_and_their_biases_are_taken_apart(tmp_path: Path) -> None:
    kernel, account, tensors = gpt_oss(tmp_path, range(2, 4))
    for local, expert in enumerate(range(2, 4)):
        assert torch.equal(kernel.matrix_buffer(0, local, GATE), tensors["gate_up_proj"][expert, :, 0::2].t())
        assert torch.equal(kernel.matrix_buffer(0, local, UP), tensors["gate_up_proj"][expert, :, 1::2].t())
        assert torch.equal(kernel.matrix_buffer(0, local, DOWN), tensors["down_proj"][expert].t())
        assert torch.equal(kernel.matrix_buffer(0, local, GATE_BIAS), tensors["gate_up_proj_bias"][expert, 0::2])
        assert torch.equal(kernel.matrix_buffer(0, local, UP_BIAS), tensors["gate_up_proj_bias"][expert, 1::2])
        assert torch.equal(kernel.matrix_buffer(0, local, DOWN_BIAS), tensors["down_proj_bias"][expert])
    elements = 3 * HIDDEN * INTER + 2 * INTER + HIDDEN
    assert account.bytes_read == account.resident_bytes == 2 * elements * 2


@pytest.mark.parametrize("rows", [1, 9])
def test_clamped_swiglu_with_biases_is_what_the_model_card_says(tmp_path: Path, rows: int) -> None:
    """(up + 1) * gate * sigmoid(1.702 gate), gate below 7 and up within ±7; biases are large enough to reach both."""
    kernel, _, tensors = gpt_oss(tmp_path, range(EXPERTS))
    wide = {name: tensor.double() for name, tensor in tensors.items()}
    hidden, (ids, weights) = random(rows, HIDDEN), routing(rows, EXPERTS, 2, seed=1)
    exact = torch.zeros(rows, HIDDEN, dtype=torch.float64)
    clamped = 0
    for row in range(rows):
        for expert, weight in zip(ids[row].tolist(), weights[row].double(), strict=True):
            gate_up = hidden[row].double() @ wide["gate_up_proj"][expert] + wide["gate_up_proj_bias"][expert]
            gate, up = gate_up[0::2], gate_up[1::2]
            clamped += int((gate > 7).sum() + (up.abs() > 7).sum())
            gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
            inner = (up + 1) * gate * torch.sigmoid(1.702 * gate)
            exact[row] += weight * (inner @ wide["down_proj"][expert] + wide["down_proj_bias"][expert])
    out = torch.full((rows, HIDDEN), float("nan"))
    kernel.compute(0, hidden, ids, weights, out)
    assert clamped > 0
    assert (out.double() - exact).norm() <= 0.01 * exact.norm()


@pytest.mark.parametrize(
    ("architecture", "changes", "named"),
    [
        ("GptOssForCausalLM", {"swiglu_limit": 10.0}, "swiglu_limit 10.0"),
        ("GptOssForCausalLM", {"quantization_config": {"quant_method": "mxfp4"}}, "mxfp4"),
        ("DeepseekV3ForCausalLM", {"quantization_config": {"quant_method": "fp8"}}, "fp8"),
        ("DeepseekV3ForCausalLM", {"first_k_dense_replace": "3"}, "first_k_dense_replace = '3'"),
        ("DeepseekV3ForCausalLM", {"first_k_dense_replace": 61}, "none of its 61 layers"),
        ("Llama4ForCausalLM", {"num_experts_per_tok": 2}, "2 experts per token"),
        ("Llama4ForCausalLM", {"interleave_moe_layer_step": 0}, "interleave_moe_layer_step = 0"),
        ("Ernie4_5_MoeForCausalLM", {"moe_num_experts": [64, 64]}, "moe_num_experts"),
        ("MixtralForCausalLM", {"hidden_act": "gelu"}, "'gelu'"),
        ("Llama4ForCausalLM", {"architectures": ["Llama4ForConditionalGeneration"]}, "needs torchvision"),
        ("MixtralForCausalLM", {"architectures": ["MiniMaxM2ForCausalLM"]}, "MiniMaxM2.*no sigmoid scores"),
    ],
)
def test_what_cannot_be_served_is_refused_by_name(architecture: str, changes: dict[str, Any], named: str) -> None:
    with pytest.raises(ModelRefused, match=named):
        MoESpec.from_config(config(architecture, **changes))


def test_fields_that_config_json_leaves_out_have_the_defaults_of_the_architecture() -> None:
    ernie = config("Ernie4_5_MoeForCausalLM")
    for field in ("moe_layer_start_index", "moe_layer_end_index", "moe_layer_interval"):
        del ernie[field]
    assert MoESpec.from_config(ernie).num_layers == 28
    assert MoESpec.from_config({**ernie, "moe_layer_end_index": 9, "moe_layer_interval": 2}).num_layers == 5


def test_a_kernel_that_does_not_carry_an_activation_or_biases_says_so(caplog: pytest.LogCaptureFixture) -> None:
    spec = tiny("GptOssForCausalLM")
    with pytest.raises(ModelRefused, match=r"native kernel does not carry the expert biases and activation swigluoai"):
        create_kernel("native", spec)
    with caplog.at_level(logging.INFO):
        assert choose_kernel("auto", spec) == "torch"
    assert choose_kernel("torch", spec) == "torch"


def test_a_fingerprint_samples_the_router_beside_stacked_experts(tmp_path: Path) -> None:
    spec = tiny("GraniteMoeForCausalLM", num_hidden_layers=1)
    prefix = "model.layers.0.block_sparse_moe"
    tensors = {
        f"{prefix}.input_linear.weight": random(EXPERTS, 2 * INTER, HIDDEN),
        f"{prefix}.output_linear.weight": random(EXPERTS, HIDDEN, INTER),
        f"{prefix}.router.layer.weight": random(EXPERTS, HIDDEN),
    }
    digests = []
    for name in (None, f"{prefix}.router.layer.weight"):
        changed = {key: tensor + (key == name) for key, tensor in tensors.items()}
        directory = tmp_path / str(name is None)
        directory.mkdir()
        write_tensors(directory, changed)
        digests.append(fingerprint(spec, Checkpoint.open(directory)).checkpoint)
    assert digests[0] != digests[1]


def test_matrices_of_an_expert_count_in_its_bytes() -> None:
    spec = tiny("GptOssForCausalLM")
    assert set(spec.matrices) == {GATE, UP, DOWN, *BIASES}
    assert spec.expert_bytes == 2 * (3 * HIDDEN * INTER + 2 * INTER + HIDDEN)


def test_a_swiglu_limit_is_part_of_what_both_sides_compare_and_the_torch_kernel_keeps_to_it() -> None:
    spec = tiny("DeepseekV4ForCausalLM", swiglu_limit=0.25)
    assert spec.swiglu_limit == 0.25
    assert fingerprint(spec, None).activation == "silu clamped at 0.25"
    kernel = TorchKernel(spec)
    kernel.allocate(range(EXPERTS))
    matrices = [random(*spec.matrix_shape(matrix)) for matrix in spec.matrices]
    for layer in range(spec.num_layers):
        for expert in range(EXPERTS):
            for matrix, values in zip(spec.matrices, matrices, strict=True):
                kernel.matrix_buffer(layer, expert, matrix).copy_(values)
        kernel.finish_layer(layer)
    kernel.finish()
    x, out = random(3, HIDDEN), torch.empty(3, HIDDEN)
    kernel.compute(0, x, torch.zeros(3, 1, dtype=torch.int32), torch.ones(3, 1), out)
    gate, up, down = (values.double() for values in matrices)
    left, right = (x.double() @ gate.t()).clamp(max=0.25), (x.double() @ up.t()).clamp(-0.25, 0.25)
    expected = (left * torch.sigmoid(left) * right) @ down.t()
    assert torch.allclose(out.double(), expected, rtol=1e-2, atol=1e-3)
    assert not torch.allclose((x.double() @ up.t()), right), "nothing was clamped: the test says nothing"


@pytest.mark.parametrize("kernel", ["native", "vllm"])
def test_kernels_without_the_limit_refuse_it_by_name_and_auto_takes_one_that_has_it(kernel: str) -> None:
    spec = tiny("DeepseekV4ForCausalLM", swiglu_limit=7.5)
    with pytest.raises(ModelRefused, match=r"SwiGLU limit 7.5"):
        create_kernel(kernel, spec)
    assert choose_kernel("auto", spec) == "torch"


@pytest.mark.parametrize("limit", [0, -1.0, "ten", True, float("inf")])
def test_a_swiglu_limit_that_is_none_is_refused(limit: object) -> None:
    with pytest.raises(ModelRefused, match="swiglu_limit"):
        tiny("DeepseekV4ForCausalLM", swiglu_limit=limit)
