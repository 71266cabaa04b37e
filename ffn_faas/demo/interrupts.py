"""Ctrl-C and SIGTERM of a long command: KeyboardInterrupt, again and again until the command is ending."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from types import FrameType

AGAIN_S = 1.0
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGALRM)


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """SIGINT and SIGTERM raise KeyboardInterrupt in the main thread, each second anew.

    One that is raised while Python runs a destructor or a callback of the collector is printed and lost.
    """
    with _handling(_interrupt):
        yield


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """Neither ends what is in here, which is bounded: a second Ctrl-C must not leave a stop half done."""
    signal.setitimer(signal.ITIMER_REAL, 0)
    with _handling(signal.SIG_IGN):
        yield


def _interrupt(_number: int, _frame: FrameType | None) -> None:
    signal.setitimer(signal.ITIMER_REAL, AGAIN_S)
    raise KeyboardInterrupt


@contextlib.contextmanager
def _handling(handler: object) -> Iterator[None]:
    previous = {number: signal.signal(number, handler) for number in _SIGNALS}  # type: ignore[arg-type]
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        for number, before in previous.items():
            signal.signal(number, before)
