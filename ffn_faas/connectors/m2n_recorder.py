"""Copies the times that kernels keep, beside whatever waits or is captured on the device."""

from __future__ import annotations

import ctypes
import threading
from typing import TYPE_CHECKING, Any

from ffn_faas.connectors.m2n_library import Items, Posts
from ffn_faas.connectors.m2n_times import Reading, ToHost, host_clock, numbered, post_spans, step_spans
from ffn_faas.errors import ResourceError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ffn_faas.connectors.m2n_library import ItemTimes, Library
    from ffn_faas.telemetry.spans import PostSpan, StepSpan


class _Recorder:
    """Over the rings at ``addresses``, each a ``ring`` of m2n_library; made before kernels wait on the device.

    Any thread that has called ``use_device``; calls block for some hundred microseconds, never for a kernel that waits.
    All raise ResourceError.
    """

    def __init__(self, library: Library, ring: type[Items | Posts], addresses: Sequence[int]) -> None:
        self.error_ns = 0
        """How far off the clock of the spans taken last may be."""
        self._library, self._ring, self._addresses = library, ring, list(addresses)
        self._lock = threading.Lock()
        self._first = [0 for _ in addresses]
        """Number of the first entry that is asked for, by ring."""
        self._limit = 0
        self._began: Reading | None = None
        self._observer = ctypes.c_void_p()
        library.call("observer_create", ctypes.byref(self._observer))

    def record(self, limit: int) -> None:
        """From now on the next ``limit`` entries are meant."""
        with self._lock:
            self._began = self._read_clock()
            self._first = [self._ended(address) + 1 for address in self._addresses]
            self._limit = limit

    def close(self) -> None:
        """Idempotent."""
        with self._lock:
            if self._observer:
                self._library.call("observer_destroy", self._observer)
                self._observer = ctypes.c_void_p()

    def _begun(self) -> Reading | None:
        """Where recording began, once; None when nothing was asked for since."""
        began, self._began = self._began, None
        return began

    def _copied(self, address: int, numbers: range) -> list[Any]:
        ring = self._ring()
        ended = self._ended(address)
        self._copy(ring, address)
        return numbered(ring.kept, numbers, ended, self._ended(address))

    def _ended(self, address: int) -> int:
        """The first field of a ring."""
        ended = ctypes.c_uint64()
        self._copy(ended, address)
        return ended.value

    def _clock_since(self, began: Reading) -> ToHost:
        now = self._read_clock()
        self.error_ns = max(began.error_ns, now.error_ns)
        return host_clock(began, now)

    def _read_clock(self) -> Reading:
        device, host, error = ctypes.c_uint64(), ctypes.c_int64(), ctypes.c_int64()
        where = (ctypes.byref(value) for value in (device, host, error))
        self._observe("observer_clock", *where)
        return Reading(device.value, host.value, error.value)

    def _copy(self, target: Any, address: int) -> None:
        self._observe("observer_copy", ctypes.byref(target), address, ctypes.sizeof(target))

    def _observe(self, name: str, *arguments: Any) -> None:
        if not self._observer:
            raise ResourceError("times of the GPU are gone: this rank has closed it", remedy="profile before the stop")
        self._library.call(name, self._observer, *arguments)


class ItemRecorder(_Recorder):
    """Items of an F rank."""

    def __init__(self, library: Library, address: int) -> None:
        super().__init__(library, Items, [address])

    @property
    def first(self) -> int:
        """Number of the first item that is meant."""
        return self._first[0]

    def take(self) -> list[StepSpan]:
        """Those that have ended, but none that may be overwritten by now."""
        with self._lock:
            began = self._begun()
            if began is None:
                return []
            first = self._first[0]
            items: list[ItemTimes] = self._copied(self._addresses[0], range(first - 1, first + self._limit))
            to_host = self._clock_since(began)
            before = items.pop(0) if items and items[0].number < first else None
            return step_spans(items, before, began.host_ns, to_host)


class PostRecorder(_Recorder):
    """Posts of an A rank: one ring for each stage."""

    def __init__(self, library: Library, addresses: Sequence[int]) -> None:
        super().__init__(library, Posts, addresses)

    def take(self) -> list[PostSpan]:
        """Those that were answered, in the order of their dispatch; the latest sum may still lack its end."""
        with self._lock:
            began = self._begun()
            if began is None:
                return []
            stages = [
                self._copied(address, range(first, first + self._limit))
                for address, first in zip(self._addresses, self._first, strict=True)
            ]
            to_host = self._clock_since(began)
            spans = [span for stage, posts in enumerate(stages) for span in post_spans(posts, stage, to_host)]
            return sorted(spans)[: self._limit]
