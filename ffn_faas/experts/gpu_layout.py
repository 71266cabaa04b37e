"""In which order the rows of expert weights lie in GPU memory. Pure; native/experts_gpu/experts.cu relies on it.

A tile of the product is groups of 128 weight rows: two halves of four warps of 16 rows, and a warp's 16 rows are two
parts of 8. A thread then holds row r of each part. The orders below put the gate and the up row of a column into one
thread, and make what the threads of a warp hold neighbours in memory, so that they store whole sectors.
"""

from __future__ import annotations

from collections.abc import Iterator

GROUP = 128


def gate_up_rows(intermediate_size: int) -> list[int]:
    """Row i of the resident w13 is row ``gate_up_rows(I)[i]`` of [gate; up], both [I, H]. I is a multiple of 64.

    Part 0 of a warp is gate, part 1 is up; a group covers 64 columns of the intermediate activation.
    """
    order = []
    for group in range(2 * intermediate_size // GROUP):
        for half, warp, part, row in _positions():
            column = 64 * group + 16 * warp + 2 * row + half
            order.append(part * intermediate_size + column)
    return order


def down_rows(hidden_size: int) -> list[int]:
    """Row i of the resident w2 is row ``down_rows(H)[i]`` of [H, I]. H is a multiple of 128."""
    order = []
    for group in range(hidden_size // GROUP):
        for half, warp, part, row in _positions():
            order.append(GROUP * group + 32 * warp + 4 * row + 2 * half + part)
    return order


def places(order: list[int]) -> list[int]:
    """Where each row goes: the inverse of ``gate_up_rows`` or ``down_rows``."""
    inverse = [0] * len(order)
    for place, row in enumerate(order):
        inverse[row] = place
    return inverse


def _positions() -> Iterator[tuple[int, int, int, int]]:
    """(half, warp, part, row) of the rows of a group, in memory order."""
    for half in range(2):
        for warp in range(4):
            for part in range(2):
                for row in range(8):
                    yield half, warp, part, row
