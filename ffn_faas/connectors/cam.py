"""Async CAM, F's side of the control plane: which A ranks are there to pair, and who has left. Rows go by operators."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from ffn_faas.connectors.base import FFNConnector, Item, WindowGeometry, WindowOffer
from ffn_faas.errors import SessionLost

if TYPE_CHECKING:
    from ffn_faas.ascend.receiver import Receiver
    from ffn_faas.ascend.step import PushStep
    from ffn_faas.ascend.times import StepTimes
    from ffn_faas.telemetry.spans import Recorder, StepSpan

POLL_S = 0.1
TIMES_ELSEWHERE = "use msprof or torch_npu.profiler, as docs/ascend.md says: this host only enqueues"
"""Where times of single steps on a device are to be had."""


class CamConnector(FFNConnector):
    """``loaded`` A ranks are ready to pair. Once ``paired`` none may leave but all of them, in order."""

    transport = "cam"
    times_elsewhere = TIMES_ELSEWHERE

    def __init__(
        self,
        attention_ranks: int,
        on_all_detached: Callable[[], None] = lambda: None,
        times: StepTimes | None = None,
    ) -> None:
        self.error: SessionLost | None = None
        self.paired = False
        self.all_detached = False
        self.can_record = times is not None
        self._times = times
        self._ranks = attention_ranks
        self._on_all_detached = on_all_detached
        self._lock = threading.Lock()
        self._loaded: set[int] = set()
        self._detached: set[int] = set()
        self._links = 0
        self._made = time.monotonic()
        self._receiver: Receiver | None = None
        self._step: PushStep | None = None

    def wait_loaded(self, interrupt: Callable[[], None]) -> None:
        """Block until every A rank has loaded its model; from then on the pair lives and dies together."""
        while True:
            with self._lock:
                if len(self._loaded) == self._ranks:
                    self.paired = True
                    return
            interrupt()
            time.sleep(POLL_S)

    def watch(self, receiver: Receiver, step: PushStep) -> None:
        """Whose counters ``statistics`` shows."""
        self._receiver, self._step = receiver, step

    def rank_loaded(self, attention_rank: int) -> None:
        with self._lock:
            self._loaded.add(attention_rank)

    def rank_detached(self, attention_rank: int) -> bool:
        """Whether this A rank stays attached until all have detached, since none can go alone."""
        with self._lock:
            self._detached.add(attention_rank)
            last = self.paired and len(self._detached) == self._ranks
            self.all_detached = self.all_detached or last
            kept = self.paired
        if last:
            self._on_all_detached()
        return kept

    def rank_left(self, attention_rank: int, reason: str, *, orderly: bool) -> None:  # noqa: ARG002
        with self._lock:
            self._loaded.discard(attention_rank)
            if self.paired and attention_rank not in self._detached and self.error is None:
                self.error = SessionLost(
                    f"A rank {attention_rank} is gone: {reason}; what it paired with cannot go on without it",
                    remedy="start A and F again",
                )

    def open_link(self, geometry: WindowGeometry, epoch: int, expert_counts: list[int]) -> tuple[int, WindowOffer]:  # noqa: ARG002
        with self._lock:
            self._links += 1
            return self._links, WindowOffer("", "", 0)

    def activate_link(self, link: int) -> None:
        """Nothing to do: the windows are there since the group was made."""

    def close_link(self, link: int) -> None:
        """Nothing to do: they stay as long as the group."""

    def receive(self, timeout_s: float) -> Item | None:  # noqa: ARG002
        return None

    def cancel_receive(self) -> None:
        """A pending receive cannot be cancelled."""

    def take_faults(self) -> list[tuple[int, str]]:
        return []

    def statistics(self) -> dict[str, float]:
        receiver, step, now = self._receiver, self._step, time.monotonic()
        steps = receiver.steps if receiver is not None else 0
        idle_s = now - (receiver.last_step_at if receiver is not None else self._made)
        # In a graph the host cannot tell waiting from computing: then nothing counts as being computed.
        busy = step is not None and step.computing_since > 0
        return {
            "steps": steps,
            "posts": steps,
            "splits": 0,
            "rows": step.rows if step is not None else 0,
            "idle_s": idle_s,
            "item_s": now - step.computing_since if step is not None and busy else 0.0,
        }

    def record(self, steps: int) -> None:
        self._kept().start(steps)

    def recorded(self) -> int:
        return self._kept().count()

    def take_spans(self) -> list[StepSpan]:
        return self._kept().take()

    def _kept(self) -> Recorder[StepSpan]:
        if self._times is None:
            raise NotImplementedError
        return self._times.recorder

    def close(self) -> None:
        """Nothing to free."""
