"""F of a CPU bench: the real connector, stepping in a thread as the daemon does, with the cost of every step kept."""

from __future__ import annotations

import threading
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

from ffn_faas.bench.cpu_layer import LayerShape
from ffn_faas.bench.fake_attention import EPOCH, FakeAttention, Round, Samples, Setup
from ffn_faas.connectors.base import WindowGeometry
from ffn_faas.connectors.shm import ITEM_LIMIT, SPIN_US, ShmConnector
from ffn_faas.errors import ResourceError
from ffn_faas.experts.kernels.base import ExpertKernel

if TYPE_CHECKING:
    from typing_extensions import Self

_WAIT_S = 0.05


class Service(AbstractContextManager["Service"]):
    """Serves ``sessions`` links of a fake Attention, each with ``stages`` windows of ``capacity`` rows."""

    def __init__(
        self,
        kernel: ExpertKernel,
        shape: LayerShape,
        *,
        sessions: int = 1,
        stages: int = 1,
        capacity: int = ITEM_LIMIT,
        spin_us: int = SPIN_US,
        routing: str = "uniform",
    ) -> None:
        element_size = 4 if shape.dtype == "float32" else 2
        self._kernel = kernel
        self._connector = ShmConnector(spin_us=spin_us, item_limit=ITEM_LIMIT)
        self._stop = threading.Event()
        self._steps: list[tuple[float, float]] = []
        self._failure: Exception | None = None
        geometry = WindowGeometry(stages, capacity, shape.hidden, shape.top_k, element_size)
        counts = [shape.experts] * shape.layers
        opened = [self._connector.open_link(geometry, EPOCH, counts) for _ in range(sessions)]
        offers = [offer for _, offer in opened]
        try:
            self.attention = FakeAttention(Setup(offers, geometry, shape, routing, spin_us))
            for link, _ in opened:
                self._connector.activate_link(link)
        except BaseException:
            self._connector.close()
            raise
        self._thread = threading.Thread(target=self._serve, name="F")
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._stop.set()
        self._connector.cancel_receive()
        self._thread.join()
        self.attention.__exit__(*exc_info)
        self._connector.close()

    def run(self, rounds: Round) -> Samples:
        """``FakeAttention.run``; raises what made F's thread end, if it did."""
        try:
            return self.attention.run(rounds)
        except ResourceError:
            if self._failure is not None:
                raise self._failure from None
            raise

    def take_steps(self) -> list[tuple[float, float]]:
        """Microseconds of each step since the last call: computing, handing back."""
        if self._failure is not None:
            raise self._failure
        steps, self._steps = self._steps, []
        return steps

    def _serve(self) -> None:
        try:
            before = self._connector.statistics()
            while not self._stop.is_set():
                if not self._connector.step(self._kernel, _WAIT_S):
                    continue
                now = self._connector.statistics()
                self._steps.append(
                    (1e6 * (now["compute_s"] - before["compute_s"]), 1e6 * (now["post_s"] - before["post_s"]))
                )
                before = now
        except Exception as error:  # noqa: BLE001 - handed to the thread that waits
            self._failure = error
            self.attention.kill()
