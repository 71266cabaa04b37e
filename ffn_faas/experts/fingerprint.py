"""What A and F compare before they work together, computed by each on its own from the same model directory."""

from __future__ import annotations

import hashlib
import json
import os
from collections import defaultdict
from pathlib import Path

from ffn_faas.errors import ResourceError
from ffn_faas.experts.checkpoint import Checkpoint
from ffn_faas.experts.safetensors_header import TensorEntry, open_unbuffered
from ffn_faas.experts.spec import MoESpec
from ffn_faas.protocol.messages import Fingerprint

_SAMPLE_BYTES = 256


def fingerprint(spec: MoESpec, checkpoint: Checkpoint | None) -> Fingerprint:
    """``checkpoint`` None stands for dummy weights. Reads a few bytes of each non-expert tensor, none of an expert.

    Raises ResourceError when a file cannot be read.
    """
    return Fingerprint(
        architecture=spec.architecture,
        hidden_size=spec.hidden_size,
        intermediate_size=spec.intermediate_size,
        num_experts=spec.num_experts,
        top_k=spec.top_k,
        dtype=spec.dtype,
        activation=spec.activation_text,
        quantization=spec.quantization,
        num_moe_layers=spec.num_layers,
        checkpoint="dummy" if checkpoint is None else _digest(spec, checkpoint),
    )


def _digest(spec: MoESpec, checkpoint: Checkpoint) -> str:
    """sha256 over every tensor's name, file name, dtype and shape, and a sample of all tensors but the experts'.

    The sample tells a fine-tune of equal shapes apart: training moves the router, norms and attention too.
    """
    prefixes = tuple(f"{prefix}." for prefix in spec.tensor_prefixes)
    others: dict[Path, list[TensorEntry]] = defaultdict(list)
    for entry in checkpoint.tensors.values():
        if not entry.name.startswith(prefixes):
            others[entry.path].append(entry)
    samples: dict[str, str] = {}
    for path, entries in others.items():
        samples.update(_samples(path, entries))
    lines = sorted(
        json.dumps([entry.name, entry.path.name, entry.dtype, entry.shape, samples.get(entry.name, "")])
        for entry in checkpoint.tensors.values()
    )
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def _samples(path: Path, entries: list[TensorEntry]) -> dict[str, str]:
    try:
        fd = open_unbuffered(path)
        try:
            return {entry.name: os.pread(fd, min(_SAMPLE_BYTES, entry.nbytes), entry.offset).hex() for entry in entries}
        finally:
            os.close(fd)
    except OSError as error:
        raise ResourceError(f"cannot read {path}: {error.strerror}") from error
