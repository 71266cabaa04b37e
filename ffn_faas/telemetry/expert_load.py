"""How evenly rows fall on experts. ``rows[layer][expert]`` counts since the start. Pure."""

from __future__ import annotations

from collections.abc import Sequence

Rows = Sequence[Sequence[int]]


def top(rows: Rows, count: int) -> list[tuple[int, int, int]]:
    """The busiest (rows, layer, expert), busiest first, none that was never used."""
    used = [(value, layer, expert) for layer, of in enumerate(rows) for expert, value in enumerate(of) if value]
    return sorted(used, key=lambda entry: (-entry[0], entry[1:]))[:count]


def imbalance_ratio(rows: Rows) -> float:
    """Rows of each layer's busiest expert, summed over layers, over those of its average one; 1 is even, or unused."""
    average = sum(sum(of) / len(of) for of in rows if of)
    return sum(max(of) for of in rows if of) / average if average else 1.0
