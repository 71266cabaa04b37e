"""Building blocks of demo checkpoints: attention, norms, dense and routed feed-forward parts, each with its scale."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ffn_faas.demo.qwen3_moe import (
    ATTENTION_GAIN,
    EXPERT_GAIN,
    HEAD_DIM,
    HEADS,
    KV_HEADS,
    ROUTER_GAIN,
    TensorSpec,
)

if TYPE_CHECKING:
    import torch

    from ffn_faas.demo.shapes import Shape
    from ffn_faas.demo.weights import Weights

BIAS_STD = 0.1
SHARED_GAIN = 0.3
"""Of shared experts and dense layers: answers must hang on the routed experts, not on these."""
KV_LORA, Q_LORA, NOPE_DIM, ROPE_DIM, VALUE_DIM = 512, 128, 128, 64, 128
"""Latent attention as DeepSeek has it."""


@dataclass(frozen=True)
class Stacked:
    """One tensor for all experts of a layer: [E, out, in], or [E, in, out] when ``transposed``.

    ``experts`` holds each expert's matrices, [out, in] one below the other, or ``interleaved`` row by row.
    """

    name: str
    experts: tuple[tuple[TensorSpec, ...], ...]
    transposed: bool = False
    interleaved: bool = False
    kind: str = "stacked"

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for parts in self.experts for part in parts)


AnySpec = TensorSpec | Stacked


def draw(weights: Weights, spec: AnySpec) -> torch.Tensor:
    """The tensor in bfloat16, whichever kind of spec it is."""
    import torch

    if isinstance(spec, TensorSpec):
        return weights.draw(spec)
    stacked = []
    for parts in spec.experts:
        drawn = [weights.draw(part) for part in parts]
        matrix = torch.stack(drawn, dim=1).flatten(0, 1) if spec.interleaved else torch.cat(drawn)
        stacked.append(matrix.t() if spec.transposed else matrix)
    return torch.stack(stacked).contiguous()


def linear(name: str, out: int, fan_in: int, gain: float = 1.0, bias: bool = False) -> Iterator[TensorSpec]:
    """A weight whose outputs are about ``gain`` times as strong as its inputs."""
    yield TensorSpec(f"{name}.weight", (out, fan_in), gain * fan_in**-0.5)
    if bias:
        yield TensorSpec(f"{name}.bias", (out,), BIAS_STD)


def norm(name: str, width: int, bias: bool = False) -> Iterator[TensorSpec]:
    yield TensorSpec(f"{name}.weight", (width,), kind="ones")
    if bias:
        yield TensorSpec(f"{name}.bias", (width,), BIAS_STD)


def attention(
    prefix: str, hidden: int, *, qkv_bias: bool = False, o_bias: bool = False, qk_norm: str = ""
) -> Iterator[TensorSpec]:
    """Grouped-query attention; ``qk_norm`` is "", "head" (one scale per head dimension) or "full" (per channel)."""
    queries, keys = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
    yield from linear(f"{prefix}.q_proj", queries, hidden, bias=qkv_bias)
    yield from linear(f"{prefix}.k_proj", keys, hidden, bias=qkv_bias)
    yield from linear(f"{prefix}.v_proj", keys, hidden, bias=qkv_bias)
    yield from linear(f"{prefix}.o_proj", hidden, queries, ATTENTION_GAIN, bias=o_bias)
    if qk_norm:
        yield from norm(f"{prefix}.q_norm", HEAD_DIM if qk_norm == "head" else queries)
        yield from norm(f"{prefix}.k_norm", HEAD_DIM if qk_norm == "head" else keys)


def latent_attention(prefix: str, hidden: int, q_lora: bool) -> Iterator[TensorSpec]:
    """DeepSeek's attention over a compressed key-value cache."""
    queries = HEADS * (NOPE_DIM + ROPE_DIM)
    if q_lora:
        yield from linear(f"{prefix}.q_a_proj", Q_LORA, hidden)
        yield from norm(f"{prefix}.q_a_layernorm", Q_LORA)
        yield from linear(f"{prefix}.q_b_proj", queries, Q_LORA)
    else:
        yield from linear(f"{prefix}.q_proj", queries, hidden)
    yield from linear(f"{prefix}.kv_a_proj_with_mqa", KV_LORA + ROPE_DIM, hidden)
    yield from norm(f"{prefix}.kv_a_layernorm", KV_LORA)
    yield from linear(f"{prefix}.kv_b_proj", HEADS * (NOPE_DIM + VALUE_DIM), KV_LORA)
    yield from linear(f"{prefix}.o_proj", hidden, HEADS * VALUE_DIM, ATTENTION_GAIN)


def dense(prefix: str, hidden: int, inter: int, gain: float = SHARED_GAIN) -> Iterator[TensorSpec]:
    """A gated feed-forward part that every token takes: a dense layer, or shared experts."""
    yield from linear(f"{prefix}.gate_proj", inter, hidden)
    yield from linear(f"{prefix}.up_proj", inter, hidden)
    yield from linear(f"{prefix}.down_proj", hidden, inter, gain)


def router(name: str, shape: Shape, bias: bool = False) -> Iterator[TensorSpec]:
    yield from linear(name, shape.experts, shape.hidden, ROUTER_GAIN, bias)


def expert(
    prefix: str, shape: Shape, names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
) -> tuple[TensorSpec, TensorSpec, TensorSpec]:
    """Gate, up and down of one routed expert; a column of down remembers a token (demo.qwen3_moe says why)."""
    fan_in, down = shape.hidden**-0.5, EXPERT_GAIN * shape.intermediate**-0.5
    wide = (shape.intermediate, shape.hidden)
    return (
        TensorSpec(f"{prefix}.{names[0]}.weight", wide, fan_in),
        TensorSpec(f"{prefix}.{names[1]}.weight", wide, fan_in),
        TensorSpec(f"{prefix}.{names[2]}.weight", wide[::-1], down, "memory"),
    )


def experts(
    prefix: str, shape: Shape, names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
) -> Iterator[TensorSpec]:
    """A tensor per expert and matrix."""
    for number in range(shape.experts):
        yield from expert(f"{prefix}.{number}", shape, names)


def stacked_experts(
    gate_up: str, down: str, shape: Shape, *, transposed: bool = False, interleaved: bool = False
) -> Iterator[Stacked]:
    """Two tensors for all experts of a layer, by their names."""
    drawn = [expert(f"{gate_up}.{number}", shape) for number in range(shape.experts)]
    yield Stacked(gate_up, tuple(matrices[:2] for matrices in drawn), transposed, interleaved)
    yield Stacked(down, tuple(matrices[2:] for matrices in drawn), transposed)


def correction_bias(name: str, shape: Shape, lead: tuple[int, ...] = ()) -> TensorSpec:
    """Added to the router's scores for choosing only; small, so that every expert is still chosen."""
    return TensorSpec(name, (*lead, shape.experts), 0.02)


def expert_biases(prefix: str, shape: Shape) -> Iterator[TensorSpec]:
    """GPT-OSS: gate and up interleaved [E, 2I], down [E, H]."""
    yield TensorSpec(f"{prefix}.gate_up_proj_bias", (shape.experts, 2 * shape.intermediate), BIAS_STD)
    yield TensorSpec(f"{prefix}.down_proj_bias", (shape.experts, shape.hidden), BIAS_STD / math.sqrt(shape.hidden))
