"""One way to stop, whoever asks: a signal, POST /stop, another F rank, or a failure."""

from __future__ import annotations

import threading
from collections.abc import Callable

from ffn_faas.errors import FfnError


class StopRequest:
    """Set once. ``error`` is None for a stop that was asked for, else what the process has to end with."""

    def __init__(self) -> None:
        self._event = threading.Event()
        self._lock = threading.Lock()
        self._wakers: list[Callable[[], None]] = []
        self.reason = ""
        self.error: FfnError | None = None

    def __bool__(self) -> bool:
        return self._event.is_set()

    def request(self, reason: str, error: FfnError | None = None) -> bool:
        """First call wins and wakes whoever waits; returns whether this was the first. Never blocks; any thread."""
        with self._lock:
            if self._event.is_set():
                return False
            self.reason, self.error = reason, error
            self._event.set()
        for wake in self._wakers:
            wake()
        return True

    def on_request(self, wake: Callable[[], None]) -> None:
        """Call ``wake`` (quick, any thread) when a stop is requested; at once if it already was."""
        self._wakers.append(wake)
        if self:
            wake()

    def wait(self, timeout_s: float) -> bool:
        return self._event.wait(timeout_s)

    def raise_if_requested(self) -> None:
        """Leave long work (agreeing, loading): raises the error, or Stopped."""
        if self:
            raise self.error or Stopped(self.reason)


class Stopped(FfnError):
    """A stop was asked for before READY: not a failure."""

    exit_code = 0
