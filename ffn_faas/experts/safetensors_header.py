"""The header of one safetensors file, parsed with every bound checked. Reads the header's bytes and no others."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ffn_faas.errors import ResourceError

_LARGEST_HEADER = 100_000_000
"""The limit of the safetensors library itself."""

ITEM_SIZES: Mapping[str, int] = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0"), 1),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 2),
    **dict.fromkeys(("U32", "I32", "F32"), 4),
    **dict.fromkeys(("U64", "I64", "F64"), 8),
}


@dataclass(frozen=True)
class TensorEntry:
    """Where a tensor lies: ``nbytes`` bytes at absolute ``offset`` of ``path``, row-major, little endian."""

    name: str
    path: Path
    offset: int
    nbytes: int
    dtype: str
    """As safetensors spells it: BF16, F16, F32 ..."""
    shape: tuple[int, ...]


def open_unbuffered(path: Path) -> int:
    """File descriptor on which the kernel reads nothing ahead: foreign experts' pages stay out of memory."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)
    return fd


def read_header(path: Path) -> list[TensorEntry]:
    """All tensors of ``path``. Raises ResourceError naming the file and what is off."""
    try:
        fd = open_unbuffered(path)
    except OSError as error:
        raise ResourceError(f"cannot open {path}: {error.strerror}") from error
    try:
        size = os.fstat(fd).st_size
        prefix = os.pread(fd, 8, 0)
        length = int.from_bytes(prefix, "little")
        if len(prefix) < 8 or length > min(_LARGEST_HEADER, size - 8):
            raise _corrupt(path, f"its header claims {length} bytes, the file has {size}")
        text = _read_fully(fd, length, 8)
    except OSError as error:
        raise ResourceError(f"cannot read {path}: {error.strerror}") from error
    finally:
        os.close(fd)
    if len(text) != length:
        raise _corrupt(path, f"its header ends after {len(text)} of {length} bytes")
    try:
        header = json.loads(text.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise _corrupt(path, f"its header is not JSON ({error})") from error
    if not isinstance(header, dict):
        raise _corrupt(path, "its header is not a JSON object")
    start = 8 + length
    return [_entry(path, name, raw, start, size) for name, raw in header.items() if name != "__metadata__"]


def _read_fully(fd: int, length: int, offset: int) -> bytes:
    parts = []
    while length > 0:
        part = os.pread(fd, length, offset)
        if not part:
            break
        parts.append(part)
        length -= len(part)
        offset += len(part)
    return b"".join(parts)


def _entry(path: Path, name: str, raw: Any, data_start: int, file_size: int) -> TensorEntry:
    if not isinstance(raw, dict):
        raise _corrupt(path, f"tensor {name!r} is not described by an object")
    dtype, shape, offsets = raw.get("dtype"), raw.get("shape"), raw.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in ITEM_SIZES:
        raise _corrupt(path, f"tensor {name!r} has unknown dtype {dtype!r}")
    if not (isinstance(shape, list) and all(type(n) is int and 0 <= n <= file_size for n in shape)):
        raise _corrupt(path, f"tensor {name!r} has shape {shape!r}")
    if not (isinstance(offsets, list) and len(offsets) == 2 and all(type(n) is int for n in offsets)):
        raise _corrupt(path, f"tensor {name!r} has data_offsets {offsets!r}")
    begin, end = offsets
    if not 0 <= begin <= end:
        raise _corrupt(path, f"tensor {name!r} has data_offsets {offsets!r}")
    if end > file_size - data_start:
        raise ResourceError(
            f"{path} is truncated: tensor {name!r} ends at byte {data_start + end}, the file has {file_size}"
        )
    wanted = math.prod(shape) * ITEM_SIZES[dtype]
    if end - begin != wanted:
        raise _corrupt(path, f"tensor {name!r} holds {end - begin} bytes, its shape and dtype need {wanted}")
    return TensorEntry(name, path, data_start + begin, wanted, dtype, tuple(shape))


def _corrupt(path: Path, what: str) -> ResourceError:
    return ResourceError(f"{path} is not a sound safetensors file: {what}")
