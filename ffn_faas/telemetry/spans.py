"""Times of single steps on F and of single posts on A, as the compiled parts keep them. CLOCK_MONOTONIC, in ns."""

from __future__ import annotations

import time
from typing import NamedTuple

MOST = 4096
"""Most spans that one process keeps."""


class StepSpan(NamedTuple):
    """One item on an F rank; native/shm/spans.hpp has the same fields."""

    began: int
    """The step before had ended, or recording began."""
    taken: int
    gathered: int
    """Posts lie side by side."""
    sorted: int
    """Rows are sorted by expert; 0 where the kernel does not say."""
    computed: int
    sent: int
    """The last flag is set."""
    layer: int
    rows: int
    parts: int
    """Posts, or parts of posts, in the item."""


class PostSpan(NamedTuple):
    """One post of an A rank, or one chunk of a batch above the capacity."""

    dispatching: int
    dispatched: int
    waiting: int
    """Combine was called, or the chunk before was summed."""
    answered: int
    summed: int
    stage: int
    layer: int
    """As F numbers it."""
    rows: int


def clock_offset_ns() -> int:
    """CLOCK_REALTIME minus CLOCK_MONOTONIC of this host: the closest of several readings."""
    readings = []
    for _ in range(9):
        before = time.monotonic_ns()
        real = time.time_ns()
        after = time.monotonic_ns()
        readings.append((after - before, real - (before + after) // 2))
    return min(readings)[1]
