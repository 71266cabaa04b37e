"""How tests wait for what other threads and processes do."""

from __future__ import annotations

import time
from collections.abc import Callable

PATIENCE_S = 60.0
"""Far beyond what anything takes on a machine that does other things beside the tests."""


def wait_until(
    condition: Callable[[], object], timeout_s: float = PATIENCE_S, what: str = "it", every_s: float = 0.002
) -> float:
    """Ask ``every_s`` until ``condition`` holds; returns the seconds that it took. Fails after ``timeout_s``."""
    start = time.monotonic()
    while not condition():
        assert time.monotonic() - start < timeout_s, f"{what} took longer than {timeout_s} s"
        time.sleep(every_s)
    return time.monotonic() - start
