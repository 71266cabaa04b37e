"""Reads the owned experts, and nothing else, from the checkpoint into a kernel's memory."""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from ffn_faas.errors import ResourceError
from ffn_faas.experts.checkpoint import Checkpoint, dtype_name
from ffn_faas.experts.layouts import Source
from ffn_faas.experts.safetensors_header import TensorEntry, open_unbuffered
from ffn_faas.memory import require_memory

if TYPE_CHECKING:
    import torch

    from ffn_faas.experts.kernels.base import ExpertKernel
    from ffn_faas.experts.spec import MoESpec

Progress = Callable[[int, int], None]
"""Called with (bytes done, bytes in all), from the thread that loads."""

_LARGEST_READ = 1 << 30


@dataclass(frozen=True)
class StorageAccount:
    """What loading cost: bytes from files, bytes that stay resident, seconds."""

    bytes_read: int
    resident_bytes: int
    experts: range
    layers: int
    dtype: str
    seconds: float

    def __str__(self) -> str:
        first, last = self.experts.start, self.experts.stop - 1
        return (
            f"experts {first}-{last} ({len(self.experts)}) of {self.layers} layers, {self.dtype}: "
            f"{_size(self.bytes_read)} read, {_size(self.resident_bytes)} resident, {self.seconds:.1f} s"
        )


@dataclass(frozen=True)
class _Read:
    entry: TensorEntry
    layer: int
    expert: int
    """Local id."""
    source: Source


def load_experts(
    spec: MoESpec,
    checkpoint: Checkpoint | None,
    experts: range,
    kernel: ExpertKernel,
    progress: Progress,
    *,
    seed: int = 0,
    threads: int = 4,
) -> StorageAccount:
    """Allocate ``kernel`` for ``experts`` (global ids) and fill it; no ``checkpoint`` makes dummy weights of ``seed``.

    Every expert tensor's header is checked before the first byte is read. Blocks. Raises ResourceError (memory, a
    file that cannot be read or shrank), ModelRefused (missing tensor, wrong shape or dtype).
    """
    started = time.monotonic()
    if checkpoint is not None:
        for layer in range(spec.num_layers):
            for expert in experts:
                checkpoint.expert(spec, layer, expert)
    total = spec.num_layers * len(experts) * spec.expert_bytes
    watched = progress
    if kernel.on_host:
        _require(total)
        watched = _watched(progress)
    kernel.prepare()
    kernel.allocate(experts)
    fill = _dummy_layers(seed) if checkpoint is None else _checkpoint_layers(checkpoint, threads)
    bytes_read = fill(spec, experts, kernel, watched)
    kernel.finish()
    seconds = time.monotonic() - started
    return StorageAccount(bytes_read, kernel.resident_bytes, experts, spec.num_layers, spec.dtype, seconds)


def _require(nbytes: int) -> None:
    require_memory(nbytes, "experts still to be loaded", "use more F ranks, more memory, or a smaller --dtype")


def _watched(progress: Progress) -> Progress:
    """Memory is taken as it is written; others on the host may take it first. Better one error than a kill."""

    def report(done: int, total: int) -> None:
        progress(done, total)
        _require(total - done)

    return report


_Fill = Callable[["MoESpec", range, "ExpertKernel", Progress], int]


def _dummy_layers(seed: int) -> _Fill:
    def fill(spec: MoESpec, experts: range, kernel: ExpertKernel, progress: Progress) -> int:
        from ffn_faas.experts.dummy import DummyWeights

        dummy = DummyWeights(spec, seed)
        done, total = 0, spec.num_layers * len(experts) * spec.expert_bytes
        for layer in range(spec.num_layers):
            for local, expert in enumerate(experts):
                for matrix in spec.matrices:
                    kernel.fill_dummy(layer, expert, local, matrix, dummy)
                done += spec.expert_bytes
                progress(done, total)
            kernel.finish_layer(layer)
        return 0

    return fill


def _checkpoint_layers(checkpoint: Checkpoint, threads: int) -> _Fill:
    def fill(spec: MoESpec, experts: range, kernel: ExpertKernel, progress: Progress) -> int:
        layers = [list(_layer_reads(spec, checkpoint, experts, layer)) for layer in range(spec.num_layers)]
        total = sum(read.entry.nbytes for layer in layers for read in layer)
        done = reported = 0
        with _files({read.entry.path for layer in layers for read in layer}) as files, _pool(threads) as pool:
            for layer, reads in enumerate(layers):
                pending = [pool.submit(_read, files[read.entry.path], read, kernel) for read in reads]
                for future in as_completed(pending):
                    done += future.result()
                    if done - reported >= total // 200:
                        reported = done
                        progress(done, total)
                kernel.finish_layer(layer)
            progress(done, total)
        return done

    return fill


def _layer_reads(spec: MoESpec, checkpoint: Checkpoint, experts: range, layer: int) -> Iterator[_Read]:
    for local, expert in enumerate(experts):
        for piece in checkpoint.expert(spec, layer, expert):
            for entry, source in _split(piece.entry, piece.source):
                yield _Read(entry, layer, local, source)


def _split(entry: TensorEntry, source: Source) -> Iterator[tuple[TensorEntry, Source]]:
    """Matrices that lie one after the other are read one by one, each straight to where it belongs."""
    if source.transposed or source.interleaved:
        yield entry, source
        return
    count = len(source.matrices)
    nbytes, shape = entry.nbytes // count, (entry.shape[0] // count, *entry.shape[1:])
    for number, matrix in enumerate(source.matrices):
        part = replace(entry, offset=entry.offset + number * nbytes, nbytes=nbytes, shape=shape)
        yield part, replace(source, matrices=(matrix,))


def _read(fd: int, read: _Read, kernel: ExpertKernel) -> int:
    """Fill the kernel's buffers, straight from the file where bytes and order are the same. Returns the bytes read."""
    entry, source = read.entry, read.source
    plain = len(source.matrices) == 1 and not source.transposed
    if plain and dtype_name(entry) == kernel.spec.dtype:
        where = read.layer, read.expert, source.matrices[0]
        _fill(fd, entry, kernel.matrix_address(*where))
        kernel.finish_matrix(*where)
        return entry.nbytes
    import torch  # only here: an F rank that need not convert does without it

    staging = torch.empty(entry.shape, dtype=getattr(torch, dtype_name(entry)))
    _fill(fd, entry, staging.data_ptr())
    for matrix, values in zip(source.matrices, _matrices(staging, source), strict=True):
        destination = kernel.matrix_buffer(read.layer, read.expert, matrix)
        destination.copy_(values)
        kernel.finish_matrix(read.layer, read.expert, matrix)
    return entry.nbytes


def _matrices(stored: torch.Tensor, source: Source) -> list[torch.Tensor]:
    """Views of the matrices in what one expert has in one tensor."""
    values = stored.t() if source.transposed else stored
    count = len(source.matrices)
    if source.interleaved:
        return [values[number::count] for number in range(count)]
    return list(values.chunk(count))


def _fill(fd: int, entry: TensorEntry, address: int) -> None:
    """Read all of ``entry`` into as many bytes at ``address``."""
    view = memoryview((ctypes.c_char * entry.nbytes).from_address(address)).cast("B")
    done = 0
    while done < entry.nbytes:
        try:
            count = os.preadv(fd, [view[done : done + _LARGEST_READ]], entry.offset + done)
        except OSError as error:
            raise ResourceError(f"cannot read {entry.name} from {entry.path}: {error.strerror}") from error
        if count == 0:
            raise ResourceError(
                f"{entry.path} is truncated: tensor {entry.name} needs {entry.nbytes} bytes, {done} were there"
            )
        done += count


@contextmanager
def _files(paths: set[Path]) -> Iterator[dict[Path, int]]:
    with ExitStack() as stack:
        opened = {}
        for path in sorted(paths):
            try:
                opened[path] = open_unbuffered(path)
            except OSError as error:
                raise ResourceError(f"cannot open {path}: {error.strerror}") from error
            stack.callback(os.close, opened[path])
        yield opened


@contextmanager
def _pool(threads: int) -> Iterator[ThreadPoolExecutor]:
    """Reads that have not begun are dropped when one failed."""
    pool = ThreadPoolExecutor(threads, thread_name_prefix="ffn-read")
    try:
        yield pool
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _size(nbytes: int) -> str:
    return f"{nbytes / (1 << 30):.2f} GiB" if nbytes >= 1 << 30 else f"{nbytes / (1 << 20):.1f} MiB"
