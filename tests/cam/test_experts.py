"""What F computes beside the two products: a limit of the activation, the routed scale; and which NPU a rank takes."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

import torch

from ffn_faas import native
from ffn_faas.ascend.checkpoint import load
from ffn_faas.ascend.device import npu_index
from ffn_faas.ascend.experts import Arithmetic, LayeredExperts
from ffn_faas.ascend.op_module import twin_module
from ffn_faas.ascend.step import farewell_layer, layer_numbers, slot_table
from ffn_faas.errors import LaunchDisagreement, ModelRefused, ResourceError, UsageError
from ffn_faas.experts.checkpoint import Checkpoint
from ffn_faas.experts.spec import MoESpec
from tests.cam import oracle
from tests.cam.model import Reference, TinyModel

MODEL = TinyModel(experts=2, top_k=1, layers=3)
needs_twin = pytest.mark.skipif(native.optional_library("cam_twin") is None, reason="built without the twin")
LAYER = 1
LIMIT = 0.5
"""So low that most gates and ups meet it."""


class Rank:
    """One F rank's experts, called as a step calls them: two rows for expert 0, one for expert 1."""

    def __init__(self, tmp_path, kind):
        directory = MODEL.write(tmp_path / "model", kind)
        self.spec = MoESpec.from_model_dir(directory)
        self.reference = Reference(directory)
        self.ops = twin_module(tmp_path)
        experts = range(MODEL.experts)
        self.weights = load(self.spec, Checkpoint.open(directory), experts, "cpu", lambda done, total: None)
        self.rows = oracle.quantized(torch.randn(3, MODEL.hidden, generator=torch.Generator().manual_seed(1)).numpy())

    def computed(self, **arithmetic):
        experts = LayeredExperts(self.ops, self.weights, Arithmetic(self.spec.dtype, **arithmetic))
        x, scales = torch.from_numpy(self.rows.q.copy()), torch.from_numpy(self.rows.scale.copy())
        slot = slot_table(MODEL.numbers, "cpu").index_select(0, torch.tensor([LAYER]))
        return experts(x, scales, torch.tensor([2, 1]), slot)

    def expected(self, limit=None):
        parts = []
        for expert, which in ((0, slice(0, 2)), (1, slice(2, 3))):
            rows = oracle.Quantized(self.rows.q[which], self.rows.scale[which])
            parts.append(torch.from_numpy(self.reference._expert(LAYER, expert)(rows, limit)))
        return torch.cat(parts).to(torch.bfloat16)


@needs_twin
@pytest.mark.parametrize("kind", ["W4A8_DYNAMIC", "W8A8_DYNAMIC"])
def test_without_a_limit_the_two_operators_give_the_oracles_bits(tmp_path, kind):
    rank = Rank(tmp_path, kind)
    assert torch.equal(rank.computed(), rank.expected())


@needs_twin
def test_a_limit_is_applied_to_gate_and_up_and_is_never_silently_left_out(tmp_path):
    rank = Rank(tmp_path, "W4A8_DYNAMIC")
    limited = rank.computed(swiglu_limit=LIMIT)
    torch.testing.assert_close(limited.float(), rank.expected(LIMIT).float(), rtol=0.04, atol=0.05)
    assert (rank.expected(LIMIT).float() - rank.expected().float()).abs().max() > 0.3


@needs_twin
def test_a_limit_with_int8_experts_is_refused(tmp_path):
    rank = Rank(tmp_path, "W8A8_DYNAMIC")
    with pytest.raises(UsageError, match="SwiGLU limit to w4a8 experts only"):
        rank.computed(swiglu_limit=LIMIT)


@needs_twin
def test_a_routed_scale_is_applied_once_where_it_is_asked_for(tmp_path):
    rank = Rank(tmp_path, "W4A8_DYNAMIC")
    assert torch.equal(rank.computed(routed_scale=1.5), rank.expected() * 1.5)


def test_layers_keep_their_numbers_and_the_farewell_has_one_of_its_own():
    numbers = layer_numbers(["model.layers.1.mlp.experts", "model.layers.4.mlp.experts"])
    assert numbers == [1, 4]
    assert farewell_layer(numbers) == 5
    assert slot_table(numbers, "cpu").tolist() == [-1, 0, -1, -1, 1, 0]
    with pytest.raises(ModelRefused, match="has no layer number"):
        layer_numbers(["model.layers.1.mlp", "model.experts"])


@pytest.mark.parametrize(
    ("local_rank", "visible", "device_ids", "chosen"),
    [(0, 8, (), 0), (3, 8, (), 3), (3, 1, (), 0), (1, 8, (6, 7), 7), (0, 1, (5,), 0)],
)
def test_a_rank_takes_its_own_npu(local_rank, visible, device_ids, chosen):
    assert npu_index(local_rank, visible, device_ids) == chosen


def test_a_rank_without_an_npu_says_so():
    with pytest.raises(ResourceError, match="no NPU is visible"):
        npu_index(0, 0)
    with pytest.raises(ResourceError, match="local rank 2 takes NPU 2, 2 are visible"):
        npu_index(2, 2)
    with pytest.raises(LaunchDisagreement, match="names 1 NPUs, local rank 1 has none"):
        npu_index(1, 4, (0,))
