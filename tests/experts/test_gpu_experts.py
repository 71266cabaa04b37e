"""Experts in GPU layout, on the CPU: which weight row an expert has, and in which order its rows lie."""

import ctypes
from dataclasses import replace

import pytest
import torch

from ffn_faas.connectors import m2n_library
from ffn_faas.errors import ModelRefused
from ffn_faas.experts.dummy import DummyWeights
from ffn_faas.experts.gpu_kernel import GpuExperts
from ffn_faas.experts.gpu_layout import down_rows, gate_up_rows
from ffn_faas.experts.loader import load_experts
from ffn_faas.experts.spec import MoESpec
from tests.data import TinyModel


class HostMemory:
    """The library's memory calls, over host memory."""

    def __init__(self):
        self.blocks = {}

    def allocate(self, nbytes):
        block = torch.zeros(nbytes, dtype=torch.uint8)
        self.blocks[block.data_ptr()] = block
        return block.data_ptr()

    def call(self, name, *arguments):
        getattr(self, name)(*arguments)

    def free(self, address):
        del self.blocks[address]

    def copy(self, target, source, nbytes):
        ctypes.memmove(target, source, nbytes)

    def permute_rows(self, target, source, order, experts, rows, row_bytes):
        order = (ctypes.c_int32 * rows).from_address(order)
        for expert in range(experts):
            for row in range(rows):
                where = expert * rows * row_bytes
                ctypes.memmove(target + where + row * row_bytes, source + where + order[row] * row_bytes, row_bytes)


@pytest.fixture
def spec():
    return MoESpec.from_config(TinyModel(hidden=128, inter=64, experts=8, layers=3).config())


def test_every_expert_of_every_layer_lies_at_layer_times_count_plus_local_id(spec, monkeypatch):
    memory = HostMemory()
    monkeypatch.setattr(m2n_library, "load", lambda: memory)
    kernel, experts = GpuExperts(spec), range(3, 8)
    load_experts(spec, None, experts, kernel, lambda done, total: None, seed=4)
    rows = spec.num_layers * len(experts)
    resident = {}
    for address, shape in ((kernel.w13, (rows, 128, 128)), (kernel.w2, (rows, 128, 64))):
        resident[address] = memory.blocks[address].view(torch.bfloat16).view(shape)
    dummy = DummyWeights(spec, 4)
    for layer in range(spec.num_layers):
        for local, expert in enumerate(experts):
            wide, narrow = torch.empty(2, 64, 128).bfloat16(), torch.empty(128, 64).bfloat16()
            for matrix, buffer in enumerate((wide[0], wide[1], narrow)):
                dummy.fill(buffer, layer, expert, matrix)
            row = layer * len(experts) + local
            assert torch.equal(resident[kernel.w13][row], wide.view(128, 128)[gate_up_rows(64)])
            assert torch.equal(resident[kernel.w2][row], narrow[down_rows(128)])
    assert len(memory.blocks) == 2
    kernel.release()
    assert not memory.blocks


@pytest.mark.parametrize("inter", [64, 192, 768])
def test_gate_and_up_of_a_column_are_8_rows_apart_in_one_warp(inter):
    order = gate_up_rows(inter)
    assert sorted(order) == list(range(2 * inter))
    for row in range(0, 2 * inter, 16):
        gate, up = order[row : row + 8], order[row + 8 : row + 16]
        assert [column + inter for column in gate] == up


@pytest.mark.parametrize("hidden", [128, 2048])
def test_what_a_warp_holds_of_one_token_is_a_run_of_memory(hidden):
    order = down_rows(hidden)
    assert sorted(order) == list(range(hidden))
    for group in range(0, hidden, 128):
        for warp in range(4):
            held = [order[group + 64 * half + 16 * warp + row] for half in range(2) for row in range(16)]
            assert sorted(held) == list(range(group + 32 * warp, group + 32 * warp + 32))
            thread = [order[group + 64 * half + 16 * warp + 8 * part] for half in range(2) for part in range(2)]
            assert thread == list(range(group + 32 * warp, group + 32 * warp + 4))


@pytest.mark.parametrize(
    ("change", "named"),
    [({"dtype": "float16"}, "float16"), ({"hidden_size": 192}, "hidden size 192"), ({"top_k": 33}, "top-k 33")],
)
def test_what_the_kernels_do_not_carry_is_refused_by_name(spec, change, named):
    with pytest.raises(ModelRefused, match=named):
        GpuExperts(replace(spec, **change)).prepare()
