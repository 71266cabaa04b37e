"""What of a checkpoint can be checked with the files that are there: headers, an index, or nothing but config.json."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ffn_faas.errors import ModelRefused, ResourceError
from ffn_faas.experts.checkpoint import INDEX_NAME, Checkpoint
from ffn_faas.experts.spec import MoESpec


@dataclass(frozen=True)
class Seen:
    """``what`` is "headers", "index" or "config"; ``stored_bytes`` of the experts is known from headers only."""

    what: str
    stored_bytes: int | None = None
    problem: str | None = None


def look(directory: Path, spec: MoESpec) -> Seen:
    """The deepest look that the files allow; reads no weights. Raises nothing: what is off is the ``problem``."""
    index = directory / INDEX_NAME
    try:
        if index.exists():
            names = _weight_map(index)
            if not all((directory / str(file)).is_file() for file in names.values()):
                return Seen("index", problem=_missing(spec, set(names)))
        elif not any(directory.glob("*.safetensors")):
            return Seen("config")
        return Seen("headers", stored_bytes=_stored(Checkpoint.open(directory), spec))
    except (ModelRefused, ResourceError) as error:
        return Seen("headers", problem=str(error))


def _weight_map(index: Path) -> dict[str, Any]:
    try:
        content = json.loads(index.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ResourceError(f"cannot read {index}: {error}") from error
    names = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(names, dict):
        raise ResourceError(f"{index} has no weight_map from tensor names to file names")
    return names


def _missing(spec: MoESpec, names: set[str]) -> str | None:
    for layer in range(spec.num_layers):
        for expert in range(spec.num_experts):
            for name in spec.expert_tensors(layer, expert):
                if name not in names:
                    return f"{INDEX_NAME} lacks expert tensor {name}"
    return None


def _stored(checkpoint: Checkpoint, spec: MoESpec) -> int:
    return sum(
        piece.entry.nbytes
        for layer in range(spec.num_layers)
        for expert in range(spec.num_experts)
        for piece in checkpoint.expert(spec, layer, expert)
    )
