from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ffn_faas.cli import main
from tests.data import TinyModel

QWEN3_30B = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "decoder_sparse_step": 1,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "mlp_only_layers": [],
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
    "torch_dtype": "bfloat16",
}
DEEPSEEK_V3 = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "first_k_dense_replace": 3,
    "hidden_act": "silu",
    "hidden_size": 7168,
    "moe_intermediate_size": 2048,
    "moe_layer_freq": 1,
    "n_routed_experts": 256,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "torch_dtype": "bfloat16",
}
GPT_OSS_20B = {
    "architectures": ["GptOssForCausalLM"],
    "hidden_act": "silu",
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 24,
    "num_local_experts": 32,
    "swiglu_limit": 7.0,
    "torch_dtype": "bfloat16",
}


def directory(tmp_path: Path, config: dict[str, Any]) -> str:
    (tmp_path / "config.json").write_text(json.dumps(config))
    return str(tmp_path)


def answer(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, dict[str, Any]]:
    code = main(["check", *argv, "--json"])
    return code, json.loads(capsys.readouterr().out)


@pytest.mark.parametrize(
    ("config", "layers", "elements_per_layer"),
    [
        (QWEN3_30B, 48, 128 * 3 * 2048 * 768),
        (DEEPSEEK_V3, 58, 256 * 3 * 7168 * 2048),
        (GPT_OSS_20B, 24, 32 * (3 * 2880 * 2880 + 2 * 2880 + 2880)),
    ],
)
def test_bytes_of_real_models_are_exact_from_config_json_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], config: dict[str, Any], layers: int, elements_per_layer: int
) -> None:
    code, figures = answer(capsys, directory(tmp_path, config), "--ffn-ranks", "3")
    assert code == 0
    assert figures["checked"] == "config"
    assert figures["moe_layers"] == layers
    assert figures["expert_bytes"] == layers * elements_per_layer * 2
    assert sum(rank["weight_bytes"] for rank in figures["ranks"]) == figures["expert_bytes"]
    assert figures["refused"] == []


def test_experts_are_dealt_out_as_serve_does(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, figures = answer(capsys, directory(tmp_path, QWEN3_30B), "--ffn-ranks", "3")
    dealt = [(rank["first_expert"], rank["last_expert"], rank["num_experts"]) for rank in figures["ranks"]]
    assert dealt == [(0, 42, 43), (43, 85, 43), (86, 127, 42)]


def test_windows_grow_with_capacity_sessions_and_attention_ranks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = directory(tmp_path, QWEN3_30B)
    flags = ["--ffn-ranks", "1", "--capacity", "100", "--sessions", "3", "--attention-ranks", "2"]
    _, figures = answer(capsys, model, *flags)
    pair = figures["window_bytes_per_pair"]
    row = 2048 * 2 + 8 * 4 + 8 * 4 + 2048 * 4  # hidden row, ids, weights, partial row
    assert 100 * row <= pair <= 100 * row + 4096
    assert figures["ranks"][0]["window_bytes"] == 3 * 2 * pair


def test_workspace_is_bounded_by_the_largest_item(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = directory(tmp_path, QWEN3_30B)
    sizes = []
    for flags in (["--capacity", "512"], ["--capacity", "4096"], ["--capacity", "65536"]):
        _, figures = answer(capsys, model, "--ffn-ranks", "1", *flags)
        sizes.append(figures["ranks"][0]["workspace_bytes"])
    assert sizes[0] == 512 * 8 * 4 * (2 * 2048 + 3 * 768)
    assert sizes[1] == sizes[2] == 8 * sizes[0]


def test_checkpoint_headers_are_checked_when_they_are_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = TinyModel(dtype="float32")
    code, figures = answer(capsys, str(model.write(tmp_path, shards=2)), "--ffn-ranks", "2")
    elements = 2 * 8 * 3 * 64 * 32
    assert code == 0
    assert figures["checked"] == "headers"
    assert figures["stored_expert_bytes"] == elements * 4
    assert figures["expert_bytes"] == elements * 2  # served as vLLM does: in bfloat16


def test_an_index_without_its_files_is_checked_by_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    TinyModel().write(tmp_path, shards=2)
    for file in tmp_path.glob("*.safetensors"):
        file.unlink()
    code, figures = answer(capsys, str(tmp_path), "--ffn-ranks", "2")
    assert (code, figures["checked"]) == (0, "index")
    index = tmp_path / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    del content["weight_map"]["model.layers.1.mlp.experts.7.up_proj.weight"]
    index.write_text(json.dumps(content))
    code, figures = answer(capsys, str(tmp_path), "--ffn-ranks", "2")
    assert code == 3
    assert "lacks expert tensor model.layers.1.mlp.experts.7.up_proj.weight" in figures["refused"][0]


@pytest.mark.parametrize(
    ("changes", "flags", "named"),
    [
        ({"quantization_config": {"quant_method": "mxfp4"}}, [], "'mxfp4'"),
        ({"architectures": ["UnheardOfForCausalLM"]}, [], "UnheardOfForCausalLM is unknown"),
        ({}, ["--ffn-ranks", "129"], "129 F ranks for 128 experts"),
        ({}, ["--window-memory", "48MiB"], "50594560 bytes are needed on each F rank, --window-memory allows 50331648"),
        ({"hidden_size": 2040}, ["--moe-kernel", "vllm"], "hidden size divisible by 32"),
        ({"moe_intermediate_size": 1 << 14}, ["--moe-kernel", "vllm"], "cannot address 128 experts"),
    ],
)
def test_what_is_refused_is_named_and_ends_as_serve_would(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], changes: dict[str, Any], flags: list[str], named: str
) -> None:
    code, figures = answer(capsys, directory(tmp_path, {**QWEN3_30B, **changes}), "--ffn-ranks", "1", *flags)
    assert code == 3
    assert any(named in reason for reason in figures["refused"])


def test_native_kernel_does_not_carry_what_gpt_oss_needs_and_auto_takes_another(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = directory(tmp_path, GPT_OSS_20B)
    code, figures = answer(capsys, model, "--ffn-ranks", "1", "--moe-kernel", "native")
    assert code == 3
    assert "native kernel does not carry the expert biases and activation swigluoai" in figures["refused"][0]
    code, figures = answer(capsys, model, "--ffn-ranks", "1")
    assert (code, figures["moe_kernel"]) == (0, "torch")


def test_text_answer_names_every_rank_and_its_bytes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", directory(tmp_path, QWEN3_30B), "--ffn-ranks", "2"]) == 0
    text = capsys.readouterr().out
    assert "48 layers x 128 experts" in text
    assert "57982058496 bytes" in text
    assert "0-63 (64)" in text
    assert "64-127 (64)" in text


def test_usage_errors_end_with_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", str(tmp_path / "nowhere"), "--ffn-ranks", "1"]) == 2
    assert main(["check", directory(tmp_path, QWEN3_30B), "--ffn-ranks", "0"]) == 2
    assert "--ffn-ranks is 0" in capsys.readouterr().err
