"""Windows of the ``m2n`` transport in GPU memory, byte by byte: enough to write another peer. Pure.

Two arenas per (A rank, F rank): dispatch windows in the F rank's memory, which A writes, and combine windows in the A
rank's memory, which F writes. Each is a cudaMalloc allocation of its own, zeroed, a multiple of 2 MiB (an IPC handle
opens a whole allocation); the peer gets handle, offset and length. All offsets are multiples of 128.

    dispatch arena, stage s at s * stage_stride
        flag     u64   (epoch << 40 | sequence) << 10: a flag of protocol.window, and room to count below it
        head     i32   layer number, then i32 rows, at 64
        ids      i32 [capacity, top_k]  local expert ids of the first `rows` rows; -1 = not here
        weights  f32 [capacity, top_k]
        hidden   bf16 [capacity, hidden_size]
    combine arena, stage s at s * stage_stride
        flag     u64
        partial  bf16 [capacity, hidden_size]  one row for each row of the post, in its order

Flags are read with ld.acquire.sys and compared for equality; sequences start at 1, the epoch is that which the window's
F rank has granted. A flag is stored with st.release.sys (or behind fence.acq_rel.sys), or, from a session's second post
on, added to: each of n <= 1024 blocks adds 1 with red.sys behind a fence of its own, but one of them 1024 - (n - 1), so
that together they lead from one post's flag to the next and no sum on the way is one. Every F rank gets and answers
every post, also one of 0 rows. A row goes once to each F rank that owns one of its experts, in any order; A remembers
which. A writes the next post of a stage only after it summed the answers of all F ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ffn_faas.connectors.base import WindowGeometry

ALIGNMENT = 128
HEAD = 64
ARENA_ROUNDING = 2 << 20


@dataclass(frozen=True)
class DispatchLayout:
    """Byte offsets from the start of a stage, and the sizes."""

    flag: int
    head: int
    ids: int
    weights: int
    hidden: int
    stage_stride: int
    nbytes: int


@dataclass(frozen=True)
class CombineLayout:
    """Byte offsets from the start of a stage, and the sizes."""

    flag: int
    partial: int
    stage_stride: int
    nbytes: int


@dataclass(frozen=True)
class WindowAddresses:
    """Where one stage lies, as the calling side's device sees it; the fields of ``ffn_m2n_window``."""

    dispatch_flag: int
    dispatch_head: int
    dispatch_ids: int
    dispatch_weights: int
    dispatch_hidden: int
    combine_flag: int
    combine_partial: int


def dispatch_layout(geometry: WindowGeometry) -> DispatchLayout:
    """Of the arena on F."""
    ids = ALIGNMENT
    routing = _align(geometry.capacity * geometry.top_k * 4)
    hidden = ids + 2 * routing
    stride = hidden + _align(geometry.capacity * geometry.hidden_size * geometry.element_size)
    return DispatchLayout(0, HEAD, ids, ids + routing, hidden, stride, _arena(stride, geometry.stages))


def combine_layout(geometry: WindowGeometry) -> CombineLayout:
    """Of the arena on A."""
    stride = ALIGNMENT + _align(geometry.capacity * geometry.hidden_size * geometry.element_size)
    return CombineLayout(0, ALIGNMENT, stride, _arena(stride, geometry.stages))


def addresses(geometry: WindowGeometry, dispatch: int, combine: int, stage: int) -> WindowAddresses:
    """Of one stage, given where the two arenas begin."""
    on_f, on_a = dispatch_layout(geometry), combine_layout(geometry)
    dispatch += stage * on_f.stage_stride
    combine += stage * on_a.stage_stride
    return WindowAddresses(
        dispatch_flag=dispatch + on_f.flag,
        dispatch_head=dispatch + on_f.head,
        dispatch_ids=dispatch + on_f.ids,
        dispatch_weights=dispatch + on_f.weights,
        dispatch_hidden=dispatch + on_f.hidden,
        combine_flag=combine + on_a.flag,
        combine_partial=combine + on_a.partial,
    )


def _align(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def _arena(stride: int, stages: int) -> int:
    return -(-stride * stages // ARENA_ROUNDING) * ARENA_ROUNDING
