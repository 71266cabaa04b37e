"""Sizes as people write them."""

from __future__ import annotations

import re

from ffn_faas.errors import UsageError

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
_UNITS = {"": 1, "b": 1, "kib": KIB, "mib": MIB, "gib": GIB, "kb": 10**3, "mb": 10**6, "gb": 10**9}


def parse_size(text: str) -> int:
    """``64MiB``, ``1 GiB`` or ``500MB`` in bytes. Raises UsageError."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text)
    if match is None or match[2].lower() not in _UNITS:
        raise UsageError(f"{text!r} is not a size", remedy="write it like 64MiB or 1GiB")
    return int(float(match[1]) * _UNITS[match[2].lower()])


def format_size(nbytes: float) -> str:
    """Short, for people: ``4.5MiB``."""
    for unit, size in (("GiB", GIB), ("MiB", MIB), ("KiB", KIB)):
        if nbytes >= size:
            return f"{nbytes / size:.1f}{unit}"
    return f"{nbytes:.0f}B"
