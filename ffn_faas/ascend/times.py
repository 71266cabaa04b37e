"""When the parts of each F step ended, by the host that runs them: over the twin, whose operators have ended by then.

On a device the host only enqueues, and its times say nothing of the step; nobody keeps them there.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ffn_faas.telemetry.spans import Recorder, StepSpan

if TYPE_CHECKING:
    from ffn_faas.ascend.push import Received


class StepTimes:
    """The thread that steps calls all of this; ``recorder`` is anybody's."""

    def __init__(self, numbers: Sequence[int]) -> None:
        """``numbers``: the model's number of each of F's layers, in F's order."""
        self.recorder: Recorder[StepSpan] = Recorder()
        self._places = {number: place for place, number in enumerate(numbers)}
        self._before = self._taken = self._computed = self._sent = 0

    def taken(self) -> None:
        """A chunk is there."""
        self._before = self._sent
        self._taken = time.monotonic_ns()

    def computed(self) -> None:
        self._computed = time.monotonic_ns()

    def sent(self) -> None:
        self._sent = time.monotonic_ns()

    def keep(self, chunk: Received) -> None:
        """The step of ``chunk`` has ended; a farewell is none. Reads on the host where somebody asked for times."""
        recorder = self.recorder
        if not recorder.active:
            return
        place = self._places.get(int(chunk.batch_info[2]))
        if place is None:
            return
        recorder.add(
            StepSpan(
                began=min(max(self._before, recorder.since), self._taken),
                taken=self._taken,
                gathered=self._taken,
                sorted=0,
                computed=self._computed,
                sent=self._sent,
                layer=place,
                rows=int(chunk.counts.sum()),
                parts=1,
            )
        )
