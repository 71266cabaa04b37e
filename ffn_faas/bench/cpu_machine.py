"""What a CPU bench ran on, and what that machine can do at best."""

from __future__ import annotations

import platform
import time
from dataclasses import dataclass
from pathlib import Path

from ffn_faas import env, native

_READ_BYTES = 1 << 28
_PEAK_ROUNDS = 2_000_000


def machine() -> dict[str, object]:
    """Processor, cores this process may use, instruction sets of the native kernel, memory. No names of hosts."""
    import psutil

    module = native.load()
    return {
        "cpu": _cpu_name(),
        "cpus": psutil.cpu_count(),
        "threads": env.num_threads(),
        "paths": module.ExpertsCpu.paths(module.BF16),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "system": f"{platform.system()} {platform.release()}",
    }


@dataclass(frozen=True)
class Ceiling:
    """Reading memory by all threads, GB/s; multiply-adds in registers by all threads, GFLOP/s."""

    read: float
    peak: float


class Probe:
    """Measures the ceilings; owns the memory that is read, too large for any cache."""

    def __init__(self, dtype: str) -> None:
        import torch

        self._native = native.load()
        self._memory = torch.ones(_READ_BYTES, dtype=torch.uint8)
        self._dtype = {"float32": self._native.F32, "float16": self._native.F16}.get(dtype, self._native.BF16)

    def ceiling(self) -> Ceiling:
        """Takes some 20 to 50 ms."""
        threads = env.num_threads()
        read = self._native.cpu_read_bandwidth(
            threads=threads, address=self._memory.data_ptr(), nbytes=self._memory.numel()
        )
        peak = self._native.cpu_peak_flops(threads=threads, dtype=self._dtype, rounds=_PEAK_ROUNDS // 10)
        return Ceiling(read / 1e9, peak / 1e9)


class CopyFloor:
    """The copies that no round trip can do without, by one thread: rows into a window, partial rows written, and read
    again while they are rounded into the result. The least time that A and F need even if the experts cost nothing."""

    def __init__(self, tokens: int, hidden: int, dtype: str) -> None:
        import torch

        kind = getattr(torch, dtype)
        self._x = torch.ones(tokens, hidden, dtype=kind)
        self._window, self._out = torch.empty_like(self._x), torch.empty_like(self._x)
        self._partial = torch.empty(tokens, hidden)
        self.microseconds()  # the first one pays for the pages

    def microseconds(self) -> float:
        import torch

        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            begin = time.perf_counter_ns()
            self._window.copy_(self._x)
            self._partial.zero_()
            self._out.copy_(self._partial)
            return (time.perf_counter_ns() - begin) / 1e3
        finally:
            torch.set_num_threads(threads)


def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
