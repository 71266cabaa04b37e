"""Quantized experts come from files by their names and shapes, and what does not fit is refused before it is read."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("torch")

import torch
from safetensors.torch import load_file, save_file

from ffn_faas.ascend.checkpoint import load
from ffn_faas.errors import ModelRefused, UsageError
from ffn_faas.experts.checkpoint import Checkpoint
from ffn_faas.experts.spec import MoESpec
from tests.cam.model import TinyModel

MODEL = TinyModel(hidden=32, inter=16, experts=2, top_k=1, layers=3)
GATE = "model.layers.1.mlp.experts.0.gate_proj"


@pytest.fixture(params=["W4A8_DYNAMIC", "W8A8_DYNAMIC"])
def directory(request, tmp_path):
    return MODEL.write(tmp_path, request.param)


def read(directory, experts=range(2)):
    spec = MoESpec.from_model_dir(directory)
    return load(spec, Checkpoint.open(directory), experts, "cpu", lambda done, total: None)


def test_layers_and_experts_lie_as_the_operators_take_them(directory):
    int4 = "W4A8" in directory.name
    assert MoESpec.from_model_dir(directory).quantization == ("w4a8" if int4 else "w8a8")
    resident = read(directory)
    assert [len(tensors) for tensors in (resident.w13, resident.w2, resident.w13_bias)] == [2, 2, 2 if int4 else 0]
    if int4:
        assert resident.w13[0].shape == (2, 32, 2 * 16 // 8)
        assert resident.w2[0].shape == (2, 16, 32 // 8)
        assert resident.w2_scale[0].shape == (2, 1, 32)
        assert resident.w13_scale[0].dtype == torch.int64
    else:
        assert resident.w13[0].shape == (2, 32, 2 * 16)
        assert resident.w2[0].shape == (2, 16, 32)
        assert resident.w2_scale[0].dtype == torch.bfloat16
        assert resident.w2_bias[0].dtype == torch.int32
    assert resident.nbytes == sum(t.numel() * t.element_size() for t in resident.tensors)


def test_a_nibble_is_where_the_contract_says(tmp_path):
    """On disk two outputs to a byte, the even one low; in a word eight outputs, the first in the lowest bits."""
    directory = MODEL.write(tmp_path, "W4A8_DYNAMIC")
    path = directory / "model.safetensors"
    tensors = load_file(path)
    packed = torch.zeros_like(tensors[f"{GATE}.weight"])
    packed[1, 5] = 0x3C  # outputs 2 and 3 of input 5: -4 and 3
    tensors[f"{GATE}.weight"] = packed
    save_file(tensors, path)
    words = read(directory).w13[0][0]
    assert words[5, 0] == (0xC << 8) | (3 << 12)
    assert words[:, 0].count_nonzero() == 1


def test_a_rank_reads_its_own_experts_only(directory):
    both, second = read(directory), read(directory, range(1, 2))
    for layer in range(2):
        assert torch.equal(both.w13[layer][1:], second.w13[layer])
        assert torch.equal(both.w2_scale[layer][1:], second.w2_scale[layer])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda tensors: tensors.pop(f"{GATE}.weight_scale"), f"lacks expert tensor {GATE}.weight_scale"),
        (lambda tensors: tensors.update({f"{GATE}.weight": torch.zeros(3, 3, dtype=torch.int8)}), r"is I8 \[3, 3\]"),
        (lambda tensors: tensors.update({f"{GATE}.weight": tensors[f"{GATE}.weight"].float()}), "is F32"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(directory, change, words):
    path = directory / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)
    with pytest.raises(ModelRefused, match=words):
        read(directory)


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({f"{GATE}.weight": "W8A8"}, ModelRefused, "experts of kind 'W8A8' cannot be served"),
        ({"group_size": 256}, ModelRefused, "group_size is 256"),
        (None, UsageError, "cannot read"),
    ],
)
def test_a_description_that_cannot_be_served_is_refused(directory, change, error, words):
    path = directory / "quant_model_description.json"
    path.write_text("{" if change is None else json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(error, match=words):
        MoESpec.from_model_dir(directory)


def test_without_experts_in_the_description_the_model_is_a_plain_one(directory):
    path = directory / "quant_model_description.json"
    path.write_text(json.dumps(dict.fromkeys(json.loads(path.read_text()), "FLOAT")))
    assert MoESpec.from_model_dir(directory).quantization == "none"
