"""SIGTERM and SIGINT ask for a stop; a second one forces it."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from ffn_faas.errors import Stuck
from ffn_faas.service.stop import StopRequest


@contextmanager
def stop_on_signals(stop: StopRequest) -> Iterator[None]:
    """Within the block, signals become stop requests; earlier handlers come back afterwards. Main thread only."""
    seen = 0

    def handler(number: int, _frame: FrameType | None) -> None:
        nonlocal seen
        seen += 1
        name = signal.Signals(number).name
        if seen > 1:
            print(f"ffn_faas: second signal ({name}) while stopping: forced", file=sys.stderr, flush=True)
            os._exit(Stuck.exit_code)
        stop.request(name)

    previous = {number: signal.signal(number, handler) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, earlier in previous.items():
            signal.signal(number, earlier)
