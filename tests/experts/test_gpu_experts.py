"""Experts in GPU layout, on the CPU: which weight row an expert has, and in which order its rows lie."""

import ctypes
from dataclasses import replace

import pytest
import torch

from ffn_faas.connectors import m2n_library
from ffn_faas.errors import ModelRefused
from ffn_faas.experts import loader
from ffn_faas.experts.checkpoint import Checkpoint
from ffn_faas.experts.dummy import DummyWeights
from ffn_faas.experts.gpu_kernel import GpuExperts
from ffn_faas.experts.gpu_layout import down_rows, gate_up_rows
from ffn_faas.experts.loader import load_experts
from ffn_faas.experts.spec import MoESpec
from tests.data import TinyModel

MODEL = TinyModel(hidden=128, inter=64, experts=8, layers=3)


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

    def use_device(self, device):
        pass

    def synchronize(self):
        pass

    def fill_rows(self, target, place, pool, pool_size, start, rows, width):
        values = torch.frombuffer((ctypes.c_char * (2 * pool_size)).from_address(pool), dtype=torch.bfloat16)
        for row in range(rows):
            data = values[(start + row * width + torch.arange(width)) % pool_size].contiguous()
            self.move(target, place, row, data.data_ptr(), 2 * width)

    def uploader_create(self, nbytes, handle):
        handle._obj.value = self.allocate(nbytes)

    def uploader_buffer(self, handle, host):
        host._obj.value = handle.value

    def uploader_put(self, handle, target, place, rows, row_bytes):
        for row in range(rows):
            self.move(target, place, row, handle.value + row * row_bytes, row_bytes)

    def uploader_finish(self, handle):
        pass

    def uploader_destroy(self, handle):
        self.free(handle.value)

    @staticmethod
    def move(target, place, row, source, nbytes):
        where = ctypes.c_int32.from_address(place + 4 * row).value
        ctypes.memmove(target + where * nbytes, source, nbytes)


@pytest.fixture
def spec():
    return MoESpec.from_config(MODEL.config())


@pytest.mark.parametrize("source", ["dummy", "checkpoint"])
def test_every_expert_of_every_layer_lies_at_layer_times_count_plus_local_id(spec, source, monkeypatch, tmp_path):
    memory = HostMemory()
    monkeypatch.setattr(m2n_library, "load", lambda: memory)
    kernel, experts = GpuExperts(spec), range(3, 8)
    checkpoint = None
    if source == "checkpoint":
        MODEL.write(tmp_path)
        checkpoint = Checkpoint.open(tmp_path)
    load_experts(spec, checkpoint, experts, kernel, lambda done, total: None, seed=4)
    stored = MODEL.tensors()
    rows = spec.num_layers * len(experts)
    resident = {}
    for address, shape in ((kernel.w13, (rows, 128, 128)), (kernel.w2, (rows, 128, 64))):
        resident[address] = memory.blocks[address].view(torch.bfloat16).view(shape)
    dummy = DummyWeights(spec, 4)
    for layer in range(spec.num_layers):
        for local, expert in enumerate(experts):
            wide, narrow = torch.empty(2, 64, 128).bfloat16(), torch.empty(128, 64).bfloat16()
            names = "gate", "up", "down"
            for matrix, buffer in enumerate((wide[0], wide[1], narrow)):
                if checkpoint is None:
                    dummy.write(buffer.data_ptr(), layer, expert, matrix)
                else:
                    buffer.copy_(stored[f"model.layers.{layer}.mlp.experts.{expert}.{names[matrix]}_proj.weight"])
            row = layer * len(experts) + local
            assert torch.equal(resident[kernel.w13][row], wide.view(128, 128)[gate_up_rows(64)])
            assert torch.equal(resident[kernel.w2][row], narrow[down_rows(128)])
    assert len(memory.blocks) == 2
    kernel.release()
    assert not memory.blocks


def test_weights_on_the_device_ask_for_no_host_memory(spec, monkeypatch):
    def refuse(*_):
        raise AssertionError("host memory was asked for")

    memory = HostMemory()
    monkeypatch.setattr(m2n_library, "load", lambda: memory)
    monkeypatch.setattr(loader, "require_memory", refuse)
    kernel = GpuExperts(spec)
    load_experts(spec, None, range(8), kernel, lambda done, total: None)
    assert kernel.resident_bytes == 3 * 8 * 3 * 128 * 64 * 2


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
