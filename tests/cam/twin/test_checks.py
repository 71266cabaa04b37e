"""Every check of the operators' binding, on CPU and on Meta tensors: one argument wrong, the rest right."""

from __future__ import annotations

import pytest
import torch

from tests.cam.twin import calls
from tests.cam.twin.calls import Sizes

SIZES = Sizes(tp=2)
X, IDS, WEIGHTS = calls.inputs(SIZES, 4, 1)
ANCHOR, COMM = torch.zeros(1, dtype=torch.bfloat16), calls.comm()
INFO = torch.zeros(13, dtype=torch.int64)
COMMON = {
    "comm_args": COMM, "comm_id": 0, "max_seq_len": 32, "batch_size": 4, "hidden_size": 64, "top_k": 2,
    "moe_rank_num": 2, "attn_rank_num": 2, "route_expert_num_per_moe": 3, "attn_rank_id": 1, "moe_rank_id": 2,
    "world_size": 4, "layer_index": 0, "tp_size": 2, "dynamic_quant": 0, "group_name": "group",
}  # fmt: skip
TENSORS = {
    "dispatch_send": {"x": X, "expert_ids": IDS},
    "dispatch_recv": {"x": ANCHOR},
    "combine_send": {"expand_x": X, "batch_info": INFO},
    "combine_recv": {"expand_x": ANCHOR, "expert_ids": IDS, "expert_scales": WEIGHTS},
}
EVERYWHERE = [
    ({"comm_args": COMM.float()}, "comm_args must be float16"),
    ({"group_name": ""}, "group_name is empty"),
    ({"world_size": 5}, "world_size 5 is not attn_rank_num"),
    ({"hidden_size": 48}, "multiple of 32"),
    ({"top_k": 7}, "top_k 7 is outside 1..6"),
    ({"moe_rank_num": 0, "world_size": 2}, "must be positive"),
]
WITH_LAYOUT = [
    ({"tp_size": 3}, "tp_size 3 does not divide attn_rank_num 2"),
    ({"max_seq_len": 1}, "max_seq_len 1 is outside 2..262144"),
    ({"max_seq_len": 262145}, "max_seq_len 262145 is outside"),
]
CASES = {
    "dispatch_send": [
        *EVERYWHERE,
        *WITH_LAYOUT,
        ({"attn_rank_id": 2}, "attn_rank_id 2 is outside 0..1"),
        ({"layer_index": -1}, "layer_index is negative"),
        ({"batch_size": 17}, "batch_size 17 is outside 1..max_seq_len / tp_size = 16"),
        ({"batch_size": 0}, "batch_size 0 is outside"),
        ({"dynamic_quant": 2}, "dynamic_quant must be 0 or 1"),
        ({"x": X.float()}, "x must be float16 or bfloat16, not float32"),
        ({"x": X.t().contiguous().t()}, "x must be contiguous"),
        ({"x": X[:3]}, r"x must be bfloat16 \[4, 64\]"),
        ({"expert_ids": IDS.long()}, r"expert_ids must be int32 \[4, 2\]"),
        ({"expert_ids": IDS.t().contiguous().t()}, "expert_ids must be contiguous"),
    ],
    "dispatch_recv": [
        *EVERYWHERE,
        *WITH_LAYOUT,
        ({"moe_rank_id": 0}, "moe_rank_id must be a global rank: 0 is outside 2..3"),
        ({"moe_rank_id": 4}, "global rank"),
        ({"x": ANCHOR.float()}, "the anchor must be float16 or bfloat16"),
        ({"x": ANCHOR.repeat(2)}, "the anchor must have one element"),
    ],
    "combine_send": [
        *EVERYWHERE,
        *WITH_LAYOUT,
        ({"moe_rank_id": 1}, "global rank"),
        ({"expand_x": X[:0]}, r"expand_x must be \[rows >= 1, 64\]"),
        ({"expand_x": X.to(torch.int8)}, "expand_x must be float16 or bfloat16, not int8"),
        ({"batch_info": INFO[:7]}, r"batch_info must be int64 \[13\]"),
        ({"batch_info": INFO.int()}, "batch_info must be int64"),
    ],
    "combine_recv": [
        *EVERYWHERE,
        ({"attn_rank_id": -1}, "attn_rank_id -1 is outside"),
        ({"expert_scales": WEIGHTS.bfloat16()}, r"expert_scales must be float32 \[4, 2\]"),
        ({"expert_ids": IDS[:3]}, r"expert_ids must be int32 \[4, 2\]"),
        ({"batch_size": 0}, "batch_size must be at least 1"),
        ({"expand_x": ANCHOR.double()}, "the anchor must be float16 or bfloat16"),
    ],
}


def call(ops, operator: str, device: str | None, **wrong):
    operation = getattr(torch.ops.afd_ascend, f"afd_async_{operator}").default
    values = COMMON | TENSORS[operator] | wrong
    arguments = [values[argument.name] for argument in operation._schema.arguments]
    return getattr(ops, operator)(*[a.to(device) if isinstance(a, torch.Tensor) else a for a in arguments])


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("operator", CASES)
def test_a_wrong_argument_is_refused_with_its_name(ops, operator, device):
    for wrong, reason in CASES[operator]:
        with pytest.raises(RuntimeError, match=f"afd_async_{operator}: .*{reason}"):
            call(ops, operator, device, **wrong)


@pytest.mark.parametrize("operator", CASES)
def test_the_right_arguments_pass_on_meta(ops, operator):
    call(ops, operator, "meta")


@pytest.mark.parametrize("operator", ["dispatch_send", "combine_send"])
def test_inputs_that_require_grad_are_refused(ops, operator):
    name = "x" if operator == "dispatch_send" else "expand_x"
    with pytest.raises(RuntimeError, match="inference only"):
        call(ops, operator, "meta", **{name: X.clone().requires_grad_()})


@pytest.mark.parametrize("operator", CASES)
def test_inputs_on_two_devices_are_refused(ops, operator):
    for name, value in ({"comm_args": COMM} | TENSORS[operator]).items():
        with pytest.raises(RuntimeError, match=f"afd_async_{operator}: the inputs must be on one device"):
            call(ops, operator, None, **{name: value.to("meta")})


def test_a_window_smaller_than_the_batches_need_is_refused_before_anything_is_sent(ops, monkeypatch):
    monkeypatch.setenv("LCCL_BUFFER_SIZE", "0")
    with pytest.raises(RuntimeError, match="the windows need 9792 bytes, LCCL_BUFFER_SIZE is 0 MiB"):
        calls.dispatch_send(ops, Sizes(), 0, 0, X, IDS)


def test_an_expert_id_that_does_not_exist_is_refused(ops):
    with pytest.raises(RuntimeError, match=r"expert id 6 is outside 0\.\.5"):
        calls.dispatch_send(ops, Sizes(), 0, 0, X, torch.full_like(IDS, 6))


def test_a_row_of_zeros_which_no_quantization_defines_is_poisoned(ops):
    sizes = Sizes(attention=1, ffn=1, quant=1)
    x, _, _ = calls.inputs(sizes, 2, 1)
    x[1] = 0
    calls.dispatch_send(ops, sizes, 0, 0, x, torch.tensor([[0, 1], [0, 2]], dtype=torch.int32))
    _, scales, _, _ = calls.dispatch_recv(ops, sizes, 0)
    assert scales[:4].isnan().tolist() == [False, True, False, True]


def test_operators_out_of_order_are_refused(ops):
    sizes = Sizes(attention=1, ffn=1)
    x, ids, weights = calls.inputs(sizes, 4, 1)
    with pytest.raises(RuntimeError, match="without a dispatch send before it"):
        calls.combine_recv(ops, sizes, 0, ids, weights)
    with pytest.raises(RuntimeError, match="without a dispatch receive before it"):
        calls.combine_send(ops, sizes, 0, x, torch.zeros(9, dtype=torch.int64))
    calls.dispatch_send(ops, sizes, 0, 0, x, ids)
    with pytest.raises(RuntimeError, match="sends a combine without a dispatch received"):
        calls.combine_send(ops, sizes, 0, x, torch.zeros(9, dtype=torch.int64))
    rows, _, batch_info, _ = calls.dispatch_recv(ops, sizes, 0)
    with pytest.raises(RuntimeError, match="combine send has 1 rows, the chunk has 8"):
        calls.combine_send(ops, sizes, 0, rows[:1], batch_info)
    calls.combine_send(ops, sizes, 0, rows, batch_info)
    calls.combine_recv(ops, sizes, 0, ids, weights)
    with pytest.raises(RuntimeError, match="receives a combine without a dispatch in flight"):
        calls.combine_recv(ops, sizes, 0, ids, weights)


def test_an_expert_with_more_rows_than_a_receive_buffer_has_no_way_out(ops):
    sizes = Sizes(attention=1, ffn=1, max_seq_len=128)
    x, ids, _ = calls.inputs(sizes, 65, 1, range(2))
    calls.dispatch_send(ops, sizes, 0, 0, x, ids)
    with pytest.raises(RuntimeError, match="local expert 0 has 65 rows of one DP group, the receive buffer holds 64"):
        calls.dispatch_recv(ops, sizes, 0)
