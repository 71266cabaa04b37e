"""The twin's two layered matmuls: bit-equal to the oracle, within the stated tolerances of exact arithmetic."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.cam import oracle
from tests.cam.numerics import reference
from tests.cam.twin.calls import Sizes
from tests.cam.twin.system import Int4, Int8, System, int4_experts, int8_experts

SIZES = Sizes(attention=1, ffn=1, quant=1, hidden=256)
LAYERS = 2
COUNTS = torch.tensor([4, 0, 3])
KINDS = {"int4": (Int4, int4_experts), "int8": (Int8, int8_experts)}


def batch(rows=10, seed=1):
    generator = torch.Generator().manual_seed(seed)
    q = torch.randint(-127, 128, (rows, SIZES.hidden), dtype=torch.int8, generator=generator)
    return q, torch.rand(rows, generator=generator) / 50 + 0.001


def run(ops, kind, layer, *, group_list=COUNTS, group_list_type=1):
    """The valid rows after both matmuls, and what lay between them."""
    experts = KINDS[kind][0](System(SIZES, layers=LAYERS), ops, 0)
    q, scale = batch()
    index = torch.tensor([layer])
    middle, middle_scale = ops.gmm_swiglu_quant_v2_layered(
        q, experts.w13, experts.scale13, experts.bias13, scale, group_list, index, 0, 0, group_list_type, None
    )
    between = oracle.Quantized(middle[:7].clone().numpy(), middle_scale[:7].numpy())
    (out,) = ops.grouped_matmul_layered(
        [middle], experts.w2, experts.bias2, experts.scale2, index, group_list, middle_scale, group_list_type, 3,
        torch.bfloat16,
    )  # fmt: skip
    return out[:7], between


def of_experts(kind, layer, call):
    """``call(expert, rows)`` of each expert that has rows, as one array."""
    q, scale = (tensor.numpy() for tensor in batch())
    experts, parts, begin = KINDS[kind][1](SIZES, layer), [], 0
    for expert, count in zip(experts, COUNTS.tolist(), strict=True):
        if count:
            parts.append(call(expert, oracle.Quantized(q[begin : begin + count], scale[begin : begin + count])))
        begin += count
    return np.concatenate(parts)


@pytest.mark.parametrize("layer", range(LAYERS))
@pytest.mark.parametrize("kind", KINDS)
def test_both_products_equal_the_oracle_and_the_layer_is_picked(ops, kind, layer):
    out, _ = run(ops, kind, layer)
    expected = of_experts(kind, layer, lambda expert, rows: expert(rows))
    assert torch.equal(out, torch.from_numpy(expected).bfloat16())


@pytest.mark.parametrize("kind", KINDS)
def test_sums_for_counts(ops, kind):
    out, _ = run(ops, kind, 1, group_list=torch.tensor([4, 4, 7]), group_list_type=0)
    assert torch.equal(out, run(ops, kind, 1)[0])


@pytest.mark.parametrize("limit", [None, 0.05])
def test_the_limit_of_swiglu_is_an_option_of_the_twin(load, limit):
    out, _ = run(load(swiglu_limit=limit), "int4", 0)
    expected = of_experts("int4", 0, lambda expert, rows: expert(rows, limit))
    assert torch.equal(out, torch.from_numpy(expected).bfloat16())
    assert not np.array_equal(expected, of_experts("int4", 0, lambda expert, rows: expert(rows, 0.01)))


@pytest.mark.parametrize("mode", ["ideal", "msd"])
def test_int4_is_within_the_stated_tolerances_of_float64(ops, mode):
    out, between = run(ops, "int4", 0)

    def weights(expert):
        return expert.w13, expert.scale13, expert.w2, expert.scale2

    exact = of_experts("int4", 0, lambda e, rows: reference.expert(rows.q, rows.scale, weights(e), mode))
    np.testing.assert_allclose(out.double().numpy(), exact, rtol=0.04, atol=0.05)
    middle = of_experts(
        "int4", 0, lambda e, r: reference.activated(reference.product(r.q, r.scale, e.w13, e.scale13, mode), None)
    )
    scale = np.abs(middle).max(1) / 127
    assert np.abs(between.q - np.rint(middle / scale[:, None])).max() <= 1
    np.testing.assert_allclose(between.scale, scale, rtol=1e-3)


def test_halves_in_float16_cost_less_than_a_thousandth_of_the_largest_value():
    q, scale = (tensor.numpy() for tensor in batch(64))
    expert = int4_experts(SIZES, 0)[0]
    made = [reference.product(q, scale, expert.w13, expert.scale13, mode) for mode in ("ideal", "msd")]
    error = np.abs(made[0] - made[1]).max() / np.abs(made[0]).max()
    assert 0 < error < 1e-3


@pytest.fixture
def call(ops):
    """The first matmul with right arguments, any of them replaced."""
    experts = Int4(System(SIZES, layers=LAYERS), ops, 0)
    q, scale = batch()

    def called(device="cpu", **wrong):
        arguments = {
            "x": q, "all_weight": experts.w13, "all_weight_scale": experts.scale13,
            "all_weight_assist_matrix": experts.bias13, "x_scale": scale, "group_list": COUNTS,
            "layer_index": torch.tensor([0]), "dequant_mode": 0, "quant_mode": 0, "group_list_type": 1,
        } | wrong  # fmt: skip
        moved = {
            name: value.to(device) if isinstance(value, torch.Tensor)
            else [tensor.to(device) for tensor in value] if isinstance(value, list) else value
            for name, value in arguments.items()
        }  # fmt: skip
        return ops.gmm_swiglu_quant_v2_layered(**moved)

    return called


WRONG = [
    ({"x": torch.zeros(10, 256)}, r"x must be contiguous int8 \[rows, 256\]"),
    ({"x_scale": torch.ones(9)}, r"x_scale must be float32 \[10\]"),
    ({"all_weight": []}, "all_weight is an empty list"),
    ({"all_weight_scale": []}, "must have the same length"),
    ({"all_weight_assist_matrix": []}, "must have the same length"),
    ({"group_list": COUNTS.int()}, r"group_list must be int64 \[3\]"),
    ({"group_list": torch.zeros(4, dtype=torch.int64)}, r"group_list must be int64 \[3\]"),
    ({"layer_index": torch.zeros(2, dtype=torch.int64)}, r"layer_index must be int64 \[1\]"),
    ({"layer_index": torch.zeros(1, dtype=torch.int32)}, r"layer_index must be int64 \[1\]"),
    ({"group_list_type": 2}, "group_list_type must be 0"),
    ({"dequant_mode": 1}, "per-channel scales"),
]


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_wrong_arguments_are_refused(call, device):
    for wrong, reason in WRONG:
        with pytest.raises(RuntimeError, match=reason):
            call(device, **wrong)


def test_values_that_only_an_execution_sees_are_refused(call):
    with pytest.raises(RuntimeError, match="layer_index 2 is outside the lists"):
        call(layer_index=torch.tensor([2]))
    with pytest.raises(RuntimeError, match="group_list does not describe 10 rows"):
        call(group_list=torch.tensor([4, 4, 4]))
    with pytest.raises(RuntimeError, match="layer_index must have a storage of one element"):
        call(layer_index=torch.zeros(9, dtype=torch.int64)[2:3])


def test_meta_gives_shapes(call):
    middle, scale = call("meta")
    assert (middle.shape, middle.dtype, scale.shape, scale.dtype) == ((10, 32), torch.int8, (10,), torch.float32)


@pytest.mark.parametrize(
    ("scale", "output", "passes"),
    [
        (torch.bfloat16, torch.bfloat16, True),
        (torch.float32, torch.float16, True),
        (torch.float32, torch.bfloat16, False),
        (torch.bfloat16, None, False),
    ],
)
def test_int8_weights_take_two_pairs_of_scale_and_output_type(ops, scale, output, passes):
    experts = Int8(System(SIZES, layers=1), ops, 0)
    arguments = (
        [torch.zeros(10, 32, dtype=torch.int8)], experts.w2, experts.bias2, [s.to(scale) for s in experts.scale2],
        torch.tensor([0]), COUNTS, torch.ones(10), 1, 3, output,
    )  # fmt: skip
    if passes:
        assert ops.grouped_matmul_layered(*arguments)[0].dtype == output
    else:
        with pytest.raises(RuntimeError, match="int8 weights need output_dtype"):
            ops.grouped_matmul_layered(*arguments)
