"""The one object that says where an F rank stands. HTTP, signals, the loop and metrics read it or ask it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum


class Phase(str, Enum):
    STARTING = "starting"
    LOADING = "loading"
    PAIRING = "pairing"
    """Loaded; waits for the one Attention that it is to serve. Only where the backend pairs."""
    CAPTURING = "capturing"
    READY = "ready"
    DRAINING = "draining"
    STOPPED = "stopped"
    FAILED = "failed"


LEGAL = {
    Phase.STARTING: {Phase.LOADING, Phase.DRAINING, Phase.FAILED},
    Phase.LOADING: {Phase.PAIRING, Phase.CAPTURING, Phase.DRAINING, Phase.FAILED},
    Phase.PAIRING: {Phase.CAPTURING, Phase.DRAINING, Phase.FAILED},
    Phase.CAPTURING: {Phase.READY, Phase.DRAINING, Phase.FAILED},
    Phase.READY: {Phase.DRAINING, Phase.FAILED},
    Phase.DRAINING: {Phase.STOPPED, Phase.FAILED},
    Phase.STOPPED: set(),
    Phase.FAILED: set(),
}


@dataclass(frozen=True)
class Snapshot:
    """A consistent reading. ``seconds`` holds the time spent in every phase entered so far."""

    phase: Phase
    progress: float
    reason: str
    seconds: dict[str, float]
    time_to_ready_s: float | None


class Lifecycle:
    """Phases in legal order only, with the time spent in each. All methods may be called from any thread."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._phase = Phase.STARTING
        self._progress = 0.0
        self._reason = ""
        self._started = self._entered = clock()
        self._seconds: dict[str, float] = {}
        self._time_to_ready: float | None = None
        self._listeners: list[Callable[[], None]] = []

    @property
    def phase(self) -> Phase:
        return self._phase

    def on_change(self, listener: Callable[[], None]) -> Callable[[], None]:
        """Call ``listener`` (quick, from the changing thread) after every change; returns what stops that."""
        self._listeners.append(listener)
        return lambda: self._listeners.remove(listener)

    def advance(self, phase: Phase, reason: str = "") -> None:
        """Enter ``phase``; raises ValueError when that is not legal from here. The same FAILED twice is ignored."""
        with self._lock:
            if phase is self._phase is Phase.FAILED:
                return
            if phase not in LEGAL[self._phase]:
                raise ValueError(f"illegal transition {self._phase.value} -> {phase.value}")
            self._enter(phase, reason)
        self._notify()

    def fail(self, reason: str) -> None:
        """Enter FAILED from wherever this is, unless it has ended already."""
        if self._phase not in (Phase.STOPPED, Phase.FAILED):
            self.advance(Phase.FAILED, reason)

    def drain(self, reason: str) -> None:
        """Enter DRAINING from READY, at once when the stop is asked for; elsewhere the work under way ends first."""
        with self._lock:
            if self._phase is not Phase.READY:
                return
            self._enter(Phase.DRAINING, reason)
        self._notify()

    def report(self, done: int, total: int) -> None:
        """Progress within the phase; at most 100 times a phase it is passed on to listeners."""
        progress = done / total if total else 1.0
        with self._lock:
            moved = int(progress * 100) != int(self._progress * 100)
            self._progress = progress
        if moved:
            self._notify()

    def snapshot(self) -> Snapshot:
        with self._lock:
            seconds = {**self._seconds, self._phase.value: self._clock() - self._entered}
            return Snapshot(self._phase, self._progress, self._reason, seconds, self._time_to_ready)

    def _enter(self, phase: Phase, reason: str) -> None:
        """With the lock held."""
        now = self._clock()
        self._seconds[self._phase.value] = now - self._entered
        self._phase, self._entered = phase, now
        self._progress, self._reason = 0.0, reason
        if phase is Phase.READY:
            self._progress, self._time_to_ready = 1.0, now - self._started

    def _notify(self) -> None:
        for listener in list(self._listeners):
            listener()
