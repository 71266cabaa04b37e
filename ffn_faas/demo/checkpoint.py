"""Makes a small Hugging Face checkpoint of a real architecture with random weights, for stock vLLM and F alike."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ffn_faas.demo import qwen3_moe, tokenizer
from ffn_faas.demo.blocks import AnySpec, draw
from ffn_faas.demo.families import FAMILIES
from ffn_faas.demo.shapes import Shape, shape_for
from ffn_faas.demo.weights import Weights
from ffn_faas.errors import ResourceError, UsageError
from ffn_faas.experts.checkpoint import Checkpoint
from ffn_faas.experts.spec import MoESpec
from ffn_faas.units import MIB

ARCHITECTURES: Mapping[str, Any] = {"qwen3_moe": qwen3_moe, **FAMILIES}
"""Each has ``config`` and ``tensors``."""
RECIPE_FILE = "ffn_faas_demo.json"
_RECIPE_VERSION = 3
_SHARD_BYTES = 192 * MIB
Report = Callable[[int, int], None]
"""Called with (bytes written, bytes in all)."""


def make_checkpoint(
    directory: Path,
    arch: str = "qwen3_moe",
    size_bytes: int | None = None,
    seed: int = 0,
    shards: int | None = None,
    num_experts: int | None = None,
    report: Report | None = None,
) -> Shape:
    """Write the checkpoint to ``directory``, or leave the one that is there if it was made with the same parameters.

    ``size_bytes`` is the least number of expert bytes. One shard is held in memory at a time. The directory appears
    only when it is complete. Raises UsageError for an unknown ``arch`` and ResourceError when ``directory`` holds
    something else or the disk is full.
    """
    if arch not in ARCHITECTURES:
        raise UsageError(f"unknown architecture {arch!r}", remedy=f"one of {', '.join(sorted(ARCHITECTURES))}")
    shape = shape_for(size_bytes, num_experts)
    recipe = {"version": _RECIPE_VERSION, "arch": arch, "seed": seed, "shards": shards, **vars(shape)}
    if directory.exists():
        if _recipe_of(directory) == recipe:
            return shape
        raise ResourceError(f"{directory} holds another checkpoint", remedy="remove it or name another directory")
    temporary = directory.with_name(f".{directory.name}.{os.getpid()}.partial")
    temporary.mkdir(parents=True)
    try:
        _require_space(temporary, shape)
        _write(temporary, arch, shape, seed, shards, report or (lambda done, total: None))
        (temporary / RECIPE_FILE).write_text(json.dumps(recipe, indent=2) + "\n")
        temporary.rename(directory)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return shape


def expert_bytes(directory: Path) -> int:
    """Bytes of the routed-expert tensors, summed over the headers of the checkpoint's files."""
    prefixes = tuple(f"{prefix}." for prefix in MoESpec.from_model_dir(directory).tensor_prefixes)
    tensors = Checkpoint.open(directory).tensors
    return sum(entry.nbytes for name, entry in tensors.items() if name.startswith(prefixes))


def _recipe_of(directory: Path) -> Any:
    try:
        return json.loads((directory / RECIPE_FILE).read_text())
    except (OSError, ValueError):
        return None


def _require_space(directory: Path, shape: Shape) -> None:
    free, needed = shutil.disk_usage(directory).free, int(shape.expert_bytes * 1.1) + 64 * MIB
    if free < needed:
        raise ResourceError(f"{directory} has {free} bytes free, the checkpoint needs {needed}", remedy="--work-dir")


def _write(directory: Path, arch: str, shape: Shape, seed: int, shards: int | None, report: Report) -> None:
    from safetensors.torch import save_file

    module = ARCHITECTURES[arch]
    vocabulary, spoken = tokenizer.train(directory)
    specs = list(module.tensors(shape, vocabulary))
    groups = _split(specs, shards)
    total = sum(spec.nbytes for spec in specs)
    weights = Weights(seed, next(spec for spec in specs if spec.kind == "head"), spoken)
    index: dict[str, str] = {}
    done = 0
    for number, group in enumerate(groups, start=1):
        name = "model.safetensors" if len(groups) == 1 else f"model-{number:05d}-of-{len(groups):05d}.safetensors"
        save_file({spec.name: draw(weights, spec) for spec in group}, directory / name, {"format": "pt"})
        index.update({spec.name: name for spec in group})
        done += sum(spec.nbytes for spec in group)
        report(done, total)
    if len(groups) > 1:
        text = json.dumps({"metadata": {"total_size": total}, "weight_map": index}, indent=2)
        (directory / "model.safetensors.index.json").write_text(text + "\n")
    (directory / "config.json").write_text(json.dumps(module.config(shape, vocabulary, 0), indent=2) + "\n")
    generation = {"bos_token_id": 0, "eos_token_id": 0, "do_sample": False}
    (directory / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")


def _split(specs: list[AnySpec], shards: int | None) -> list[list[AnySpec]]:
    """Consecutive groups of about equal bytes."""
    total = sum(spec.nbytes for spec in specs)
    count = shards or max(1, -(-total // _SHARD_BYTES))
    groups: list[list[AnySpec]] = [[] for _ in range(min(count, len(specs)))]
    done = 0
    for spec in specs:
        groups[min(done * len(groups) // total, len(groups) - 1)].append(spec)
        done += spec.nbytes
    return [group for group in groups if group]
