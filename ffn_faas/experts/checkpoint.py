"""A checkpoint directory of safetensors: which tensor lies where. Reads headers and the index, no weights, no torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from ffn_faas.errors import ModelRefused, ResourceError
from ffn_faas.experts.layouts import Source
from ffn_faas.experts.safetensors_header import TensorEntry, read_header
from ffn_faas.experts.spec import MoESpec

INDEX_NAME = "model.safetensors.index.json"
_SAFETENSORS_DTYPES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}


@dataclass(frozen=True)
class Piece:
    """The bytes of one expert in one tensor: ``entry`` is narrowed to them; shape and dtype are checked."""

    entry: TensorEntry
    source: Source


@dataclass(frozen=True)
class Checkpoint:
    """``tensors`` by name; with an index exactly the tensors that it lists."""

    directory: Path
    tensors: Mapping[str, TensorEntry]

    @classmethod
    def open(cls, directory: Path) -> Checkpoint:
        """Raises ResourceError (missing, truncated, corrupt file), ModelRefused (no safetensors at all)."""
        index = directory / INDEX_NAME
        if index.exists():
            return cls(directory, _by_index(directory, index))
        files = sorted(directory.glob("*.safetensors"))
        if not files:
            raise ModelRefused(f"{directory} holds no safetensors", remedy="convert the checkpoint to safetensors")
        tensors: dict[str, TensorEntry] = {}
        for path in files:
            for entry in read_header(path):
                other = tensors.setdefault(entry.name, entry)
                if other is not entry:
                    raise ResourceError(
                        f"tensor {entry.name!r} is in both {other.path} and {path}", remedy=f"{INDEX_NAME} is missing"
                    )
        return cls(directory, tensors)

    def expert(self, spec: MoESpec, layer: int, expert: int) -> tuple[Piece, ...]:
        """Where one expert lies. Raises ModelRefused: missing, wrong shape, or a type that is no plain float."""
        pieces = []
        for name, source in zip(spec.expert_tensors(layer, expert), spec.sources, strict=True):
            shape = source.shape(spec.hidden_size, spec.intermediate_size, spec.num_experts)
            entry = self._checked(name, shape, spec.layers[layer])
            pieces.append(Piece(_part(entry, expert) if source.stacked else entry, source))
        return tuple(pieces)

    def _checked(self, name: str, shape: tuple[int, ...], prefix: str) -> TensorEntry:
        entry = self.tensors.get(name)
        if entry is None:
            other = next((other for other in self.tensors if other.startswith(f"{prefix}.")), None)
            remedy = f"it has {other}: this way of storing the model's experts is unknown" if other else ""
            raise ModelRefused(f"{self.directory} lacks expert tensor {name}", remedy=remedy)
        if entry.shape != shape:
            raise ModelRefused(
                f"{entry.path}: tensor {name} has shape {list(entry.shape)}, config.json asks for {list(shape)}"
            )
        if entry.dtype not in _SAFETENSORS_DTYPES:
            raise ModelRefused(
                f"{entry.path}: tensor {name} has dtype {entry.dtype}, only {', '.join(_SAFETENSORS_DTYPES)} are served"
            )
        return entry


def _part(entry: TensorEntry, expert: int) -> TensorEntry:
    """The rows of ``expert`` along the first dimension."""
    nbytes = entry.nbytes // entry.shape[0]
    return replace(entry, offset=entry.offset + expert * nbytes, nbytes=nbytes, shape=entry.shape[1:])


def dtype_name(entry: TensorEntry) -> str:
    """The entry's type as ``MoESpec.dtype`` spells it; only for entries that ``Checkpoint.expert`` returned."""
    return _SAFETENSORS_DTYPES[entry.dtype]


def _by_index(directory: Path, index: Path) -> dict[str, TensorEntry]:
    try:
        content = json.loads(index.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ResourceError(f"cannot read {index}: {error}") from error
    weight_map = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
        raise ResourceError(f"{index} has no weight_map from tensor names to file names")
    tensors: dict[str, TensorEntry] = {}
    for file in sorted(set(weight_map.values())):
        if file in {"", ".."} or Path(file).name != file:
            raise ResourceError(f"{index} names {file!r}, which is not a file beside it")
        path = directory / file
        if not path.exists():
            raise ResourceError(f"{index} names {file}, which is missing from {directory}")
        tensors.update((entry.name, entry) for entry in read_header(path) if weight_map.get(entry.name) == file)
    missing = next((name for name in weight_map if name not in tensors), None)
    if missing is not None:
        raise ResourceError(
            f"{directory / weight_map[missing]} lacks tensor {missing!r}, which {index.name} puts there"
        )
    return tensors
