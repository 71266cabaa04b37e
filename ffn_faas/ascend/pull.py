"""Pull (ffn_mega_moe): an adapter for fused transactions. Its window's life is tested; its operators are not public.

Nothing in this package can drive it: a deployment that has the operators hands them over as ``PullOperators``.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from ffn_faas.errors import SessionLost

UNAVAILABLE = (
    "ffn_mega_moe: the schemas of its operators are not public, so this version has Pull's session but nothing to drive"
)
QUIET, STOPPED = "pull_quiet", "pull_stopped"


class PullOperators(Protocol):
    """What a session needs of the native side; names and arguments are ours."""

    def dispatch(self, layer: int, x: Any, expert_ids: Any, weights: Any) -> None:
        """Publish a batch in the window."""

    def combine(self) -> Any:
        """The weighted sums of the batch in the window. Blocks."""

    def transaction(self) -> None:
        """F: pull a batch, compute it, write it back, as one operator. Blocks."""


@dataclass(frozen=True)
class Ownership:
    """Who holds the window. Stays after a failure: what the device may still write is never given to another."""

    stage: int
    layer: int
    routing: tuple[Any, Any, Any]


class PullAttention:
    """One A rank: one window in flight over all stages; whoever owns it is recorded before the device hears of it."""

    def __init__(self, operators: PullOperators, publish: Callable[[str], None]) -> None:
        """``publish(key)``: tell F through the store of the start."""
        self._operators = operators
        self._publish = publish
        self.owner: Ownership | None = None
        self.failed = False
        self._quiet = False

    def dispatch(self, stage: int, layer: int, x: Any, expert_ids: Any, weights: Any) -> None:
        """Raises SessionLost while the window is owned, after a failure, and once the session is quiet."""
        if self._quiet:
            raise SessionLost("this Pull session has ended")
        if self.owner is not None:
            why = "failed with" if self.failed else "has"
            raise SessionLost(f"stage {stage} cannot dispatch: stage {self.owner.stage} {why} the only window")
        self.owner = Ownership(stage, layer, (x, expert_ids, weights))
        with _failure_kept(self):
            self._operators.dispatch(layer, x, expert_ids, weights)

    def combine(self, stage: int) -> Any:
        """Free the window by its owner's result."""
        if self.failed or self.owner is None or self.owner.stage != stage:
            raise SessionLost(f"stage {stage} does not have the window to combine from")
        with _failure_kept(self):
            combined = self._operators.combine()
        self.owner = None
        return combined

    def quiesce(self) -> None:
        """No further dispatch; F may drain. Refused while a window is in flight or kept. Idempotent."""
        if self._quiet:
            return
        if self.owner is not None:
            raise SessionLost(f"the window of stage {self.owner.stage} is not free: this session cannot become quiet")
        self._quiet = True
        self._publish(QUIET)


class PullFfn:
    """One F rank: whole transactions only."""

    def __init__(self, operators: PullOperators, is_quiet: Callable[[], bool], publish: Callable[[str], None]) -> None:
        """``is_quiet()``: whether every A rank has published that it is."""
        self._operators = operators
        self._is_quiet = is_quiet
        self._publish = publish
        self._lock = threading.Lock()
        self.failed = False
        self.stopped = False

    def receive(self) -> Any:
        raise SessionLost("Pull has no receive of its own: transaction() is one operator")

    def send(self, y: Any) -> Any:  # noqa: ARG002
        raise SessionLost("Pull has no send of its own: transaction() is one operator")

    def transaction(self) -> None:
        """One batch, from window to window."""
        with self._lock:
            if self.failed or self.stopped:
                raise SessionLost("this Pull session has failed" if self.failed else "this Pull session has stopped")
            with _failure_kept(self):
                self._operators.transaction()

    def drain(self, synchronize: Callable[[], None]) -> None:
        """Once Attention is quiet: wait for the device, say that resources may go. Refused before, and when failed."""
        with self._lock:
            if self.failed or not self._is_quiet():
                why = "has failed" if self.failed else "is still used by Attention"
                raise SessionLost(f"this Pull session {why}: its windows stay")
            synchronize()
            self.stopped = True
            self._publish(STOPPED)


class _failure_kept:  # noqa: N801 - reads as a statement
    """Marks a session as failed by what leaves the block; nothing of it is forgotten."""

    def __init__(self, session: PullAttention | PullFfn) -> None:
        self._session = session

    def __enter__(self) -> None:
        return

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is not None:
            self._session.failed = True
