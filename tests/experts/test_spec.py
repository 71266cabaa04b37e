from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ffn_faas.errors import ModelRefused, UsageError
from ffn_faas.experts.spec import MoESpec
from tests.data import TinyModel

MODEL = TinyModel(layers=4)


def test_qwen3_config_becomes_a_spec() -> None:
    spec = MoESpec.from_config(MODEL.config())
    assert (spec.hidden_size, spec.intermediate_size, spec.num_experts, spec.top_k) == (64, 32, 8, 2)
    assert spec.layers == tuple(f"model.layers.{layer}.mlp.experts" for layer in range(4))
    assert spec.expert_bytes == 3 * 64 * 32 * 2
    assert spec.expert_tensors(3, 7) == (
        "model.layers.3.mlp.experts.7.gate_proj.weight",
        "model.layers.3.mlp.experts.7.up_proj.weight",
        "model.layers.3.mlp.experts.7.down_proj.weight",
    )


def test_expert_count_under_its_newer_name_is_read() -> None:
    config = MODEL.config(num_local_experts=8)
    del config["num_experts"]
    assert MoESpec.from_config(config).num_experts == 8


@pytest.mark.parametrize(
    ("changes", "layers"),
    [
        ({"decoder_sparse_step": 2}, [1, 3]),
        ({"mlp_only_layers": [0, 2]}, [1, 3]),
        ({"mlp_only_layers": None}, [0, 1, 2, 3]),
        ({"decoder_sparse_step": 2, "mlp_only_layers": [3]}, [1]),
    ],
)
def test_dense_layers_are_left_out(changes: dict[str, Any], layers: list[int]) -> None:
    spec = MoESpec.from_config(MODEL.config(**changes))
    assert spec.layers == tuple(f"model.layers.{layer}.mlp.experts" for layer in layers)


def test_mixtral_names_its_experts_differently() -> None:
    config = {
        "architectures": ["MixtralForCausalLM"],
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "num_hidden_layers": 1,
        "hidden_act": "silu",
        "torch_dtype": "float16",
    }
    spec = MoESpec.from_config(config)
    assert spec.expert_tensors(0, 1) == tuple(
        f"model.layers.0.block_sparse_moe.experts.1.{matrix}.weight" for matrix in ("w1", "w3", "w2")
    )


@pytest.mark.parametrize(
    ("stored", "asked", "dtype"),
    [
        ({"torch_dtype": "bfloat16"}, "auto", "bfloat16"),
        ({"torch_dtype": None, "dtype": "float16"}, "auto", "float16"),
        ({"torch_dtype": "float32"}, "auto", "bfloat16"),  # as vLLM
        ({"torch_dtype": "bfloat16"}, "float32", "float32"),
        ({"torch_dtype": "bfloat16"}, "half", "float16"),
        ({"torch_dtype": None}, "float", "float32"),
    ],
)
def test_dtype_follows_the_rules_of_vllm(stored: dict[str, Any], asked: str, dtype: str) -> None:
    assert MoESpec.from_config(MODEL.config(**stored), asked).dtype == dtype


def test_unnamed_dtype_is_asked_for() -> None:
    with pytest.raises(UsageError, match="--dtype"):
        MoESpec.from_config(MODEL.config(torch_dtype=None))
    with pytest.raises(UsageError, match="int8"):
        MoESpec.from_config(MODEL.config(), "int8")


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"architectures": ["LlamaForCausalLM"], "num_experts": None}, "LlamaForCausalLM is unknown"),
        ({"architectures": None}, "no architecture"),
        ({"architectures": []}, "no architecture"),
        ({"quantization_config": {"quant_method": "fp8"}}, "fp8"),
        ({"compression_config": {}, "quantization_config": {"bits": 4}}, "unnamed"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"num_experts_per_tok": 9}, "num_experts_per_tok 9 .* 8 experts"),
        ({"num_experts": 0}, "num_experts = 0"),
        ({"hidden_size": "64"}, "hidden_size = '64'"),
        ({"hidden_size": True}, "hidden_size = True"),
        ({"moe_intermediate_size": None}, "moe_intermediate_size = None"),
        ({"num_hidden_layers": -1}, "num_hidden_layers = -1"),
        ({"num_hidden_layers": 1 << 40}, "num_hidden_layers"),
        ({"decoder_sparse_step": 0}, "decoder_sparse_step = 0"),
        ({"mlp_only_layers": [0, 1, 2, 3]}, "none of its 4 layers"),
        ({"mlp_only_layers": "all"}, "mlp_only_layers is 'all'"),
        ({"torch_dtype": "float8_e4m3fn"}, "float8_e4m3fn"),
    ],
)
def test_what_cannot_be_served_is_refused_by_name(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(ModelRefused, match=named) as caught:
        MoESpec.from_config(MODEL.config(**changes), name="/models/odd")
    assert "/models/odd" in str(caught.value)


def test_dense_model_is_told_that_it_has_no_experts() -> None:
    config = {"architectures": ["LlamaForCausalLM"], "hidden_size": 64}
    with pytest.raises(ModelRefused, match=r"LlamaForCausalLM.* not a Mixture-of-Experts"):
        MoESpec.from_config(config)


@pytest.mark.parametrize("text", ["", "{", "[" * 100_000, "\xff", "[]", "1" * 5000])
def test_broken_config_json_is_one_clear_error(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text, encoding="latin-1")
    with pytest.raises((UsageError, ModelRefused), match=r"config\.json"):
        MoESpec.from_model_dir(tmp_path)


def test_directory_without_config_is_a_usage_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"config\.json"):
        MoESpec.from_model_dir(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(MODEL.config()))
    assert MoESpec.from_model_dir(tmp_path).architecture == "Qwen3MoeForCausalLM"
