from __future__ import annotations

import json
import mmap
from pathlib import Path
from typing import Any

import pytest

from ffn_faas.afd_block import AfdBlock
from ffn_faas.attention import loader
from ffn_faas.attention.loader import ExpertFilter, LoaderOptions, attach_message, check_shapes, checkpoint_names
from ffn_faas.errors import HandshakeRefused, ModelRefused, UsageError
from ffn_faas.experts.spec import MoESpec
from tests.data import TinyModel

from .fake_f import FINGERPRINT

SPEC = MoESpec(
    architecture="Qwen3MoeForCausalLM",
    hidden_size=8,
    intermediate_size=4,
    num_experts=4,
    top_k=2,
    dtype="bfloat16",
    activation="silu",
    quantization="none",
    layers=("model.layers.1.mlp.experts", "model.layers.11.mlp.experts"),
)


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.1.mlp.experts.0.down_proj.weight",
        "model.layers.11.mlp.experts.3.gate_proj.weight_scale",
        "model.layers.1.mlp.experts.gate_up_proj",
        "model.layers.1.mlp.experts.down_proj_bias",
    ],
)
def test_everything_under_a_remote_layer_is_dropped(name: str) -> None:
    assert ExpertFilter(SPEC.layers).drops(name)


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.1.mlp.gate.weight",
        "model.layers.1.mlp.shared_experts.down_proj.weight",
        "model.layers.1.mlp.experts.e_score_correction_bias",
        "model.layers.0.mlp.experts.0.down_proj.weight",
        "model.layers.111.mlp.experts.0.down_proj.weight",
        "lm_head.weight",
    ],
)
def test_everything_else_is_kept(name: str) -> None:
    assert not ExpertFilter(SPEC.layers).drops(name)


def test_a_filter_without_layers_keeps_all() -> None:
    assert not ExpertFilter(()).drops("model.layers.1.mlp.experts.0.down_proj.weight")


def test_expert_tensors_are_skipped_before_they_are_read(tmp_path: Path) -> None:
    import torch
    from safetensors.torch import save_file

    kept = {"lm_head.weight": torch.arange(6.0).reshape(2, 3), "model.layers.1.mlp.gate.weight": torch.ones(4, 8)}
    experts = {f"model.layers.1.mlp.experts.{expert}.down_proj.weight": torch.ones(4) for expert in range(3)}
    save_file(kept, tmp_path / "model-00002-of-00002.safetensors")
    save_file(experts, tmp_path / "model-00001-of-00002.safetensors")
    dropping = ExpertFilter(SPEC.layers)
    read = dict(dropping.read(tmp_path.glob("*.safetensors")))
    assert set(read) == set(kept)
    assert all(torch.equal(read[name], kept[name]) for name in kept)
    assert dropping.dropped == 3


def test_pages_of_dropped_tensors_stay_out_of_memory(tmp_path: Path) -> None:
    """Counted by the kernel: the major part of the file is experts, and reading the rest faults none of it in."""
    import torch
    from safetensors.torch import save_file

    megabyte = 1 << 20
    tensors = {"a.weight": torch.zeros(16), "model.layers.1.mlp.experts.0.down_proj.weight": torch.ones(8 * megabyte)}
    path = tmp_path / "model.safetensors"
    save_file(tensors, path)
    before = _resident_file_bytes()
    held = list(ExpertFilter(SPEC.layers).read([path]))
    assert len(held) == 1
    assert _resident_file_bytes() - before < 4 * megabyte < path.stat().st_size


def _resident_file_bytes() -> int:
    fields = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
    return int(fields["RssFile"].split()[0]) * 1024 // mmap.PAGESIZE * mmap.PAGESIZE


def test_layers_are_named_as_the_checkpoint_names_them() -> None:
    built = ["language_model.model.layers.11.feed_forward.experts", "model.layers.1.block_sparse_moe.experts"]
    assert checkpoint_names(built, SPEC.layers) == [SPEC.layers[1], SPEC.layers[0]]


def test_a_layer_that_the_checkpoint_does_not_know_keeps_its_name() -> None:
    assert checkpoint_names(["model.layers.7.mlp.experts", "a"], SPEC.layers) == ["model.layers.7.mlp.experts", "a"]


def test_two_layers_with_one_number_are_not_both_matched() -> None:
    built = ["model.layers.1.mlp.experts", "model.layers.1.mlp.vision_experts"]
    assert checkpoint_names(built, SPEC.layers) == [SPEC.layers[0], built[1]]


def test_a_model_that_f_cannot_serve_is_refused_on_attention_in_the_same_words(tmp_path: Path) -> None:
    config = TinyModel().config(quantization_config={"quant_method": "mxfp4"})
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelRefused, match="'mxfp4' cannot be served") as on_attention:
        loader.Model.read(str(tmp_path), None, "bfloat16", dummy=False)
    with pytest.raises(ModelRefused) as on_f:
        MoESpec.from_model_dir(tmp_path)
    assert str(on_attention.value) == str(on_f.value)


def test_options_of_the_load_format() -> None:
    assert LoaderOptions.parse({}, None) == LoaderOptions(dummy=False)
    assert LoaderOptions.parse({"dummy": True}, "lazy") == LoaderOptions(dummy=True)


@pytest.mark.parametrize(
    ("extra", "strategy", "named"),
    [
        ({"enable_multithread_load": True}, None, "enable_multithread_load"),
        ({"dummy": "yes"}, None, "dummy is 'yes'"),
        ({}, "eager", "--safetensors-load-strategy eager"),
        ({}, "prefetch", "--safetensors-load-strategy prefetch"),
    ],
)
def test_options_that_cannot_be_kept_are_refused(extra: dict[str, Any], strategy: str | None, named: str) -> None:
    with pytest.raises(UsageError, match=named):
        LoaderOptions.parse(extra, strategy)


def test_a_layer_of_another_shape_than_the_checkpoint_names_both_values() -> None:
    check_shapes(SPEC, "layer", 8, 4, 4, 2)
    with pytest.raises(HandshakeRefused, match=r"layer: top k is 3 in vLLM and 2 in config.json"):
        check_shapes(SPEC, "layer", 8, 4, 4, 3)


@pytest.mark.parametrize(
    ("extra", "batched", "capacity", "required"),
    [({}, 256, 256, False), ({}, 65536, 4096, False), ({"capacity": 32}, 256, 32, True)],
)
def test_capacity_is_what_the_user_asked_for_or_what_a_batch_needs(
    extra: dict[str, Any], batched: int, capacity: int, required: bool
) -> None:
    block = AfdBlock.from_additional_config(
        {"afd": {"role": "attention", "connector_extra_config": extra}}, "attention"
    )
    assert block is not None
    attach = attach_message(block, loader.Model(SPEC, FINGERPRINT), "vllm 0.32.0", batched)
    assert (attach.capacity, attach.capacity_is_required) == (capacity, required)


def test_workers_without_a_deployment_never_share_an_instance_name() -> None:
    block = AfdBlock(role="attention")
    names = {attach_message(block, loader.Model(SPEC, FINGERPRINT), "vllm", 8).instance for _ in range(8)}
    assert len(names) == 8


def test_a_model_is_described_from_its_directory_alone(tmp_path: Path) -> None:
    config = {
        "architectures": ["Qwen3MoeForCausalLM"],
        "hidden_size": 64,
        "moe_intermediate_size": 32,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "num_hidden_layers": 2,
        "hidden_act": "silu",
        "torch_dtype": "bfloat16",
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    model = loader.Model.read(str(tmp_path), None, "float16", dummy=True)
    assert (model.fingerprint.checkpoint, model.fingerprint.dtype, model.fingerprint.num_moe_layers) == (
        "dummy",
        "float16",
        2,
    )
