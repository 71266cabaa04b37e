"""F's half of the GPU data plane: the device state behind the one graph, as a Python object."""

from __future__ import annotations

import ctypes
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ffn_faas.connectors.m2n_library import STEP, Counters, Library, ServiceConfig, window
from ffn_faas.connectors.m2n_recorder import ItemRecorder

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ffn_faas.connectors.m2n_window import WindowAddresses

MAX_LANES = 128
WAIT_US = 20_000


@dataclass(frozen=True)
class ServiceShape:
    """What one F rank computes. ``layer_base[l]`` is the weight row of layer l's first expert."""

    hidden_size: int
    intermediate_size: int
    top_k: int
    num_experts: int
    """Local ones, of a layer."""
    layer_base: Sequence[int]
    weight_rows: int
    """Experts of all layers: first dimension of w13 and w2."""
    item_rows: int
    """Most rows of a post; fixes the workspace."""
    multiprocessors: int = 0
    """That experts and combine take, 0 for all: fewer where Attention's kernels wait on the same GPU at once."""


class M2nService:
    """wait -> sort -> experts -> combine over device-resident tables. One thread calls all but stop and counters."""

    def __init__(self, library: Library, shape: ServiceShape, w13: int, w2: int, wait_us: int = WAIT_US) -> None:
        """``w13`` bf16 [weight_rows, 2I, H] and ``w2`` bf16 [weight_rows, H, I]: device addresses, owned by the caller.

        Takes the workspace of ``item_rows`` rows. Raises ResourceError.
        """
        self._library = library
        self._alive = threading.Lock()
        """Held by ``stop`` while it uses the handle: whoever asks for a stop may come when all has been closed."""
        self.captures = self.replays = 0
        base = (ctypes.c_int32 * len(shape.layer_base))(*shape.layer_base)
        config = ServiceConfig(
            hidden_size=shape.hidden_size,
            intermediate_size=shape.intermediate_size,
            top_k=shape.top_k,
            num_layers=len(shape.layer_base),
            num_experts=shape.num_experts,
            item_rows=shape.item_rows,
            wait_us=wait_us,
            multiprocessors=shape.multiprocessors,
            weight_rows=shape.weight_rows,
            device_w13=w13,
            device_w2=w2,
            layer_base=base,
        )
        self.nbytes = int(library.service_bytes(ctypes.byref(config)))
        self._handle = ctypes.c_void_p()
        library.call("service_create", ctypes.byref(config), ctypes.byref(self._handle))
        self._counters = library.service_counters(self._handle).contents
        self.times = ItemRecorder(library, int(library.service_times(self._handle)))

    def set_lane(self, lane: int, addresses: WindowAddresses | None, capacity: int = 0, first_flag: int = 0) -> None:
        """A new peer behind a lane, or none. Nothing may be in flight (``idle``)."""
        made = None if addresses is None else ctypes.byref(window(addresses))
        self._library.call("service_set_lane", self._handle, lane, made, capacity, first_flag)

    def lane_fault(self, lane: int) -> bool:
        """Whether the peer sent a layer or a number of rows out of bounds. Nothing may be in flight."""
        fault = ctypes.c_int32()
        self._library.call("service_lane_fault", self._handle, lane, ctypes.byref(fault))
        return bool(fault.value)

    def capture(self, parts: int = STEP) -> None:
        """Record the graph that serves every layer, session and size; fewer ``parts`` are for measuring."""
        self._library.call("service_capture", self._handle, parts)
        self.captures += 1

    def step(self, *, captured: bool = True) -> None:
        """Enqueue one step; blocks for the sixteenth last, so that at most sixteen are queued."""
        self._library.call("service_step", self._handle, int(captured))
        self.replays += captured

    def idle(self) -> None:
        """Wait for everything enqueued."""
        self._library.call("service_idle", self._handle)

    def enqueue(self, parts: int = STEP, stream: int = 0) -> None:
        """Chosen kernels on any stream: for measuring and tests."""
        self._library.call("service_enqueue", self._handle, parts, stream)

    def stop(self, *, stopped: bool = True) -> None:
        """Waits end at once and later ones do not begin. Any thread, also after ``close``; never blocks."""
        with self._alive:
            if self._handle:
                self._library.service_stop(self._handle, int(stopped))

    @property
    def counters(self) -> Counters:
        """Live view."""
        counters: Counters = self._counters
        return counters

    @property
    def stream(self) -> int:
        """The CUDA stream that ``step`` uses."""
        return int(self._library.service_stream(self._handle) or 0)

    def close(self) -> None:
        """Free graph, stream and workspace. Idempotent."""
        if self._handle:
            self._counters = Counters.from_buffer_copy(self._counters)
            self.times.close()
            with self._alive:
                handle, self._handle = self._handle, ctypes.c_void_p()
            self._library.call("service_destroy", handle)
