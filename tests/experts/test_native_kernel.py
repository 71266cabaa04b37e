"""The compiled kernel: every path against the oracle and the scalar path; bits that nothing else changes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ffn_faas import env, native
from ffn_faas.errors import ResourceError, UsageError
from ffn_faas.experts.checkpoint import Checkpoint
from ffn_faas.experts.kernels.native_kernel import NativeKernel
from ffn_faas.experts.loader import load_experts
from ffn_faas.experts.spec import MoESpec
from tests import oracle
from tests.data import TinyModel, routing

PATHS = native.load().ExpertsCpu.paths(native.load().BF16)
DTYPES = ("bfloat16", "float16", "float32")
LIMIT = {"avx512_bf16": 5e-3, "amx": 5e-3}
"""Largest error of a path; only those with bf16 products round SwiGLU's result, the others sum everything in f32."""
MODEL = TinyModel(hidden=128, inter=64, experts=16, top_k=4)
ODD = TinyModel(hidden=67, inter=35, experts=3, top_k=2, layers=1)
SMALLEST = TinyModel(hidden=1, inter=1, experts=2, top_k=1, layers=1)


def build(model: TinyModel, *, threads: int = 2, path: str = "auto") -> NativeKernel:
    spec = MoESpec.from_config(model.config(), model.dtype)
    return fill(NativeKernel(spec, threads=threads, path=path), model)


def fill(kernel: NativeKernel, model: TinyModel) -> NativeKernel:
    kernel.allocate(range(model.experts))
    for layer in range(model.layers):
        w13, w2 = model.expert_weights(layer)
        for expert in range(model.experts):
            for matrix, source in enumerate((*w13[expert].chunk(2), w2[expert])):
                buffer = kernel.matrix_buffer(layer, expert, matrix)
                buffer.copy_(source)
                kernel.finish_matrix(layer, expert, matrix)
    kernel.finish()
    return kernel


def run(kernel: NativeKernel, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    out = torch.full(hidden.shape, float("nan"))
    kernel.compute(0, hidden.contiguous(), ids.contiguous(), weights.contiguous(), out)
    return out


def inputs(model: TinyModel, tokens: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(tokens, model.hidden, generator=generator).to(getattr(torch, model.dtype))
    return hidden, *routing(tokens, model.experts, model.top_k, seed)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [MODEL, ODD, SMALLEST], ids=["whole", "odd", "smallest"])
@pytest.mark.parametrize("tokens", [1, 7, 33, 300])
def test_every_path_agrees_with_the_oracle_and_the_scalar_path(dtype: str, shape: TinyModel, tokens: int) -> None:
    model = TinyModel(shape.hidden, shape.inter, shape.experts, shape.top_k, shape.layers, dtype)
    hidden, ids, weights = inputs(model, tokens)
    exact = oracle.moe(hidden, *model.expert_weights(0), ids, weights)
    scalar = run(build(model, path="scalar"), hidden, ids, weights)
    for path in native.load().ExpertsCpu.paths(
        getattr(native.load(), {"bfloat16": "BF16", "float16": "F16"}.get(dtype, "F32"))
    ):
        result = run(build(model, path=path), hidden, ids, weights)
        assert oracle.l2_error(result, exact) < LIMIT.get(path, 2e-6)
        assert oracle.l2_error(result, scalar.double().numpy()) < LIMIT.get(path, 2e-6)


@pytest.mark.parametrize("path", PATHS)
def test_bits_do_not_depend_on_the_number_of_threads(path: str) -> None:
    hidden, ids, weights = inputs(MODEL, 500)
    one, *others = (run(build(MODEL, threads=threads, path=path), hidden, ids, weights) for threads in (1, 2, 3, 7))
    assert all(torch.equal(one, other) for other in others)


_BUILT = {path: build(MODEL, path=path) for path in PATHS}


@pytest.mark.parametrize("path", PATHS)
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_merged_item_has_the_bits_of_its_posts_computed_alone(path: str, data: st.DataObject) -> None:
    tokens = data.draw(st.integers(1, 400))
    hidden, ids, weights = inputs(MODEL, tokens, seed=tokens)
    # Few experts, so that their rows fill several register blocks, and some padding.
    ids = ids % data.draw(st.integers(1, MODEL.experts)) - data.draw(st.integers(0, 1))
    order = torch.randperm(tokens, generator=torch.Generator().manual_seed(tokens))
    cuts = sorted(data.draw(st.lists(st.integers(0, tokens), max_size=4)))
    merged = run(_BUILT[path], hidden, ids, weights)
    for part in torch.tensor_split(order, cuts):
        assert torch.equal(run(_BUILT[path], hidden[part], ids[part], weights[part]), merged[part])


@pytest.mark.parametrize("path", PATHS)
def test_rows_without_an_expert_are_exact_zeros_and_a_nan_stays_in_its_row(path: str) -> None:
    kernel = _BUILT[path]
    hidden, ids, weights = inputs(MODEL, 60)
    ids[7], weights[7] = -1, float("nan")
    ids[8, 1:], weights[8, 1:] = -1, float("nan")
    weights[9] = 0
    clean = run(kernel, hidden, ids, weights)
    assert torch.isfinite(clean).all()
    assert not clean[7].any()
    assert not clean[9].any()
    hidden[5, 17] = float("nan")
    hidden[7] = float("nan")
    dirty = run(kernel, hidden, ids, weights)
    assert torch.isnan(dirty[5]).all()
    others = torch.arange(60) != 5
    assert torch.equal(dirty[others], clean[others])
    assert run(kernel, hidden[:0], ids[:0], weights[:0]).shape == (0, MODEL.hidden)


def test_expert_named_twice_in_a_row_counts_twice() -> None:
    hidden, ids, weights = inputs(MODEL, 5)
    ids[:] = 3
    exact = oracle.moe(hidden, *MODEL.expert_weights(0), ids, weights)
    assert oracle.l2_error(run(_BUILT["scalar"], hidden, ids, weights), exact) < 2e-6
    assert oracle.l2_error(run(_BUILT[PATHS[0]], hidden, ids, weights), exact) < LIMIT.get(PATHS[0], 2e-6)


@pytest.mark.parametrize("model", [MODEL, ODD], ids=["whole", "odd"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_loaded_experts_have_the_bytes_of_the_file(tmp_path: Path, model: TinyModel, dtype: str) -> None:
    model = TinyModel(model.hidden, model.inter, model.experts, model.top_k, 2, dtype)
    spec = MoESpec.from_config(model.config(), dtype)
    kernel = NativeKernel(spec, threads=2)
    load_experts(
        spec, Checkpoint.open(model.write(tmp_path)), range(1, model.experts), kernel, lambda done, total: None
    )
    for layer in range(2):
        w13, w2 = model.expert_weights(layer)
        for expert in range(1, model.experts):
            for matrix, source in enumerate((*w13[expert].chunk(2), w2[expert])):
                assert torch.equal(kernel.unpacked(layer, expert - 1, matrix), source)


def test_unknown_path_foreign_expert_and_absurd_size_are_refused() -> None:
    with pytest.raises(ValueError, match="this CPU has no path 'sse9'"):
        build(ODD, path="sse9")
    with pytest.raises(IndexError, match="no expert 3 in layer 0"):
        build(ODD).unpacked(0, 3, 0)
    spec = MoESpec.from_config(TinyModel(hidden=1 << 20, inter=1 << 20, layers=100).config())
    with pytest.raises(ResourceError, match="cannot allocate"):
        NativeKernel(spec, threads=1).allocate(range(8))


def test_threads_are_those_of_the_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert env.num_threads() == 3
    monkeypatch.setenv("FFN_FAAS_NUM_THREADS", "2")
    assert env.num_threads() == 2
    monkeypatch.setenv("FFN_FAAS_NUM_THREADS", "0")
    with pytest.raises(UsageError, match="at least one thread"):
        env.num_threads()


_PEAK = """
import resource, sys, torch
from pathlib import Path
from ffn_faas import native
from ffn_faas.experts.checkpoint import Checkpoint
from ffn_faas.experts.kernels.native_kernel import NativeKernel
from ffn_faas.experts.loader import load_experts
from ffn_faas.experts.spec import MoESpec
spec = MoESpec.from_model_dir(Path(sys.argv[1]))
checkpoint = Checkpoint.open(Path(sys.argv[1]))
kernel = NativeKernel(spec, threads=2)
torch.empty(1 << 20).fill_(1)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
load_experts(spec, checkpoint, range(spec.num_experts), kernel, lambda done, total: None)
print(before * 1024, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024, kernel.resident_bytes)
"""


@pytest.mark.slow
def test_loading_peaks_at_little_more_than_the_weights_it_keeps(tmp_path: Path) -> None:
    model = TinyModel(hidden=512, inter=256, experts=64, top_k=2, layers=4)
    model.write(tmp_path)
    output = subprocess.run([sys.executable, "-c", _PEAK, str(tmp_path)], capture_output=True, text=True, check=True)
    before, after, resident = map(int, output.stdout.split())
    assert resident == 4 * 64 * 3 * 512 * 256 * 2
    # 4 MiB for the buffers of four reading threads, their stacks and code pages touched for the first time.
    assert after - before <= 1.05 * resident + (4 << 20)
