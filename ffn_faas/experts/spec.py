"""MoESpec: all that F needs to know about a model, read from its config.json. No torch, no weights."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ffn_faas.errors import ModelRefused, UsageError
from ffn_faas.experts import quantized
from ffn_faas.experts.architectures import ARCHITECTURES, NOT_RUN, Architecture
from ffn_faas.experts.layouts import BIASES, DOWN, GATE, UP, Source, matrix_shape

ELEMENT_SIZES: Mapping[str, int] = {"bfloat16": 2, "float16": 2, "float32": 4}
_DTYPE_ALIASES = {"half": "float16", "float": "float32"}
_BITS = {"w4a8": 4, "w8a8": 8}
_LARGEST_FIELD = 1 << 24
_STEPS = ("decoder_sparse_step", "moe_layer_freq", "moe_layer_interval", "interleave_moe_layer_step")
_LAYER_NUMBERS = ("first_k_dense_replace", "moe_layer_start_index", "moe_layer_end_index")


@dataclass(frozen=True)
class MoESpec:
    """The routed experts of one model; every layer in ``layers`` has the same shape."""

    architecture: str
    hidden_size: int
    intermediate_size: int
    num_experts: int
    top_k: int
    dtype: str
    """bfloat16, float16 or float32: type of the resident weights and of hidden rows on the wire."""
    activation: str
    """silu or swigluoai, as vLLM's kernels name them."""
    quantization: str
    """"none", w4a8 or w8a8 (experts.quantized)."""
    layers: tuple[str, ...]
    """Checkpoint prefix of each routed-experts layer, in model order: model.layers.3.mlp.experts."""
    has_bias: bool = False
    swiglu_limit: float | None = None
    """The gate is clamped to at most this before its silu, the up half to within plus and minus this; None: neither."""

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def activation_text(self) -> str:
        """What both sides compare."""
        return self.activation if self.swiglu_limit is None else f"{self.activation} clamped at {self.swiglu_limit:g}"

    @property
    def matrices(self) -> tuple[int, ...]:
        """Which matrices and vectors an expert has (experts.layouts)."""
        return (GATE, UP, DOWN, *(BIASES if self.has_bias else ()))

    def matrix_shape(self, matrix: int) -> tuple[int, ...]:
        return matrix_shape(matrix, self.hidden_size, self.intermediate_size)

    @property
    def expert_bytes(self) -> int:
        """Resident bytes of one expert of one layer, not counting the scales of a quantized one."""
        elements = sum(math.prod(self.matrix_shape(matrix)) for matrix in self.matrices)
        return elements * _BITS[self.quantization] // 8 if self.quantization in _BITS else elements * self._element

    @property
    def _element(self) -> int:
        return ELEMENT_SIZES[self.dtype]

    @property
    def sources(self) -> tuple[Source, ...]:
        """The tensors in which the checkpoint keeps an expert."""
        return ARCHITECTURES[self.architecture].sources

    def expert_tensors(self, layer: int, expert: int) -> tuple[str, ...]:
        """Checkpoint names of the tensors that hold global expert ``expert`` of ``layers[layer]``, as ``sources``."""
        return tuple(f"{self.layers[layer]}.{source.name.format(expert)}" for source in self.sources)

    @property
    def tensor_prefixes(self) -> tuple[str, ...]:
        """What the names of expert tensors begin with, without the dot that follows."""
        own = ARCHITECTURES[self.architecture].tensor_prefixes
        return tuple(layer + prefix for layer in self.layers for prefix in own)

    @classmethod
    def from_model_dir(cls, path: Path, dtype: str = "auto") -> MoESpec:
        """Read ``path``/config.json. Raises UsageError (not there, not JSON), ModelRefused (cannot be served)."""
        config_path = path / "config.json"
        try:
            config = json.loads(config_path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise UsageError(f"{path} holds no config.json", remedy="MODEL is a Hugging Face directory") from None
        except (OSError, ValueError, RecursionError) as error:
            raise UsageError(f"cannot read {config_path}: {error}") from error
        spec = cls.from_config(config, dtype, name=str(path))
        return replace(spec, quantization=quantized.of_experts(path, spec.expert_tensors(0, 0)[0]))

    @classmethod
    def from_config(cls, config: object, dtype: str = "auto", *, name: str = "the model") -> MoESpec:
        """``dtype`` as ``--dtype``: auto, bfloat16, float16, half, float32 or float; ``name`` is for messages."""
        if not isinstance(config, dict):
            raise ModelRefused(f"{name}: config.json does not hold an object")
        architecture, row = _architecture(config, name)
        config = {**row.defaults, **config}
        quantization = config.get("quantization_config") or config.get("compression_config")
        if quantization:
            method = quantization.get("quant_method", "unnamed") if isinstance(quantization, dict) else quantization
            raise ModelRefused(
                f"{name}: quantization {str(method)!r} cannot be served", remedy="use an unquantized checkpoint"
            )
        refused = row.refused(config)
        if refused:
            raise ModelRefused(f"{name} ({architecture}): {refused}")
        layers = _moe_layers(config, row, name)
        experts_field = next((field for field in row.num_experts if config.get(field) is not None), row.num_experts[0])
        spec = cls(
            architecture=architecture,
            hidden_size=_positive(config, row.hidden_size, name),
            intermediate_size=_positive(config, row.intermediate_size, name),
            num_experts=_positive(config, experts_field, name),
            top_k=_positive(config, row.top_k, name),
            dtype=resolve_dtype(config, dtype, name),
            activation=row.activation or _activation(config, name),
            quantization="none",
            layers=layers,
            has_bias=row.has_bias,
            swiglu_limit=_swiglu_limit(config, row.swiglu_limit, name),
        )
        if spec.top_k > spec.num_experts:
            raise ModelRefused(f"{name}: {row.top_k} {spec.top_k} is more than its {spec.num_experts} experts")
        return spec


def resolve_dtype(config: Mapping[str, Any], asked: str, name: str = "the model") -> str:
    """As vLLM's ``--dtype``: auto takes the checkpoint's type, but bfloat16 for a float32 checkpoint.

    vLLM guesses from the tensors when config.json is silent; here the user is asked.
    """
    asked = asked.lower()
    asked = _DTYPE_ALIASES.get(asked, asked)
    if asked in ELEMENT_SIZES:
        return asked
    if asked != "auto":
        raise UsageError(f"dtype {asked!r} is unknown", remedy="auto, bfloat16, float16, half, float32 or float")
    stored = config.get("dtype") or config.get("torch_dtype")
    if stored is None:
        raise UsageError(f"{name}: config.json names no dtype", remedy="give --dtype, the same on both sides")
    stored = str(stored).removeprefix("torch.")
    if stored not in ELEMENT_SIZES:
        raise ModelRefused(f"{name}: dtype {stored!r} cannot be served, only {', '.join(ELEMENT_SIZES)}")
    return "bfloat16" if stored == "float32" else stored


def _architecture(config: Mapping[str, Any], name: str) -> tuple[str, Architecture]:
    listed = config.get("architectures")
    architectures = [str(entry) for entry in listed] if isinstance(listed, list) else []
    for architecture in architectures:
        if architecture in ARCHITECTURES:
            return architecture, ARCHITECTURES[architecture]
        if architecture in NOT_RUN:
            raise ModelRefused(f"{name}: {architecture} does not run on the Attention side: {NOT_RUN[architecture]}")
    named = ", ".join(architectures) or "no architecture"
    if not any("expert" in key for key in config):
        raise ModelRefused(f"{name} ({named}) is not a Mixture-of-Experts model: it has no routed experts to serve")
    raise ModelRefused(f"{name}: architecture {named} is unknown", remedy="known: " + ", ".join(ARCHITECTURES))


def _activation(config: Mapping[str, Any], name: str) -> str:
    activation = config.get("hidden_act", "silu")
    if activation != "silu":
        raise ModelRefused(f"{name}: activation {activation!r} cannot be served, only 'silu'")
    return "silu"


def _swiglu_limit(config: Mapping[str, Any], field: str, name: str) -> float | None:
    limit = config.get(field) if field else None
    if limit is None:
        return None
    if isinstance(limit, bool) or not isinstance(limit, int | float) or not 0 < limit < math.inf:
        raise ModelRefused(f"{name}: config.json has {field} = {limit!r}, a positive number is needed")
    return float(limit)


def _moe_layers(config: Mapping[str, Any], row: Architecture, name: str) -> tuple[str, ...]:
    count = _positive(config, "num_hidden_layers", name)
    for step in _STEPS:
        if config.get(step) is not None:
            _positive(config, step, name)
    for field in _LAYER_NUMBERS:
        if type(config.get(field, 0)) is not int:
            raise ModelRefused(f"{name}: config.json has {field} = {config[field]!r}, a layer number is needed")
    dense = config.get("mlp_only_layers")
    if dense is not None and not (isinstance(dense, list) and all(type(layer) is int for layer in dense)):
        raise ModelRefused(f"{name}: mlp_only_layers is {dense!r}, not a list of layer numbers")
    layers = tuple(row.experts_prefix.format(layer) for layer in range(count) if row.is_moe_layer(config, layer))
    if not layers:
        raise ModelRefused(f"{name}: none of its {count} layers has routed experts")
    return layers


def _positive(config: Mapping[str, Any], field: str, name: str) -> int:
    value = config.get(field)
    if type(value) is not int or not 0 < value <= _LARGEST_FIELD:
        raise ModelRefused(f"{name}: config.json has {field} = {value!r}, a positive number is needed")
    return value
