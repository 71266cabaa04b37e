"""How msModelSlim marks and stores quantized routed experts. Reads JSON only; no torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ffn_faas.errors import ModelRefused, UsageError

DESCRIPTION = "quant_model_description.json"
KINDS = {"W4A8_DYNAMIC": "w4a8", "W8A8_DYNAMIC": "w8a8"}
"""How a tensor is marked -> MoESpec.quantization. Weights per output channel, rows per token while the model runs."""
UNQUANTIZED = "FLOAT"


def of_experts(directory: Path, first_weight: str) -> str:
    """``none``, ``w4a8`` or ``w8a8``: what the description beside config.json says of ``first_weight``.

    That is the name of one expert's weight. Without a description the checkpoint is not quantized that way. Raises
    UsageError when it cannot be read, ModelRefused for other quantizations and for scales by groups.
    """
    path = directory / DESCRIPTION
    try:
        content: Any = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return "none"
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(f"cannot read {path}: {error}") from error
    if not isinstance(content, dict):
        raise UsageError(f"{path} does not hold an object")
    kind = content.get(first_weight, UNQUANTIZED)
    if kind == UNQUANTIZED:
        return "none"
    if kind not in KINDS:
        raise ModelRefused(f"{path}: experts of kind {kind!r} cannot be served", remedy=f"one of {', '.join(KINDS)}")
    if content.get("group_size"):
        raise ModelRefused(
            f"{path}: group_size is {content['group_size']!r}: scales by groups cannot be served",
            remedy="convert the checkpoint with one scale per output channel",
        )
    return KINDS[kind]
