"""A's half of the GPU data plane: dispatch to and receive from every F rank, capturable in A's own graphs."""

from __future__ import annotations

import ctypes
import threading
from typing import TYPE_CHECKING

from ffn_faas.connectors.m2n_library import Library, window
from ffn_faas.connectors.m2n_recorder import PostRecorder

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ffn_faas.connectors.base import WindowGeometry
    from ffn_faas.connectors.m2n_window import WindowAddresses


class M2nAttention:
    """Device state of one A rank. Counters and window addresses live in it, so graphs survive a new session."""

    def __init__(
        self,
        library: Library,
        geometry: WindowGeometry,
        expert_counts: Sequence[int],
        timeout_s: float = 0.0,
        *,
        beside: bool = False,
    ) -> None:
        """``expert_counts``: experts per layer of every F rank; a wait fails after ``timeout_s`` (0: never).

        ``beside``: F's kernels run on the same GPU at the same time, so no block may stand by before its turn.
        """
        self._library = library
        self._first = [sum(expert_counts[:rank]) for rank in range(len(expert_counts))]
        self._handle = ctypes.c_void_p()
        self._alive = threading.Lock()
        """Held while a thread that may come after ``close`` uses the handle."""
        library.call(
            "attention_create",
            geometry.stages,
            len(expert_counts),
            sum(expert_counts),
            geometry.capacity,
            geometry.hidden_size,
            geometry.top_k,
            int(timeout_s * 1e9),
            int(beside),
            ctypes.byref(self._handle),
        )
        self.times = PostRecorder(library, [self._times_of(stage) for stage in range(geometry.stages)])

    def set_link(self, stage: int, rank: int, addresses: WindowAddresses, epoch: int, *, offered: bool = False) -> None:
        """The windows of one F rank, and the epoch it granted.

        ``offered``: of the session that ``offer`` names, while waits are in flight.
        """
        made = ctypes.byref(window(addresses))
        first = self._first[rank]
        self._library.call("attention_set_link", self._handle, stage, rank, made, epoch, first, int(offered))

    def begin(self) -> None:
        """A new session on all stages, with nothing in flight; an earlier failure is forgotten."""
        self._library.call("attention_begin", self._handle)

    def offer(self, number: int) -> None:
        """Waits go over to the links offered and send their post again; ``number`` 0 withdraws an earlier offer."""
        self._library.call("attention_offer", self._handle, number)

    def active(self, stage: int) -> int:
        """The offer that a stage went over to last, 0 before any."""
        number = ctypes.c_uint32()
        self._library.call("attention_active", self._handle, stage, ctypes.byref(number))
        return number.value

    def long_wait(self, stage: int) -> tuple[int, int]:
        """(flag, F rank) of a wait in flight for more than a millisecond; flag 0 when there is none. Never blocks."""
        flag, rank = ctypes.c_uint64(), ctypes.c_int32()
        self._library.call("attention_long_wait", self._handle, stage, ctypes.byref(flag), ctypes.byref(rank))
        return flag.value, rank.value

    def dispatch(self, stage: int, layer: int, x: int, ids: int, weights: int, rows: int, stream: int) -> None:
        """Enqueue the post of ``rows`` rows: x bf16 [rows, H], global ids i32 [rows, K], weights f32 [rows, K]."""
        self._library.call("attention_dispatch", self._handle, stage, layer, x, ids, weights, rows, stream)

    def receive(self, stage: int, out: int, rows: int, stream: int) -> None:
        """Enqueue the wait for every F rank and the sum into bf16 [rows, H]; NaN when the wait fails."""
        self._library.call("attention_receive", self._handle, stage, out, rows, stream)

    def stop(self, *, stopped: bool = True) -> None:
        """Pending and later waits fail at once. Any thread, also after ``close``; never blocks."""
        self._control(int(stopped))

    def trap(self) -> None:
        """Pending and later waits end this process's CUDA context: nothing is read that a missing answer led to.

        Any thread, also after ``close``; never blocks. Every later call of CUDA in this process fails.
        """
        self._control(2)

    def status(self, stage: int) -> str:
        """``fine``, ``stopped`` or ``timed out``. Synchronizes the device."""
        status = ctypes.c_uint32()
        self._library.call("attention_status", self._handle, stage, ctypes.byref(status))
        return ("fine", "stopped", "timed out")[status.value]

    def close(self) -> None:
        """Idempotent; nothing may be in flight."""
        if self._handle:
            self.times.close()
            with self._alive:
                handle, self._handle = self._handle, ctypes.c_void_p()
            self._library.call("attention_destroy", handle)

    def _control(self, word: int) -> None:
        with self._alive:
            if self._handle:
                self._library.attention_stop(self._handle, word)

    def _times_of(self, stage: int) -> int:
        address = ctypes.c_void_p()
        self._library.call("attention_times", self._handle, stage, ctypes.byref(address))
        return int(address.value or 0)
