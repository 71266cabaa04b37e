"""Medians, ratios and the printed table of a bench. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def median(samples: Sequence[float]) -> float:
    """The middle sample; the upper one of two."""
    return sorted(samples)[len(samples) // 2]


def quantile(samples: Sequence[float], share: float) -> float:
    """The sample at that share of the sorted ones (nearest rank); 0.5 is ``median``."""
    ordered = sorted(samples)
    return median(ordered) if share == 0.5 else ordered[min(len(ordered) - 1, round(share * (len(ordered) - 1)))]


def quantiles(samples: Sequence[float]) -> tuple[float, float]:
    """Median and 99th percentile (nearest rank)."""
    return median(samples), quantile(samples, 0.99)


def table(rows: Sequence[Mapping[str, Any]], columns: Mapping[str, str]) -> str:
    """``columns``: key of a row -> heading. Missing values print as a dash, floats with three digits or more."""
    lines = [list(columns.values())]
    lines += [[_text(row.get(key)) for key in columns] for row in rows]
    widths = [max(len(line[i]) for line in lines) for i in range(len(columns))]
    padded = ["  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in lines]
    return "\n".join([padded[0], "-" * len(padded[0]), *padded[1:]])


def line(row: Mapping[str, Any], columns: Mapping[str, str]) -> str:
    """One row while others are still being measured: ``heading value`` for what it has."""
    return ", ".join(f"{heading} {_text(row[key])}" for key, heading in columns.items() if row.get(key) is not None)


def _text(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.1f}" if abs(value) >= 10 else f"{value:.3g}"
    return str(value)
