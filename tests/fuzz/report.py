"""What a run measures of this process, and how its figures read."""

from __future__ import annotations

import gc
import os
from dataclasses import dataclass
from pathlib import Path

import psutil


@dataclass(frozen=True)
class Held:
    """What a leak would make grow."""

    descriptors: int
    threads: int
    mappings: int
    """Of window memory."""
    resident_bytes: int

    @classmethod
    def now(cls) -> Held:
        gc.collect()
        maps = Path("/proc/self/maps").read_text()
        return cls(
            len(os.listdir("/proc/self/fd")),  # noqa: PTH208
            len(os.listdir("/proc/self/task")),  # noqa: PTH208
            maps.count("memfd:ffn_faas"),
            psutil.Process().memory_info().rss,
        )

    def growth(self, before: Held) -> str:
        megabytes = (self.resident_bytes - before.resident_bytes) / 2**20
        return (
            f"descriptors {before.descriptors} -> {self.descriptors}, threads {before.threads} -> {self.threads}, "
            f"window mappings {before.mappings} -> {self.mappings}, resident memory {megabytes:+.1f} MiB"
        )

    def leaks(self, before: Held, spare_threads: int = 1) -> bool:
        """Descriptors and mappings are exact; memory may settle, but not by more than 64 MiB."""
        return (
            self.descriptors > before.descriptors
            or self.mappings > before.mappings
            or self.threads > before.threads + spare_threads
            or self.resident_bytes > before.resident_bytes + (64 << 20)
        )
