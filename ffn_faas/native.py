"""The compiled part of the package, imported when it is first needed."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType

from ffn_faas.errors import NativeMissing

REMEDY = "install ffn-faas where a C++17 compiler and CMake >= 3.18 are found: pip install ."
OPS_REMEDY = "install torch >= 2.11 first, then ffn-faas again without build caches: pip install --no-cache-dir ."


def load() -> ModuleType:
    """The module ``ffn_faas._native``; raises NativeMissing when this installation was made without it."""
    try:
        return importlib.import_module("ffn_faas._native")
    except ImportError as error:
        raise NativeMissing(
            f"the compiled module ffn_faas._native cannot be imported: {error}", remedy=REMEDY
        ) from error


def optional_library(name: str) -> Path | None:
    """Path of a shared object that not every installation has, such as ``m2n`` (built where nvcc is found)."""
    package = importlib.import_module("ffn_faas")
    for directory in package.__path__:
        library = Path(directory) / "_lib" / f"{name}.so"
        if library.is_file():
            return library
    return None


def attention_ops_library() -> Path:
    """Path of the shared object with Attention's torch ops; raises NativeMissing when it was not built."""
    library = optional_library("attention_ops")
    if library is None:
        raise NativeMissing("this installation of ffn-faas was built without the Attention ops", remedy=OPS_REMEDY)
    return library
