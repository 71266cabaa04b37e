"""Windows in memory of this host, F's side: shared with A ranks of the host, mirrored over TCP for the others."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, cast

from ffn_faas import native
from ffn_faas.connectors.base import Distribution, FFNConnector, Item, WindowGeometry, WindowOffer
from ffn_faas.connectors.broker import Broker
from ffn_faas.connectors.tcp import RemoteLinks
from ffn_faas.errors import ResourceError
from ffn_faas.memory import require_memory
from ffn_faas.protocol.window import merge_bytes
from ffn_faas.telemetry.spans import StepSpan

if TYPE_CHECKING:
    from ffn_faas import _native

SPIN_US = 50
"""How long a wait spins before it sleeps: longer than a round trip, far shorter than a layer of attention."""
ITEM_LIMIT = 4096
"""Rows: above it a post is computed in parts, so that a long prefill does not keep others waiting."""
MERGE_WAIT_US = 5
"""How long an item waits at least for sessions in step with its first one; see ``_native.ItemReceiver``."""


class Kernel(Protocol):
    """What ``step`` needs of an ``experts.kernels.base.ExpertKernel``.

    A kernel with an attribute ``native_address`` (an ``ffn_expert_kernel``, see native/include/ffn_faas) runs in C++
    without the GIL, from the wait to the flag.
    """

    @property
    def spec(self) -> Any: ...

    def compute(self, layer: int, hidden: Any, expert_ids: Any, weights: Any, out: Any) -> None: ...


@dataclass
class _Link:
    arena: _native.Arena
    ticket: str
    expert_counts: list[int]
    is_remote: bool


class ShmConnector(FFNConnector):
    """Items are ``_native.Item``; see FFNConnector for threads. Raises NativeMissing without the compiled module."""

    transport = "shm"
    can_record = True

    def __init__(
        self,
        *,
        spin_us: int = SPIN_US,
        item_limit: int = ITEM_LIMIT,
        merge_wait_us: int = MERGE_WAIT_US,
        data_host: str = "127.0.0.1",
        data_port: int = 0,
    ) -> None:
        """``data_host`` and ``data_port`` (0: any) are where peers on other hosts connect."""
        self._native = native.load()
        Item.register(self._native.Item)
        self._receiver: _native.ItemReceiver = self._native.ItemReceiver(
            spin_us=spin_us, item_limit=item_limit, merge_wait_us=merge_wait_us
        )
        self._broker = Broker(self._receiver.doorbell)
        self._data_address = (data_host, data_port)
        self._remote: RemoteLinks | None = None
        self._links: dict[int, _Link] = {}
        self._next_link = 0
        self._item_limit = item_limit
        self._merging = False
        self._lock = threading.Lock()
        self._made_ns = time.monotonic_ns()

    def open_link(self, geometry: WindowGeometry, epoch: int, expert_counts: list[int]) -> tuple[int, WindowOffer]:
        arena = self._create_arena(geometry, epoch)
        ticket = self._broker.offer(arena)
        link = self._keep(_Link(arena, ticket, list(expert_counts), is_remote=False))
        return link, WindowOffer(self._broker.name, ticket, arena.nbytes)

    def open_remote_link(
        self, geometry: WindowGeometry, epoch: int, expert_counts: list[int]
    ) -> tuple[int, WindowOffer]:
        arena = self._create_arena(geometry, epoch)
        remote = self.listen()
        ticket = remote.offer()
        link = self._keep(_Link(arena, ticket, list(expert_counts), is_remote=True))
        return link, WindowOffer(remote.broker, ticket, arena.nbytes)

    def listen(self) -> RemoteLinks:
        """Open the data port, if that has not happened yet. Raises ResourceError when it is taken."""
        with self._lock:
            if self._remote is None:
                self._remote = RemoteLinks(self._receiver, *self._data_address)
            return self._remote

    def _keep(self, opened: _Link) -> int:
        with self._lock:
            link = self._next_link
            self._next_link += 1
            self._links[link] = opened
        return link

    def activate_link(self, link: int) -> None:
        with self._lock:
            opened = self._links[link]
        self._broker.withdraw(opened.ticket)
        opened.arena.close_fd()
        self._receiver.add_link(link, opened.arena, opened.expert_counts)
        with self._lock:
            self._merging = self._merging or len(self._links) > 1
        if opened.is_remote:
            self.listen().start(link, opened.ticket, opened.arena)

    def close_link(self, link: int) -> None:
        with self._lock:
            opened = self._links.pop(link, None)
        if opened is not None:
            self._broker.withdraw(opened.ticket)
            if opened.is_remote and self._remote is not None:
                self._remote.withdraw(opened.ticket)
                self._remote.stop(link)
            self._receiver.remove_link(link)

    def receive(self, timeout_s: float) -> Item | None:
        return cast("Item | None", self._receiver.receive(_microseconds(timeout_s)))

    def step(self, kernel: Kernel, timeout_s: float) -> bool:
        """Wait for an item, compute it with ``kernel`` and complete it. False = there was none; see ``receive``.

        Raises what the kernel raises, RuntimeError when a native kernel fails.
        """
        address = getattr(kernel, "native_address", None)
        if address is not None:
            return self._receiver.step(address, _microseconds(timeout_s))
        item = self._receiver.receive(_microseconds(timeout_s))
        if item is None:
            return False
        if item.rows:
            _compute(kernel, item)
        item.complete()
        return True

    def cancel_receive(self) -> None:
        self._receiver.cancel()

    def take_faults(self) -> list[tuple[int, str]]:
        return self._receiver.take_faults()

    def statistics(self) -> dict[str, float]:
        counters, times = self._receiver.counters(), self._receiver.step_times()
        now = time.monotonic_ns()
        taken_at = counters["taken_at_ns"]
        return {
            "steps": counters["steps"],
            "posts": counters["posts"],
            "splits": counters["splits"],
            "rows": counters["rows"],
            "wait_s": times["wait"][1] / 1e9,
            "compute_s": times["compute"][1] / 1e9,
            "post_s": times["send"][1] / 1e9,
            "idle_s": max(0, now - (counters["last_step_monotonic_ns"] or self._made_ns)) / 1e9,
            "item_s": max(0, now - taken_at) / 1e9 if taken_at else 0.0,
        }

    def step_seconds(self) -> dict[str, Distribution]:
        return {part: _distribution(*buckets, scale=1e9) for part, buckets in self._receiver.step_times().items()}

    def posts_per_item(self) -> Distribution:
        return _distribution(*self._receiver.posts_per_item())

    def expert_rows(self) -> list[list[int]]:
        return self._receiver.expert_rows()

    def record(self, steps: int) -> None:
        self._receiver.record(steps)

    def recorded(self) -> int:
        return self._receiver.recorded()

    def take_spans(self) -> list[StepSpan]:
        return [StepSpan(*times) for times in self._receiver.take_spans()]

    def close(self) -> None:
        self._broker.close()
        with self._lock:
            links = list(self._links)
        for link in links:
            self.close_link(link)
        if self._remote is not None:
            self._remote.close()
        self._receiver.cancel()

    def _create_arena(self, geometry: WindowGeometry, epoch: int) -> _native.Arena:
        shape = native_geometry(geometry)
        with self._lock:
            merges = not self._merging and (bool(self._links) or geometry.stages > 1)
        needed = shape.offsets()["nbytes"] + (merge_bytes(geometry, self._item_limit) if merges else 0)
        require_memory(needed, f"windows of {geometry.capacity} rows")
        try:
            arena: _native.Arena = self._native.Arena.create(shape, epoch)
        except OSError as error:
            raise ResourceError(f"windows cannot be made: {error.strerror or error}") from error
        return arena


def native_geometry(geometry: WindowGeometry) -> _native.Geometry:
    """The C++ form; raises ValueError for a size out of range."""
    shape: _native.Geometry = native.load().Geometry(
        stages=geometry.stages,
        capacity=geometry.capacity,
        hidden_size=geometry.hidden_size,
        top_k=geometry.top_k,
        element_size=geometry.element_size,
    )
    return shape


def _compute(kernel: Kernel, item: _native.Item) -> None:
    import torch

    rows = item.rows
    kernel.compute(
        item.layer,
        torch.frombuffer(item.hidden, dtype=getattr(torch, kernel.spec.dtype)).view(rows, -1),
        torch.frombuffer(item.expert_ids, dtype=torch.int32).view(rows, -1),
        torch.frombuffer(item.weights, dtype=torch.float32).view(rows, -1),
        torch.frombuffer(item.partial, dtype=torch.float32).view(rows, -1),
    )


def _distribution(buckets: list[tuple[int, int]], total: int, scale: float = 1.0) -> Distribution:
    bounds, counts = zip(*buckets, strict=True)
    return Distribution([bound / scale for bound in bounds[:-1]], list(counts), total / scale)


def _microseconds(seconds: float) -> int:
    return max(0, round(seconds * 1e6))
