"""One way to stop, whoever asks: a signal, POST /stop, another F rank, or a failure."""

from __future__ import annotations

import threading
from collections.abc import Callable

from ffn_faas.errors import FfnError


class StopRequest:
    """Set once. ``error`` is None for a stop that was asked for, else what the process has to end with.

    A stop that was asked for may still turn into a failure, when a rank is lost while it drains, or have to hurry,
    when the launcher dies; never back.
    """

    def __init__(self) -> None:
        self._event = threading.Event()
        self._lock = threading.Lock()
        self._wakers: list[Callable[[], None]] = []
        self.reason = ""
        self.error: FfnError | None = None
        self.limit_s: float | None = None
        """Most seconds the end may take, below what the settings allow; None: no further limit."""
        self.retained = False
        """The backend had to keep what no teardown may touch: the process ends without one, and not with 0."""

    def __bool__(self) -> bool:
        return self._event.is_set()

    def request(self, reason: str, error: FfnError | None = None, *, limit_s: float | None = None) -> bool:
        """First call wins and wakes whoever waits; so do the first with an error and the first with a limit after it.

        Returns whether this was the first. Never blocks; any thread.
        """
        with self._lock:
            first = not self._event.is_set()
            fails = error is not None and self.error is None
            hurries = limit_s is not None and self.limit_s is None
            if not (first or fails or hurries):
                return False
            self.reason = reason if first else f"{self.reason}; then {reason}"
            self.error = self.error or error
            self.limit_s = self.limit_s or limit_s
            self._event.set()
        for wake in self._wakers:
            wake()
        return first

    def on_request(self, wake: Callable[[], None]) -> None:
        """Call ``wake`` (quick, any thread) when a stop is requested, again when that changes; at once if it was."""
        self._wakers.append(wake)
        if self:
            wake()

    def wait(self, timeout_s: float) -> bool:
        return self._event.wait(timeout_s)

    def raise_if_requested(self) -> None:
        """Leave long work (agreeing, loading): raises the error, or Stopped."""
        if self:
            raise self.error or Stopped(self.reason)

    def raise_unless_asked_for(self) -> None:
        """Raises the error that made this a failure, if there is one."""
        if self.error is not None:
            raise self.error


class Stopped(FfnError):
    """A stop was asked for before READY: not a failure."""

    exit_code = 0
