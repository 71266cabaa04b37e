"""The memory that one A rank and one F rank share, byte by byte: enough to write another peer. Pure.

One arena per (A rank, F rank) pair. All numbers are little endian. All offsets are multiples of 128, so that two cache
lines never meet in one flag.

    header, 64 bytes at 0, written by F before A maps the arena, constant from then on
        u64 magic "FFNWIN01" | u32 layout version | u32 stages | u64 capacity | u64 hidden_size | u64 top_k
        | u64 element_size | u64 epoch | u64 nbytes (of the arena)
    receiver_sleeping, u32 at 128: F writes 1 before it sleeps, 0 when it wakes
    stage s at first_stage + s * stage_stride; inside it:
        dispatch window, written by A
            dispatch_flag     u64
            dispatch_layer    i32   the layer number that F gave the layer (protocol.messages.LayersAccepted)
            dispatch_rows     i32   0 ... capacity
            dispatch_ids      i32 [capacity, top_k]  local expert ids of the first `rows` rows; -1 = not here
            dispatch_weights  f32 [capacity, top_k]
            dispatch_hidden   [capacity, hidden_size] in the wire type, element_size bytes an element
        combine window, written by F, except for the word
            combine_flag      u64
            combine_sleeping  u32   A writes 1 before it sleeps on this word (futex, not private)
            combine_partial   f32 [capacity, hidden_size]  one row for each row of the post, in its order

A flag is ``epoch << 40 | sequence``, compared for equality. Sequences start at 1 in every stage and grow by one with
each post. A fills its dispatch windows and then stores dispatch_flag (release). F waits for the next flag (acquire),
computes, fills combine_partial and stores the same number into combine_flag (release). Every F rank gets and answers
every post, also one of 0 rows. A writes the next post of a stage only after all F ranks answered the previous one and
their partial rows were read.

Sleeping, both ways: the sleeper stores 1 into its word, fences (sequentially consistent), looks at the flag once more
and only then sleeps. The waker stores the flag, fences, and looks at the word. If it is not 0, A writes 8 bytes (u64 1)
to F's doorbell, an eventfd that came with the arena; F stores 0 into A's word and wakes one waiter of that futex.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ffn_faas.connectors.base import WindowGeometry

MAGIC = int.from_bytes(b"FFNWIN01", "little")
LAYOUT_VERSION = 1
ALIGNMENT = 128
EPOCH_SHIFT = 40
MAX_EPOCH = (1 << 24) - 1
RECEIVER_SLEEPING = ALIGNMENT
FIRST_STAGE = 2 * ALIGNMENT


def flag(epoch: int, sequence: int) -> int:
    """The number that releases post ``sequence`` (from 1) of a session."""
    return epoch << EPOCH_SHIFT | sequence


@dataclass(frozen=True)
class WindowLayout:
    """Byte offsets. The dispatch and combine fields count from the start of their stage."""

    dispatch_flag: int
    dispatch_layer: int
    dispatch_rows: int
    dispatch_ids: int
    dispatch_weights: int
    dispatch_hidden: int
    combine_flag: int
    combine_sleeping: int
    combine_partial: int
    stage_stride: int
    nbytes: int
    """Of the whole arena."""
    receiver_sleeping: int = RECEIVER_SLEEPING
    first_stage: int = FIRST_STAGE

    def stage(self, index: int) -> int:
        """Offset of a stage from the start of the arena."""
        return self.first_stage + index * self.stage_stride


def window_layout(geometry: WindowGeometry) -> WindowLayout:
    """Where everything lies in an arena of this geometry."""
    rows = geometry.capacity
    routing = _align(rows * geometry.top_k * 4)
    dispatch_ids = 2 * ALIGNMENT
    dispatch_weights = dispatch_ids + routing
    dispatch_hidden = dispatch_weights + routing
    combine_flag = dispatch_hidden + _align(rows * geometry.hidden_size * geometry.element_size)
    combine_sleeping = combine_flag + ALIGNMENT
    combine_partial = combine_sleeping + ALIGNMENT
    stage_stride = combine_partial + _align(rows * geometry.hidden_size * 4)
    return WindowLayout(
        dispatch_flag=0,
        dispatch_layer=ALIGNMENT,
        dispatch_rows=ALIGNMENT + 4,
        dispatch_ids=dispatch_ids,
        dispatch_weights=dispatch_weights,
        dispatch_hidden=dispatch_hidden,
        combine_flag=combine_flag,
        combine_sleeping=combine_sleeping,
        combine_partial=combine_partial,
        stage_stride=stage_stride,
        nbytes=FIRST_STAGE + geometry.stages * stage_stride,
    )


def merge_bytes(geometry: WindowGeometry, rows: int) -> int:
    """Memory in which F lays posts of several lanes side by side, up to ``rows`` of them; one per F rank."""
    hidden = _align(rows * geometry.hidden_size * geometry.element_size)
    routing = _align(rows * geometry.top_k * 4)
    return hidden + 2 * routing + _align(rows * geometry.hidden_size * 4)


def _align(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
