"""GPU memory shared by CUDA IPC: windows of every attached A rank, F's side.

Everything that changes the device runs in the thread that steps, between two steps and with nothing in flight: other
threads leave a request and wait. So no CUDA call ever comes from the HTTP thread, and the one graph never changes. A
profile only looks at the device, beside the step, from a thread of its own (m2n_recorder).
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ffn_faas.connectors.base import FFNConnector, Item, WindowGeometry, WindowOffer
from ffn_faas.connectors.m2n_service import MAX_LANES, M2nService
from ffn_faas.connectors.m2n_window import addresses, dispatch_layout
from ffn_faas.errors import HandshakeRefused, ResourceError
from ffn_faas.protocol.messages import DeviceMemory
from ffn_faas.protocol.window import flag

if TYPE_CHECKING:
    from ffn_faas.connectors.m2n_library import Device, Library
    from ffn_faas.telemetry.spans import StepSpan

REQUEST_TIMEOUT_S = 30.0
NAMESPACES = (
    "A and F must run on one host and share the PID and IPC namespaces (containers: hostPID and hostIPC, or one "
    "container), and both GPUs must be visible to both processes"
)


@dataclass
class _Link:
    geometry: WindowGeometry
    epoch: int
    arena: int
    peer: int = 0
    lanes: list[int] = field(default_factory=list)


class M2nConnector(FFNConnector):
    """``step`` is called by one thread; the rest by any. Items stay on the device, so ``receive`` gives none."""

    transport = "m2n"
    can_record = True

    def __init__(self, library: Library, device: Device, service: M2nService, *, share_device: bool = False) -> None:
        self._library = library
        self._device = device
        self._service = service
        self._share_device = share_device
        self._links: dict[int, _Link] = {}
        self._next_link = 0
        self._requests: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]]] = queue.SimpleQueue()
        self._faults: list[tuple[int, str]] = []
        self._lock = threading.Lock()
        self._faults_seen = 0
        self._made = time.monotonic()
        self._busy = (0, 0.0)
        self._last_completed = (0, self._made)
        self._cancelled = self._closed = False

    def step(self, *, captured: bool) -> None:
        """Do what was asked for, then enqueue one step; blocks while four are in flight, about 20 ms each at most."""
        if not self._requests.empty() or self._service.counters.faults != self._faults_seen:
            self._service.stop()  # nobody waits for posts that may not come
            self._service.idle()
            self._run_requests()
            self._collect_faults()
            self._service.stop(stopped=False)
            if self._cancelled:
                self._service.stop()
        self._service.step(captured=captured)

    def open_link(self, geometry: WindowGeometry, epoch: int, expert_counts: list[int]) -> tuple[int, WindowOffer]:  # noqa: ARG002
        nbytes = dispatch_layout(geometry).nbytes

        def make() -> tuple[int, str]:
            arena = self._library.allocate(nbytes)
            self._next_link += 1
            self._links[self._next_link] = _Link(geometry, epoch, arena)
            return self._next_link, self._library.export(arena).hex()

        link, handle = self._ask(make)
        memory = DeviceMemory(handle=handle, offset=0, nbytes=nbytes, device=self._device.uuid)
        return link, WindowOffer("", "", nbytes, memory)

    def accept_reply(self, link: int, combine: DeviceMemory) -> None:
        if combine.device == self._device.uuid and not self._share_device:
            raise HandshakeRefused(
                f"Attention and F are on one GPU ({combine.device}), which costs milliseconds a round trip",
                remedy="give them two GPUs, or start F with --share-device for functional tests",
            )

        def map_reply() -> None:
            self._links[link].peer = open_memory(self._library, combine)

        self._ask(map_reply)

    def activate_link(self, link: int) -> None:
        def add_lanes() -> None:
            opened = self._links[link]
            if not opened.peer:
                raise HandshakeRefused("Attention mapped the windows but offered none of its own")
            taken = {lane for other in self._links.values() for lane in other.lanes}
            free = [lane for lane in range(MAX_LANES) if lane not in taken]
            if len(free) < opened.geometry.stages:
                raise ResourceError(f"all {MAX_LANES} lanes are taken", remedy="attach fewer Attention ranks")
            opened.lanes = free[: opened.geometry.stages]
            for stage, lane in enumerate(opened.lanes):
                where = addresses(opened.geometry, opened.arena, opened.peer, stage)
                self._service.set_lane(lane, where, opened.geometry.capacity, flag(opened.epoch, 1))

        self._ask(add_lanes)

    def close_link(self, link: int) -> None:
        self._requests.put((lambda: self._forget(link), Future()))

    def receive(self, timeout_s: float) -> Item | None:  # noqa: ARG002
        return None

    def cancel_receive(self) -> None:
        self._cancelled = True
        self._service.stop()

    def take_faults(self) -> list[tuple[int, str]]:
        with self._lock:
            faults, self._faults = self._faults, []
        return faults

    def statistics(self) -> dict[str, float]:
        counters, now = self._service.counters, time.monotonic()
        taken, completed = int(counters.taken), int(counters.completed)
        with self._lock:
            if taken == completed:
                self._busy = (0, now)
            elif self._busy[0] != taken:
                self._busy = (taken, now)
            if completed != self._last_completed[0]:
                self._last_completed = (completed, now)
            item_s = now - self._busy[1] if taken != completed else 0.0
            idle_s = now - self._last_completed[1]
        return {
            "steps": int(counters.items),
            "posts": completed,
            "splits": 0,
            "rows": int(counters.rows),
            "pairs": int(counters.pairs),
            "experts_hit": int(counters.experts_hit),
            "wait_s": counters.wait_ns / 1e9,
            "compute_s": counters.compute_ns / 1e9,
            "post_s": counters.send_ns / 1e9,
            "idle_s": idle_s,
            "item_s": item_s,
            "captures": self._service.captures,
            "replays": self._service.replays,
        }

    def record(self, steps: int) -> None:
        self._library.call("use_device", self._device.index)
        self._service.times.record(steps)

    def recorded(self) -> int:
        counters = self._service.counters
        completed, items = int(counters.completed), int(counters.items)
        in_flight = completed != int(counters.taken)
        return max(0, items - in_flight - self._service.times.first + 1)

    def take_spans(self) -> list[StepSpan]:
        self._library.call("use_device", self._device.index)
        return self._service.times.take()

    @property
    def clock_error_ns(self) -> int:
        return self._service.times.error_ns

    def drain(self, deadline_s: float) -> None:
        """Wait for what is in flight; a post whose flag already stands is still taken."""
        deadline = time.monotonic() + deadline_s
        self._service.stop()
        while time.monotonic() < deadline:
            before = int(self._service.counters.taken)
            self._service.step(captured=False)
            self._service.idle()
            if int(self._service.counters.taken) == before:
                return

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._service.stop()
        self._service.idle()
        self._run_requests()
        for link in list(self._links):
            self._forget(link)

    def _ask(self, what: Callable[[], Any]) -> Any:
        """Run ``what`` in the stepping thread; raises what it raises."""
        answer: Future[Any] = Future()
        self._requests.put((what, answer))
        try:
            return answer.result(timeout=REQUEST_TIMEOUT_S)
        except FutureTimeout:
            raise ResourceError(f"the step did not come round within {REQUEST_TIMEOUT_S:g} s") from None

    def _run_requests(self) -> None:
        while not self._requests.empty():
            what, answer = self._requests.get()
            try:
                answer.set_result(what())
            except (ResourceError, HandshakeRefused, KeyError) as error:
                answer.set_exception(error)

    def _forget(self, link: int) -> None:
        gone = self._links.pop(link, None)
        if gone is None:
            return
        for lane in gone.lanes:
            self._service.set_lane(lane, None)
        if gone.peer:
            self._library.call("close", gone.peer)
        self._library.call("free", gone.arena)

    def _collect_faults(self) -> None:
        self._faults_seen = int(self._service.counters.faults)
        for link, opened in self._links.items():
            if any(self._service.lane_fault(lane) for lane in opened.lanes):
                with self._lock:
                    self._faults.append((link, "a post with a layer or a number of rows out of bounds"))


def open_memory(library: Library, memory: DeviceMemory) -> int:
    """Address of a peer's windows here. Raises ResourceError naming what isolated containers break."""
    try:
        return library.open(bytes.fromhex(memory.handle)) + memory.offset
    except ResourceError as error:
        raise ResourceError(f"GPU memory of the peer cannot be opened: {error.message}", remedy=NAMESPACES) from error
