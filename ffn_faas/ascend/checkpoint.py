"""Reads quantized experts as msModelSlim stores them into the layout of the layered operators."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from ffn_faas.ascend.numerics import int4, scales
from ffn_faas.ascend.resident import ResidentExperts
from ffn_faas.errors import ModelRefused, ResourceError

if TYPE_CHECKING:
    import torch

    from ffn_faas.experts.checkpoint import Checkpoint
    from ffn_faas.experts.spec import MoESpec

Progress = Callable[[int, int], None]
_FLOATS = ("F32", "BF16", "F16")
GATE, UP, DOWN = "gate_proj", "up_proj", "down_proj"


def expert_tensors(spec: MoESpec) -> dict[str, tuple[tuple[int | None, ...], tuple[str, ...]]]:
    """Shape and possible types of each tensor of an expert, by its name after the expert's; None is any size."""
    hidden, inter = spec.hidden_size, spec.intermediate_size
    found: dict[str, tuple[tuple[int | None, ...], tuple[str, ...]]] = {}
    for name, out, fan_in in ((GATE, inter, hidden), (UP, inter, hidden), (DOWN, hidden, inter)):
        is_int4 = spec.quantization == "w4a8"
        found[f"{name}.weight"] = (out // 2 if is_int4 else out, fan_in), ("I8",)
        found[f"{name}.weight_scale"] = (out, 1), _FLOATS
        if is_int4:
            found[f"{name}.scale_bias"] = (out, None if name == DOWN else 1), ("F32",)
    return found


def load(spec: MoESpec, checkpoint: Checkpoint, experts: range, device: Any, progress: Progress) -> ResidentExperts:
    """The tensors of global ``experts`` of every layer, and nothing else. Every header is checked before any byte.

    Blocks. Raises ModelRefused (missing tensor, wrong shape or type) and ResourceError (a file cannot be read).
    """
    wanted = expert_tensors(spec)
    _check(spec, checkpoint, experts, wanted)
    resident = ResidentExperts()
    with ExitStack() as stack:
        read = _Reader(checkpoint, stack)
        for number, prefix in enumerate(spec.layers):
            layer = [{name: read(f"{prefix}.{expert}.{name}") for name in wanted} for expert in experts]
            resident.append(*_stacked(spec, layer), device=device)
            progress(number + 1, spec.num_layers)
    return resident


def _check(
    spec: MoESpec,
    checkpoint: Checkpoint,
    experts: range,
    wanted: dict[str, tuple[tuple[int | None, ...], tuple[str, ...]]],
) -> None:
    for prefix in spec.layers:
        for expert in experts:
            for name, (shape, types) in wanted.items():
                full = f"{prefix}.{expert}.{name}"
                entry = checkpoint.tensors.get(full)
                if entry is None:
                    raise ModelRefused(f"{checkpoint.directory} lacks expert tensor {full}")
                fits = len(entry.shape) == len(shape) and all(
                    want in (None, have) for want, have in zip(shape, entry.shape, strict=True)
                )
                if not fits or entry.dtype not in types:
                    raise ModelRefused(
                        f"{entry.path}: tensor {full} is {entry.dtype} {list(entry.shape)}, "
                        f"{spec.quantization} needs {' or '.join(types)} {list(shape)}"
                    )


class _Reader:
    """Tensors by name, each file mapped once."""

    def __init__(self, checkpoint: Checkpoint, stack: ExitStack) -> None:
        self._checkpoint = checkpoint
        self._stack = stack
        self._files: dict[Any, Any] = {}

    def __call__(self, name: str) -> torch.Tensor:
        from safetensors import safe_open

        path = self._checkpoint.tensors[name].path
        try:
            if path not in self._files:
                self._files[path] = self._stack.enter_context(safe_open(path, framework="pt"))
            tensor: torch.Tensor = self._files[path].get_tensor(name)
        except (OSError, RuntimeError) as error:
            raise ResourceError(f"cannot read {name} of {path}: {error}") from error
        return tensor


def _stacked(spec: MoESpec, layer: list[dict[str, torch.Tensor]]) -> tuple[Any, ...]:
    """w13, its scales and biases, w2, its scales and biases of one layer, on the host."""
    import torch

    def both(kind: str) -> torch.Tensor:
        return torch.stack([torch.cat([expert[f"{GATE}.{kind}"], expert[f"{UP}.{kind}"]]) for expert in layer])

    def down(kind: str) -> torch.Tensor:
        return torch.stack([expert[f"{DOWN}.{kind}"] for expert in layer])

    wide, narrow = both("weight_scale").float().squeeze(-1), down("weight_scale").float().squeeze(-1)
    if spec.quantization == "w4a8":
        pairs = [torch.cat([int4.from_pairs(expert[f"{name}.weight"]) for name in (GATE, UP)]) for expert in layer]
        return (
            int4.to_words(torch.stack(pairs).transpose(1, 2).contiguous()),
            scales.encode(wide),
            both("scale_bias").squeeze(-1).contiguous(),
            int4.to_words(int4.from_pairs(down("weight")).transpose(1, 2).contiguous()),
            scales.encode(narrow).unsqueeze(1),
            down("scale_bias").sum(-1).contiguous(),
        )
    # The second operator pairs the type of its scales with that of its output.
    last = narrow.to(torch.bfloat16) if spec.dtype == "bfloat16" else narrow
    return (
        both("weight").transpose(1, 2).contiguous(),
        wide.contiguous(),
        None,
        down("weight").transpose(1, 2).contiguous(),
        last.contiguous(),
        torch.zeros(last.shape, dtype=torch.int32),
    )
