"""Times that kernels keep in rings in device memory, as spans on the host's clock. Pure.

A ring has the last entries, each with its number (from 1; entry n lies at (n - 1) modulo the ring's length), and
m2n_recorder copies it while kernels go on writing. Device times are nanoseconds of the GPU's globaltimer, which drifts
against the host's clock.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from ffn_faas.telemetry.spans import PostSpan, StepSpan

if TYPE_CHECKING:
    from ffn_faas.connectors.m2n_library import ItemTimes, PostTimes

    Times = TypeVar("Times", ItemTimes, PostTimes)
ToHost = Callable[[int], int]


@dataclass(frozen=True)
class Reading:
    """Both clocks at one moment: ``host_ns`` is CLOCK_MONOTONIC at ``device_ns``, give or take ``error_ns``."""

    device_ns: int
    host_ns: int
    error_ns: int


def host_clock(first: Reading, last: Reading) -> ToHost:
    """Device time -> CLOCK_MONOTONIC, along the line between two readings; beyond them the nearer one counts."""
    elapsed, offset = last.device_ns - first.device_ns, first.host_ns - first.device_ns
    drift = (last.host_ns - last.device_ns) - offset

    def to_host(device_ns: int) -> int:
        since = min(max(device_ns - first.device_ns, 0), max(elapsed, 0))
        return device_ns + offset + (drift * since // elapsed if elapsed > 0 else drift)

    return to_host


def numbered(ring: Sequence[Times], numbers: range, ended: int, still_ended: int) -> list[Times]:
    """Those entries of ``numbers`` that are whole in a copy of a ring.

    ``ended``: number of the newest whole entry before it was copied; ``still_ended``: after that. The next one may have
    been written over the oldest meanwhile.
    """
    oldest = max(still_ended + 2 - len(ring), 1)
    within = range(max(numbers.start, oldest), min(numbers.stop, ended + 1))
    found = [(number, ring[(number - 1) % len(ring)]) for number in within]
    return [times for number, times in found if times.number == number]


def step_spans(items: Sequence[ItemTimes], before: ItemTimes | None, began_ns: int, to_host: ToHost) -> list[StepSpan]:
    """``items`` in order, ``before``: the one before the first; ``began_ns``: when recording began, by the host."""
    spans = []
    for item in items:
        taken = to_host(item.taken)
        follows = before is not None and before.number + 1 == item.number
        began = to_host(before.sent) if before is not None and follows else 0
        spans.append(
            StepSpan(
                began=min(max(began, began_ns), taken),
                taken=taken,
                gathered=taken,
                sorted=to_host(item.sorted),
                computed=to_host(item.computed),
                sent=to_host(item.sent),
                layer=item.layer,
                rows=item.rows,
                parts=item.parts,
            )
        )
        before = item
    return spans


def post_spans(posts: Sequence[PostTimes], stage: int, to_host: ToHost) -> list[PostSpan]:
    """``posts`` of one stage, in order."""
    return [
        PostSpan(
            dispatching=to_host(post.dispatching),
            dispatched=to_host(post.dispatched),
            waiting=to_host(post.waiting),
            answered=to_host(post.answered),
            summed=to_host(post.summed),
            stage=stage,
            layer=post.layer,
            rows=post.rows,
        )
        for post in posts
    ]
