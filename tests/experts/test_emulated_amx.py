"""The AMX path over emulated tiles, and the emulation against the instruction's definition and the instruction."""

from __future__ import annotations

import ctypes
import math
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from ffn_faas.experts.kernels.native_kernel import NativeKernel
from ffn_faas.experts.spec import MoESpec
from tests import oracle
from tests.data import TinyModel
from tests.experts.emulated import AMX, HERE, compiled, library, module
from tests.experts.test_native_kernel import LIMIT, MODEL, ODD, SMALLEST, fill, inputs, run

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="no g++")
HAS_AMX = "amx_bf16" in Path("/proc/cpuinfo").read_text().split()
TAIL = TinyModel(hidden=144, inter=80, experts=4, top_k=2, layers=1)
"""Whole lines of 16 columns, and an odd number of them: the last tile of either product is half full."""


@pytest.fixture(scope="module")
def emulated(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    return library(tmp_path_factory.mktemp("emulated") / "emulated.so")


def build(emulated: ctypes.CDLL, model: TinyModel, *, threads: int = 2, path: str = "amx") -> NativeKernel:
    kernel = NativeKernel(MoESpec.from_config(model.config(), model.dtype), threads=threads, path=path)
    kernel._native = module(emulated)
    return fill(kernel, model)


@pytest.mark.parametrize("model", [MODEL, ODD, SMALLEST, TAIL], ids=["whole", "odd", "smallest", "tail"])
@pytest.mark.parametrize("tokens", [1, 7, 33, 300])
def test_it_agrees_with_the_oracle_and_the_scalar_path(emulated: ctypes.CDLL, model: TinyModel, tokens: int) -> None:
    hidden, ids, weights = inputs(model, tokens)
    result = run(build(emulated, model), hidden, ids, weights)
    scalar = run(build(emulated, model, path="scalar"), hidden, ids, weights)
    assert oracle.l2_error(result, oracle.moe(hidden, *model.expert_weights(0), ids, weights)) < LIMIT["amx"]
    assert oracle.l2_error(result, scalar.double().numpy()) < LIMIT["amx"]


@pytest.mark.parametrize("model", [MODEL, TAIL], ids=["whole", "tail"])
def test_bits_depend_neither_on_threads_nor_on_what_arrives_together(emulated: ctypes.CDLL, model: TinyModel) -> None:
    kernel = build(emulated, model)
    hidden, ids, weights = inputs(model, 150)
    for experts in (1, 2, model.experts):  # all rows at one expert: blocks of every size, several jobs
        chosen = ids % experts
        whole = run(kernel, hidden, chosen, weights)
        assert torch.equal(run(build(emulated, model, threads=3), hidden, chosen, weights), whole)
        begin = 0
        for rows in (1, 2, 5, 16, 17, 31, 33, 45):  # 150 rows
            part = slice(begin, begin + rows)
            assert torch.equal(run(kernel, hidden[part], chosen[part], weights[part]), whole[part])
            begin += rows


def test_a_nan_stays_in_its_row_and_is_left_behind_nowhere(emulated: ctypes.CDLL) -> None:
    kernel = build(emulated, TAIL)
    hidden, ids, weights = inputs(TAIL, 60)
    clean = run(kernel, hidden, ids, weights)
    dirty = hidden.clone()
    dirty[5, 17] = float("nan")
    result = run(kernel, dirty, ids, weights)
    assert torch.isnan(result[5]).all()
    others = torch.arange(60) != 5
    assert torch.equal(result[others], clean[others])
    dirty[:] = float("nan")
    run(kernel, dirty, ids, weights)
    assert torch.equal(run(kernel, hidden, ids, weights), clean)


def product(function: object, x: np.ndarray, weights: np.ndarray, sums: np.ndarray) -> np.ndarray:
    result = np.ascontiguousarray(sums, np.float32).copy()
    address = result.ctypes.data_as(ctypes.c_void_p)
    function(x.ctypes.data_as(ctypes.c_void_p), weights.ctypes.data_as(ctypes.c_void_p), address, len(x))  # type: ignore[operator]
    return result


def bf16(values: object) -> np.ndarray:
    """Values that bf16 holds, as its bits."""
    return (np.asarray(values, np.float32).view(np.uint32) >> 16).astype(np.uint16)


def test_an_emulated_product_has_the_order_of_sums_that_its_definition_has(emulated: ctypes.CDLL) -> None:
    # Even and odd k apart, in ascending order, with one rounding each; then both together; then the sum so far.
    rng = np.random.default_rng(5)
    x = rng.standard_normal((3, 32)).astype(np.float32).view(np.uint32) & 0xFFFF0000
    weights = rng.standard_normal((16, 16, 2)).astype(np.float32).view(np.uint32) & 0xFFFF0000
    sums = rng.standard_normal((3, 16)).astype(np.float32)
    real_x, real_weights = x.view(np.float32).astype(np.float64), weights.view(np.float32).astype(np.float64)
    expected = np.empty_like(sums)
    for row in range(3):
        for column in range(16):
            apart = [np.float32(0), np.float32(0)]
            for pair in range(16):
                for odd in (0, 1):
                    # Products of bf16 are exact; where their sum in float64 is too, its rounding is that of an fma.
                    exact = math.fsum([real_x[row, 2 * pair + odd] * real_weights[pair, column, odd], apart[odd]])
                    apart[odd] = np.float32(exact)
            expected[row, column] = sums[row, column] + (apart[0] + apart[1])
    result = product(emulated.emulated_product, (x >> 16).astype(np.uint16), (weights >> 16).astype(np.uint16), sums)
    assert np.array_equal(result.view(np.uint32), expected.view(np.uint32))


def test_an_emulated_product_flushes_denormals(emulated: ctypes.CDLL) -> None:
    x, weights, sums = np.zeros((1, 32)), np.zeros((16, 16, 2)), np.zeros((1, 16))
    x[0, :2] = 2.0**-100, 2.0**-130  # the second is a denormal: read as zero
    weights[0, :, 0], weights[0, :, 1] = 2.0**-30, 2.0**100  # the first product is a denormal: summed as zero
    sums[0, 3] = 2.0**-140
    result = product(emulated.emulated_product, bf16(x), bf16(weights), sums)
    assert not result.any()


@pytest.mark.skipif(not HAS_AMX, reason="no AMX")
def test_the_instruction_gives_the_bits_of_its_emulation(emulated: ctypes.CDLL, tmp_path: Path) -> None:
    from ffn_faas import native

    if "amx" not in native.load().ExpertsCpu.paths(native.load().BF16):
        pytest.skip("not allowed to use tiles")
    stub = tmp_path / "avx512.cpp"
    stub.write_text(
        '#include "experts_cpu/path.hpp"\nconst ffn::cpu::Path* ffn::cpu::avx512_path(Type) { return 0; }\n'
    )
    real = compiled(tmp_path / "amx.so", AMX, HERE / "tile_products.cpp", stub)
    rng = np.random.default_rng(6)
    for case in range(400):
        rows = 1 + case % 16
        # Ever wider ranges of exponents, up to denormals, infinities and NaNs of all bits.
        spread = 2 ** (case % 10)

        def some(*shape: int, spread: int = spread) -> np.ndarray:
            if spread == 512:
                return rng.integers(0, 1 << 16, shape, dtype=np.uint16)
            return bf16(rng.standard_normal(shape) * 2.0 ** rng.integers(-min(spread, 130), 1 + spread // 8, shape))

        x, weights = some(rows, 32), some(16, 16, 2)
        sums = (some(rows, 16).astype(np.uint32) << 16).view(np.float32)
        seen, expected = (
            product(real.amx_product, x, weights, sums),
            product(emulated.emulated_product, x, weights, sums),
        )
        both_nan = np.isnan(seen) & np.isnan(expected)
        assert np.array_equal(seen.view(np.uint32)[~both_nan], expected.view(np.uint32)[~both_nan])
