"""The AMX path on any CPU: Experts of native/experts_cpu built with emulated tiles, in the place of ``ExpertsCpu``."""

from __future__ import annotations

import ctypes
import subprocess
from functools import partial
from pathlib import Path
from types import SimpleNamespace

HERE = Path(__file__).parent
NATIVE = HERE.parents[1] / "native"
SOURCES = [
    NATIVE / "experts_cpu" / f"{name}.cpp" for name in ("experts", "layout", "thread_pool", "path_amx", "path_scalar")
]
FLAGS = ["-std=c++17", "-O2", "-fPIC", "-shared", "-pthread", "-I", str(NATIVE)]
FLAGS += ["-I", str(NATIVE / "include"), "-I", str(HERE)]
AMX = ["-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512bf16", "-mfma", "-mamx-tile", "-mamx-bf16", "-DNDEBUG"]
EMULATED = ["-march=native", "-DFFN_FAAS_EMULATED_TILES"]


def compiled(to: Path, flags: list[str], *sources: Path) -> ctypes.CDLL:
    subprocess.run(["g++", *FLAGS, *flags, "-o", str(to), *map(str, sources)], check=True)
    return ctypes.CDLL(str(to))


def library(to: Path) -> ctypes.CDLL:
    """Takes some 5 s of a core."""
    built = compiled(to, EMULATED, HERE / "emulated_experts.cpp", HERE / "tile_products.cpp", *SOURCES)
    int64, int32, pointer = ctypes.c_int64, ctypes.c_int32, ctypes.c_void_p
    built.experts_new.restype = pointer
    built.experts_new.argtypes = [int64, int64, int64, int64, int32, int32, ctypes.c_char_p]
    built.experts_delete.argtypes = [pointer]
    built.experts_pack.argtypes = [pointer, int64, int64, int32, pointer]
    built.experts_compute.argtypes = [pointer, int32, int64, int32, pointer, pointer, pointer, pointer]
    return built


class EmulatedExperts:
    """What ``NativeKernel`` calls of ``ExpertsCpu``."""

    def __init__(
        self,
        library: ctypes.CDLL,
        *,
        layers: int,
        experts: int,
        hidden_size: int,
        intermediate_size: int,
        dtype: int,
        threads: int,
        path: str,
    ) -> None:
        self._library = library
        self._self = library.experts_new(layers, experts, hidden_size, intermediate_size, dtype, threads, path.encode())
        if not self._self:
            raise ValueError(f"no experts of this shape over path {path}")

    def __del__(self) -> None:
        self._library.experts_delete(self._self)

    def pack(self, layer: int, expert: int, matrix: int, source: int) -> None:
        self._library.experts_pack(self._self, layer, expert, matrix, source)

    def compute(self, *arguments: int) -> int:
        code: int = self._library.experts_compute(self._self, *arguments)
        return code


def module(library: ctypes.CDLL) -> SimpleNamespace:
    """In the place of the native module."""
    return SimpleNamespace(ExpertsCpu=partial(EmulatedExperts, library))
