"""Times of single steps on F and of single posts on A. CLOCK_MONOTONIC, in ns."""

from __future__ import annotations

import threading
import time
from typing import Generic, NamedTuple, TypeVar

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


Span = TypeVar("Span", StepSpan, PostSpan)


class Recorder(Generic[Span]):
    """Keeps spans only while somebody asked for them, as native/shm/spans.hpp does for compiled parts. Any thread."""

    def __init__(self) -> None:
        self.active = False
        self.since = 0
        """When recording began."""
        self._lock = threading.Lock()
        self._spans: list[Span] = []
        self._limit = 0

    def start(self, limit: int) -> None:
        """Keep the next ``limit`` spans, forget those before. Raises ValueError."""
        if not 1 <= limit <= MOST:
            raise ValueError(f"1 to {MOST} spans can be kept, not {limit}")
        with self._lock:
            self._spans, self._limit = [], limit
            self.since, self.active = time.monotonic_ns(), True

    def add(self, span: Span) -> None:
        with self._lock:
            if self.active:
                self._spans.append(span)
                self.active = len(self._spans) < self._limit

    def count(self) -> int:
        with self._lock:
            return len(self._spans)

    def take(self) -> list[Span]:
        """Stop, and hand out what was kept."""
        with self._lock:
            self.active = False
            spans, self._spans = self._spans, []
            return spans


def clock_offset_ns() -> int:
    """CLOCK_REALTIME minus CLOCK_MONOTONIC of this host: the closest of several readings."""
    readings = []
    for _ in range(9):
        before = time.monotonic_ns()
        real = time.time_ns()
        after = time.monotonic_ns()
        readings.append((after - before, real - (before + after) // 2))
    return min(readings)[1]
