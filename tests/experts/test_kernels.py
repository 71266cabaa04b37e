"""Kernels against the float64 oracle. vLLM's own operators are the yardstick; without vLLM only torch is tested."""

from __future__ import annotations

import importlib.util

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ffn_faas.errors import ModelRefused, ResourceError, UsageError
from ffn_faas.experts.kernels import KERNEL_NAMES, create_kernel
from ffn_faas.experts.kernels.base import ExpertKernel
from ffn_faas.experts.spec import MoESpec
from ffn_faas.protocol.topology import expert_range
from tests import oracle
from tests.data import TinyModel, routing

HAS_VLLM = importlib.util.find_spec("vllm") is not None
needs_vllm = pytest.mark.skipif(not HAS_VLLM, reason="vLLM is not installed")
KERNELS = ["torch", pytest.param("vllm", marks=needs_vllm)]
MODEL = TinyModel(hidden=128, inter=64, experts=16, top_k=4, layers=2)
LAYER = 1


def build(name: str, model: TinyModel = MODEL, experts: range | None = None) -> ExpertKernel:
    """A kernel filled with the weights of ``model``, without files."""
    spec = MoESpec.from_config(model.config(), model.dtype)
    kernel = create_kernel(name, spec)
    experts = range(model.experts) if experts is None else experts
    kernel.prepare()
    kernel.allocate(experts)
    for layer in range(model.layers):
        for buffer, whole in zip(kernel.layer_buffers(layer), model.expert_weights(layer), strict=True):
            buffer.copy_(whole[experts.start : experts.stop])
        kernel.finish_layer(layer)
    kernel.finish()
    return kernel


def run(kernel: ExpertKernel, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Into a poisoned output, as windows are poisoned."""
    out = torch.full(hidden.shape, float("nan"))
    kernel.compute(LAYER, hidden, ids.contiguous(), weights.contiguous(), out)
    return out


def run_split(name: str, ranks: int, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """What A sums up of ``ranks`` F ranks; rows that a rank has no expert of come along and must be zeros."""
    total = torch.zeros(hidden.shape)
    for rank in range(ranks):
        experts = expert_range(MODEL.experts, ranks, rank)
        local = torch.where((ids >= experts.start) & (ids < experts.stop), ids - experts.start, -1).int()
        partial = run(_cached(name, experts.start, experts.stop), hidden, local, weights)
        assert not partial[(local < 0).all(dim=1)].any()
        total += partial
    return total


_KERNELS: dict[tuple[str, int, int], ExpertKernel] = {}


def _cached(name: str, start: int = 0, stop: int = MODEL.experts) -> ExpertKernel:
    if (name, start, stop) not in _KERNELS:
        _KERNELS[name, start, stop] = build(name, experts=range(start, stop))
    return _KERNELS[name, start, stop]


def inputs(tokens: int, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    hidden = torch.randn(tokens, MODEL.hidden, generator=torch.Generator().manual_seed(seed)).bfloat16()
    return hidden, *routing(tokens, MODEL.experts, MODEL.top_k, seed)


def stock(hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """vLLM's operators, called here as its CPU experts class calls them."""
    from ffn_faas.experts.kernels import vllm_ops

    vllm_ops.load_ops()
    isa = vllm_ops.isa("bfloat16")
    packed = []
    for weight in MODEL.expert_weights(LAYER):
        packed.append(torch.empty_like(weight))
        torch.ops._C.prepack_moe_weight(weight, packed[-1], isa)
    out = torch.empty_like(hidden)
    torch.ops._C.cpu_fused_moe(out, hidden, *packed, None, None, weights, ids, False, "silu", isa)
    return out


@needs_vllm
@pytest.mark.parametrize("name", ["torch", "vllm"])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("tokens", [1, 2, 7, 256])
def test_error_is_at_most_a_quarter_above_that_of_stock(name: str, ranks: int, tokens: int) -> None:
    hidden, ids, weights = inputs(tokens, seed=tokens)
    exact = oracle.moe(hidden, *MODEL.expert_weights(LAYER), ids, weights)
    theirs, ours = stock(hidden, ids, weights), run_split(name, ranks, hidden, ids, weights)
    assert oracle.l2_error(ours, exact) <= 1.25 * oracle.l2_error(theirs, exact)
    if tokens >= 256:
        assert oracle.max_error(ours, exact) <= 1.25 * oracle.max_error(theirs, exact)


@needs_vllm
@pytest.mark.parametrize("tokens", [1, 5, 64])
def test_vllm_kernel_with_all_experts_gives_the_bits_of_stock(tokens: int) -> None:
    hidden, ids, weights = inputs(tokens, seed=3)
    assert torch.equal(run(_cached("vllm"), hidden, ids, weights).bfloat16(), stock(hidden, ids, weights))


@needs_vllm
def test_vllm_kernel_gives_the_bits_of_stock_beside_padding_rows() -> None:
    hidden, ids, weights = inputs(9, seed=4)
    expected = stock(hidden, ids, weights)
    padding = torch.tensor([0, 4, 8])
    ids[padding], weights[padding], hidden[padding] = -1, float("nan"), float("nan")
    expected[padding] = 0
    assert torch.equal(run(_cached("vllm"), hidden, ids, weights).bfloat16(), expected)


@needs_vllm
def test_vllm_kernel_splits_a_huge_item_without_changing_a_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    from ffn_faas.experts.kernels import vllm_kernel

    hidden, ids, weights = inputs(33, seed=5)
    expected = run(_cached("vllm"), hidden, ids, weights)
    monkeypatch.setattr(vllm_kernel, "_SCRATCH_BYTES", 15_000)  # 6 rows
    assert torch.equal(run(build("vllm"), hidden, ids, weights), expected)


@needs_vllm
def test_an_operator_of_vllm_with_other_operands_is_refused_with_its_schema(monkeypatch: pytest.MonkeyPatch) -> None:
    from ffn_faas.experts.kernels import vllm_experts

    monkeypatch.setattr(vllm_experts, "_OPERANDS", ["Tensor", "int"])
    with pytest.raises(ResourceError, match=r"other operands: _C::cpu_fused_moe\(Tensor.* str isa\) -> \(\)"):
        build("vllm")


@needs_vllm
def test_a_failing_operator_of_vllm_is_told_and_raised(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    from ffn_faas.experts.kernels import vllm_kernel

    real = vllm_kernel.VllmExperts
    monkeypatch.setattr(
        vllm_kernel, "VllmExperts", lambda shape, dtype, act, _isa, **rest: real(shape, dtype, act, "?", **rest)
    )
    hidden, ids, weights = inputs(2, seed=6)
    with pytest.raises(ResourceError, match="failed on 2 rows of layer 1"):
        run(build("vllm"), hidden, ids, weights)
    assert "vLLM's kernel failed on 2 rows of layer 1: " in capfd.readouterr().err


@needs_vllm
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("inter", [64, 40])
def test_vllm_kernel_pads_the_intermediate_size_and_serves_every_dtype(dtype: str, inter: int) -> None:
    model = TinyModel(hidden=64, inter=inter, experts=4, dtype=dtype)
    hidden = torch.randn(6, 64, generator=torch.Generator().manual_seed(0)).to(getattr(torch, dtype))
    ids, weights = routing(6, 4, 2, seed=0)
    exact = oracle.moe(hidden, *model.expert_weights(LAYER), ids, weights)
    assert oracle.l2_error(run(build("vllm", model), hidden, ids, weights), exact) < 0.01


def test_torch_kernel_serves_every_dtype() -> None:
    for dtype, limit in (("bfloat16", 5e-3), ("float16", 6e-4), ("float32", 1e-6)):
        model = TinyModel(dtype=dtype)
        hidden = torch.randn(9, 64, generator=torch.Generator().manual_seed(0)).to(getattr(torch, dtype))
        ids, weights = routing(9, 8, 2, seed=0)
        exact = oracle.moe(hidden, *model.expert_weights(LAYER), ids, weights)
        assert oracle.l2_error(run(build("torch", model), hidden, ids, weights), exact) < limit


def test_torch_kernel_widens_weights_in_blocks_without_losing_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    from ffn_faas.experts.kernels import torch_kernel

    monkeypatch.setattr(torch_kernel, "_SCRATCH_ELEMENTS", 1000)  # seven rows of w13; 128 is no multiple of it
    hidden, ids, weights = inputs(64, seed=6)
    exact = oracle.moe(hidden, *MODEL.expert_weights(LAYER), ids, weights)
    assert oracle.l2_error(run(build("torch"), hidden, ids, weights), exact) < 1e-3


@pytest.mark.parametrize("name", KERNELS)
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_any_routing_agrees_with_the_oracle(name: str, data: st.DataObject) -> None:
    """Padding, partly foreign rows, duplicate ids, zero weights, unused experts, no row at all."""
    tokens = data.draw(st.integers(0, 12))
    row = st.lists(st.integers(-1, MODEL.experts - 1), min_size=MODEL.top_k, max_size=MODEL.top_k)
    ids = torch.tensor(data.draw(st.lists(row, min_size=tokens, max_size=tokens)), dtype=torch.int32).reshape(
        tokens, MODEL.top_k
    )
    weights = torch.tensor(
        data.draw(st.lists(st.sampled_from([0.0, 0.125, 0.5, 1.0]), min_size=ids.numel(), max_size=ids.numel()))
    ).reshape(ids.shape)
    hidden = torch.randn(tokens, MODEL.hidden, generator=torch.Generator().manual_seed(tokens)).bfloat16()
    exact = oracle.moe(hidden, *MODEL.expert_weights(LAYER), ids, weights)
    poisoned = torch.where(ids < 0, float("nan"), weights)
    ours = run(_cached(name), hidden, ids, poisoned)
    assert not ours[(ids < 0).all(dim=1)].any()
    assert torch.isfinite(ours).all()
    torch.testing.assert_close(ours.double(), torch.from_numpy(exact), atol=0.03, rtol=0.03)


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("ranks", [1, 3])
def test_nan_row_stays_in_its_row(name: str, ranks: int) -> None:
    hidden, ids, weights = inputs(12, seed=7)
    clean = run_split(name, ranks, hidden, ids, weights)
    hidden[5, 17] = float("nan")
    dirty = run_split(name, ranks, hidden, ids, weights)
    assert torch.isnan(dirty[5]).all()
    others = torch.arange(12) != 5
    assert torch.equal(dirty[others], clean[others])


@pytest.mark.parametrize("name", KERNELS)
def test_empty_items_and_items_without_an_expert_give_exact_zeros(name: str) -> None:
    hidden, ids, weights = inputs(3, seed=8)
    assert run(_cached(name), hidden[:0], ids[:0], weights[:0]).shape == (0, MODEL.hidden)
    none_here = run(_cached(name), hidden, torch.full_like(ids, -1), torch.full_like(weights, float("nan")))
    assert torch.equal(none_here, torch.zeros(3, MODEL.hidden))


@pytest.mark.parametrize("name", KERNELS)
def test_layers_are_kept_apart(name: str) -> None:
    hidden, ids, weights = inputs(2, seed=9)
    out = torch.empty(2, MODEL.hidden)
    for layer in range(2):
        _cached(name).compute(layer, hidden, ids, weights, out)
        exact = oracle.moe(hidden, *MODEL.expert_weights(layer), ids, weights)
        assert oracle.l2_error(out, exact) < 0.01


@pytest.mark.parametrize("name", KERNELS)
def test_kernel_warms_up_accounts_and_releases(name: str) -> None:
    kernel = build(name)
    kernel.warm_up()
    assert kernel.resident_bytes == 2 * 16 * 3 * 128 * 64 * 2
    kernel.release()
    kernel.release()
    assert kernel.resident_bytes == 0


@pytest.mark.parametrize("name", KERNELS)
def test_kernels_compute_with_as_many_threads_as_the_settings_say(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    threads = torch.get_num_threads()
    monkeypatch.setenv("FFN_FAAS_NUM_THREADS", "1")
    create_kernel(name, MoESpec.from_config(MODEL.config())).prepare()
    assert torch.get_num_threads() == 1
    torch.set_num_threads(threads)


@needs_vllm
def test_vllm_kernel_refuses_shapes_that_its_operators_cannot_address() -> None:
    with pytest.raises(ModelRefused, match="divisible by 32, this model has 72"):
        create_kernel("vllm", MoESpec.from_config(TinyModel(hidden=72).config())).prepare()
    spec = MoESpec.from_config(TinyModel(hidden=8192, inter=8192, experts=128).config())
    with pytest.raises(ModelRefused, match="cannot address 128 experts"):
        create_kernel("vllm", spec).allocate(range(128))


def test_kernel_names_resolve_and_others_are_refused() -> None:
    spec = MoESpec.from_config(MODEL.config())
    assert {"auto", "torch", "vllm", "zero"} <= set(KERNEL_NAMES)
    assert create_kernel("torch", spec).name == "torch"
    assert create_kernel("auto", spec).name in KERNEL_NAMES
    with pytest.raises(UsageError, match=r"known: auto, .*torch"):
        create_kernel("triton", spec)


def test_absent_vllm_is_named_with_its_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    from ffn_faas.experts.kernels import vllm_ops

    monkeypatch.setattr(vllm_ops, "_registered", lambda: False)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ResourceError, match="--moe-kernel torch"):
        create_kernel("vllm", MoESpec.from_config(MODEL.config())).prepare()
