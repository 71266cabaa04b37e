from __future__ import annotations

import mmap
from pathlib import Path

import pytest
import torch

from ffn_faas.errors import ModelRefused, ResourceError
from ffn_faas.experts.checkpoint import Checkpoint
from ffn_faas.experts.fingerprint import fingerprint
from ffn_faas.experts.kernels import create_kernel
from ffn_faas.experts.kernels.torch_kernel import TorchKernel
from ffn_faas.experts.loader import StorageAccount, load_experts
from ffn_faas.experts.spec import MoESpec
from ffn_faas.protocol.topology import expert_range
from tests.data import TinyModel, write_tensors
from tests.experts.residency import evict, resident_pages

MODEL = TinyModel()
SPEC = MoESpec.from_config(MODEL.config())


def _ignore(done: int, total: int) -> None:
    """Progress that nobody looks at."""


def _load(directory: Path, experts: range, spec: MoESpec = SPEC) -> tuple[TorchKernel, StorageAccount]:
    kernel = TorchKernel(spec)
    return kernel, load_experts(spec, Checkpoint.open(directory), experts, kernel, _ignore)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize(("ranks", "rank"), [(1, 0), (3, 0), (3, 1), (3, 2)])
def test_each_rank_holds_the_bytes_of_its_experts(tmp_path: Path, shards: int, ranks: int, rank: int) -> None:
    experts = expert_range(8, ranks, rank)
    kernel, _ = _load(MODEL.write(tmp_path, shards), experts)
    for layer in range(2):
        w13, w2 = MODEL.expert_weights(layer)
        held13, held2 = kernel.layer_buffers(layer)
        assert torch.equal(_bits(held13), _bits(w13[experts.start : experts.stop]))
        assert torch.equal(_bits(held2), _bits(w2[experts.start : experts.stop]))


def test_account_counts_the_bytes_of_the_owned_experts_only(tmp_path: Path) -> None:
    _, account = _load(MODEL.write(tmp_path), range(3, 6))
    owned = 3 * 2 * (3 * 64 * 32) * 2  # experts, layers, elements, bytes
    assert (account.bytes_read, account.resident_bytes) == (owned, owned)
    assert "experts 3-5 (3) of 2 layers, bfloat16" in str(account)


def test_progress_grows_to_the_total(tmp_path: Path) -> None:
    reports: list[tuple[int, int]] = []
    load_experts(
        SPEC,
        Checkpoint.open(MODEL.write(tmp_path)),
        range(8),
        TorchKernel(SPEC),
        lambda done, total: reports.append((done, total)),
    )
    total = 8 * 2 * 3 * 64 * 32 * 2
    assert [done for done, _ in reports] == sorted(done for done, _ in reports)
    assert {total for _, total in reports} == {total}
    assert reports[-1] == (total, total)


@pytest.mark.parametrize(
    ("stored", "served"), [("float32", "bfloat16"), ("bfloat16", "float32"), ("float16", "bfloat16")]
)
def test_other_dtype_is_converted_as_torch_converts_it(tmp_path: Path, stored: str, served: str) -> None:
    model = TinyModel(dtype=stored)
    spec = MoESpec.from_config(model.config(), served)
    kernel, _ = _load(model.write(tmp_path), range(8), spec)
    w13, w2 = model.expert_weights(1)
    held13, held2 = kernel.layer_buffers(1)
    assert torch.equal(held13, w13.to(getattr(torch, served)))
    assert torch.equal(held2, w2.to(getattr(torch, served)))


def test_pages_inside_foreign_experts_stay_out_of_memory(tmp_path: Path) -> None:
    model = TinyModel(hidden=256, inter=128, layers=2)
    path = model.write(tmp_path) / "model.safetensors"
    spec = MoESpec.from_config(model.config())
    if not evict(path):
        pytest.skip("this file system keeps the pages of a file")
    checkpoint = Checkpoint.open(tmp_path)
    fingerprint(spec, checkpoint)
    experts = expert_range(8, 2, 1)
    load_experts(spec, checkpoint, experts, TorchKernel(spec), _ignore)
    pages = resident_pages(path)

    def inside(expert: int) -> list[bool]:
        """Flags of the pages that lie wholly inside tensors of ``expert``."""
        flags = []
        for layer in range(2):
            for name in spec.expert_tensors(layer, expert):
                entry = checkpoint.tensors[name]
                first = -(-entry.offset // mmap.PAGESIZE)
                flags += pages[first : (entry.offset + entry.nbytes) // mmap.PAGESIZE]
        return flags

    foreign = [flag for expert in range(4) for flag in inside(expert)]
    owned = [flag for expert in experts for flag in inside(expert)]
    assert len(foreign) > 300  # 4 experts, 2 layers, 3 matrices of 16 pages
    assert not any(foreign)
    assert all(owned)


def test_file_that_shrank_after_its_header_was_read_is_named(tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(MODEL.write(tmp_path))
    path = tmp_path / "model.safetensors"
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size // 2)
    with pytest.raises(ResourceError, match=r"model\.safetensors is truncated: tensor .*experts"):
        load_experts(SPEC, checkpoint, range(8), TorchKernel(SPEC), _ignore)


def test_file_that_vanished_after_its_header_was_read_is_named(tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(MODEL.write(tmp_path))
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ResourceError, match=r"model\.safetensors"):
        load_experts(SPEC, checkpoint, range(8), TorchKernel(SPEC), _ignore)


def test_missing_expert_is_refused_before_memory_is_taken(tmp_path: Path) -> None:
    tensors = MODEL.tensors()
    del tensors["model.layers.1.mlp.experts.7.down_proj.weight"]
    write_tensors(tmp_path, tensors)

    class Untouched(TorchKernel):
        def allocate(self, experts: range) -> None:
            raise AssertionError("memory was taken")

    with pytest.raises(ModelRefused, match=r"layers\.1\.mlp\.experts\.7\.down_proj"):
        load_experts(SPEC, Checkpoint.open(tmp_path), range(8), Untouched(SPEC), _ignore)


def test_memory_that_cannot_be_had_is_a_resource_error() -> None:
    spec = MoESpec.from_config(TinyModel(hidden=1 << 20, inter=1 << 20, layers=100).config())
    with pytest.raises(ResourceError, match=r"experts still to be loaded need \d+ bytes, .* \d+"):
        load_experts(spec, None, range(8), create_kernel("torch", spec), _ignore)


def test_dummy_experts_are_the_same_for_every_split_and_differ_between_experts() -> None:
    whole = TorchKernel(SPEC)
    account = load_experts(SPEC, None, range(8), whole, _ignore)
    part = TorchKernel(SPEC)
    load_experts(SPEC, None, range(3, 6), part, _ignore)
    for layer in range(2):
        for mine, all_of_it in zip(part.layer_buffers(layer), whole.layer_buffers(layer), strict=True):
            assert torch.equal(mine, all_of_it[3:6])
    matrices = torch.cat([whole.layer_buffers(layer)[1].flatten(1) for layer in range(2)])
    assert len(torch.unique(matrices, dim=0)) == 16
    assert account.bytes_read == 0
    assert 0 < matrices.abs().max() <= 0.02


def test_dummy_experts_follow_the_seed() -> None:
    kernels = [TorchKernel(SPEC) for _ in range(3)]
    for kernel, seed in zip(kernels, (0, 0, 1), strict=True):
        load_experts(SPEC, None, range(8), kernel, _ignore, seed=seed)
    first, again, other = (kernel.layer_buffers(0)[0] for kernel in kernels)
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
