"""The twin's operators have the public schemas, and the table of the operator module names every one of them."""

from __future__ import annotations

import re

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from ffn_faas.ascend import schemas
from ffn_faas.ascend.op_module import TABLE, real_module, twin_module
from ffn_faas.errors import NativeMissing, UsageError
from tests.cam.twin import calls
from tests.cam.twin.calls import Sizes


@pytest.mark.parametrize("schema", schemas.load(), ids=lambda schema: schema.name)
def test_the_registered_schema_is_the_stated_one(ops, schema):
    stated = torch._C.parse_schema(schema.operator + schema.arguments)
    assert getattr(torch.ops.afd_ascend, schema.name).default._schema == stated


def test_each_schema_says_whence_and_when():
    for schema in schemas.load():
        assert schema.source
        assert re.fullmatch(r"20\d\d-\d\d-\d\d", schema.date)
        assert schema.version in ("compact_v2", "layered")


def test_the_table_names_all_operators_and_the_module_carries_them(tmp_path):
    assert sorted(TABLE.values()) == sorted(schema.name for schema in schemas.load())
    module = twin_module(tmp_path, 3)
    assert module.name == "cpu-twin"
    assert all(callable(getattr(module, name)) for name in TABLE)


@pytest.mark.parametrize("operator", TABLE.values())
def test_each_operator_has_cpu_and_meta_kernels_and_no_other(ops, operator):
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    assert [key for key in ("CPU", "Meta", "CUDA", "PrivateUse1") if has(f"afd_ascend::{operator}", key)] == [
        "CPU",
        "Meta",
    ]


def test_real_operators_are_refused_where_torch_npu_is_missing():
    with pytest.raises(NativeMissing, match="torch_npu"):
        real_module()


def test_a_directory_that_does_not_exist_is_refused(tmp_path):
    with pytest.raises(UsageError, match="does not exist"):
        twin_module(tmp_path / "nowhere")


def test_two_twins_of_one_process_keep_their_own_directories(tmp_path):
    places = [tmp_path / "one", tmp_path / "two"]
    for place in places:
        place.mkdir()
    sizes = Sizes(attention=1, ffn=1)
    x, ids, _ = calls.inputs(sizes, 1, 1)
    for module in [twin_module(place) for place in places]:
        calls.dispatch_send(module, sizes, 0, 0, x, ids)
    assert [len(list(place.iterdir())) for place in places] == [1, 1]


@pytest.mark.parametrize("quant", [0, 1])
def test_meta_kernels_give_shapes_and_types_without_any_peer(ops, quant):
    sizes = Sizes(tp=2, quant=quant)
    x, ids, weights = (tensor.to("meta") for tensor in calls.inputs(sizes, 4, 1))
    sent = calls.dispatch_send(ops, sizes, 0, 0, x, ids)
    rows, scales, batch_info, counts = calls.dispatch_recv(ops, sizes, 1, "meta")
    combined = calls.combine_send(ops, sizes, 1, rows.to(sizes.dtype), batch_info)
    out = calls.combine_recv(ops, sizes, 0, ids, weights)
    shapes = [(tuple(tensor.shape), tensor.dtype) for tensor in (sent, rows, scales, batch_info, counts, combined, out)]
    assert shapes == [
        ((1,), torch.int8),
        ((64, 64), torch.int8 if quant else torch.bfloat16),
        ((64,) if quant else (1,), torch.float32),
        ((13,), torch.int64),
        ((3,), torch.int64),
        ((1,), torch.int8),
        ((4, 64), torch.bfloat16),
    ]


def test_fake_tensors_go_through_the_meta_kernels(ops):
    with FakeTensorMode():
        rows, *_ = calls.dispatch_recv(ops, Sizes(), 0)
        assert rows.shape == (64, 64)


@pytest.mark.parametrize(("factor", "rows"), [("0.5", 131072), ("0.000003814697265625", 1), ("much", 262144)])
def test_the_factor_makes_the_receive_rows_and_a_malformed_one_counts_as_one(ops, monkeypatch, capfd, factor, rows):
    monkeypatch.setenv("BATCH_SIZE_FACTOR", factor)
    assert calls.dispatch_recv(ops, Sizes(quant=1), 0, "meta")[0].shape[0] == rows
    assert ("not a number" in capfd.readouterr().err) == (factor == "much")


@pytest.mark.parametrize("factor", ["0", "-0.5", "1.5", "nan", "1e-20"])
def test_a_factor_that_leaves_no_rows_or_too_many_is_refused(ops, monkeypatch, factor):
    monkeypatch.setenv("BATCH_SIZE_FACTOR", factor)
    with pytest.raises(RuntimeError, match="BATCH_SIZE_FACTOR"):
        calls.dispatch_recv(ops, Sizes(), 0, "meta")
