"""Which pages of a file are in memory, by mmap and mincore."""

from __future__ import annotations

import ctypes
import mmap
import os
from pathlib import Path

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p]


def resident_pages(path: Path) -> list[bool]:
    """One flag per page of ``path``; looking brings no page in."""
    size = path.stat().st_size
    fd = os.open(path, os.O_RDONLY)
    try:
        address = _libc.mmap(None, size, mmap.PROT_READ, mmap.MAP_SHARED, fd, 0)
        if address == ctypes.c_void_p(-1).value:
            raise OSError(ctypes.get_errno(), "mmap")
        flags = ctypes.create_string_buffer(-(-size // mmap.PAGESIZE))
        result = _libc.mincore(address, size, flags)
        _libc.munmap(address, size)
        if result:
            raise OSError(ctypes.get_errno(), "mincore")
    finally:
        os.close(fd)
    return [bool(flag & 1) for flag in flags.raw]


def evict(path: Path) -> bool:
    """Write ``path`` back and drop its pages; False if the file system keeps some (tmpfs does)."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(fd)
    return not any(resident_pages(path))
