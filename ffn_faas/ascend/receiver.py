"""The thread that receives: one step after the other until Attention has said farewell; it cannot be cut short.

A pending receive has no cancel on a device. So a stop is a wish: the loop looks at it after each step, and what the
thread may still use is freed only when the thread has left by itself.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ffn_faas.ascend.device import Device
    from ffn_faas.ascend.push import Received
    from ffn_faas.ascend.shape import CamShape
    from ffn_faas.ascend.times import StepTimes

STEPS_AHEAD = 2
"""How many steps the host may be ahead of the device, whose inputs are kept alive that long."""


class Farewells:
    """Which groups of A ranks have sent their last exchange, on the layer number that no layer has."""

    def __init__(self, shape: CamShape, layer: int) -> None:
        self._shape = shape
        self._layer = layer
        self._seen: set[int] = set()

    def note(self, received: Received) -> None:
        """Look at a chunk that was answered. Reads on the host."""
        _, base_rank, layer, _, last_expert = received.batch_info[:5].tolist()
        if layer == self._layer and last_expert == self._shape.experts_per_rank - 1:
            self._seen.add(base_rank // self._shape.tensor_parallel)

    @property
    def complete(self) -> bool:
        return len(self._seen) == self._shape.groups


class Receiver:
    """``step`` returns what has to stay alive until the device is past it, among it the chunk; ``chunk`` finds that.

    ``device`` is bound in the thread. ``on_failure`` hears of what the thread ended with, in the thread.
    ``times``, where they are kept, hears of the chunk of each step.
    """

    def __init__(
        self,
        step: Callable[[], Any],
        chunk: Callable[[Any], Received],
        farewells: Farewells,
        device: Device,
        on_failure: Callable[[BaseException], None],
        times: StepTimes | None = None,
    ) -> None:
        self.error: BaseException | None = None
        self.drained = False
        """The loop has left normally and the device is past everything."""
        self.steps = 0
        self.last_step_at = time.monotonic()
        self._step, self._chunk, self._farewells = step, chunk, farewells
        self._device, self._on_failure, self._times = device, on_failure, times
        self._alive: deque[tuple[Any, Any]] = deque()
        self._stop = threading.Event()
        self._confirmed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="ffn-receive", daemon=True)

    @property
    def started(self) -> bool:
        return self._thread.ident is not None

    @property
    def exited(self) -> bool:
        return self.started and not self._thread.is_alive()

    def start(self, timeout_s: float) -> bool:
        """Whether the thread said within ``timeout_s`` that it runs."""
        self._thread.start()
        return self._confirmed.wait(timeout_s)

    def request_stop(self) -> None:
        """Leave after the last farewell. Any thread; never blocks."""
        self._stop.set()

    def join(self, timeout_s: float) -> bool:
        """Whether the thread has left within ``timeout_s``."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        self._confirmed.set()
        try:
            self._device.bind()
            while not (self._stop.is_set() and self._farewells.complete):
                kept = self._step()
                self.steps += 1
                self.last_step_at = time.monotonic()
                if self._times is not None:
                    self._times.keep(self._chunk(kept))
                self._keep(kept)
                if self._stop.is_set():
                    self._farewells.note(self._chunk(kept))
            self._device.synchronize()
            self.drained = True
        except BaseException as error:  # noqa: BLE001 - whatever it is, the main thread raises it again
            self.error = error
            self._on_failure(error)

    def _keep(self, kept: Any) -> None:
        self._alive.append((kept, self._device.mark()))
        if len(self._alive) > STEPS_AHEAD:
            _, mark = self._alive.popleft()
            if mark is not None:
                mark.synchronize()
