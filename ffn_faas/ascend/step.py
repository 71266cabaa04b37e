"""One F step: receive a chunk, compute it, send it back. Chunks say which layer they are of; nothing counts layers."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from ffn_faas.errors import ModelRefused

if TYPE_CHECKING:
    import torch

    from ffn_faas.ascend.push import PushFfn
    from ffn_faas.ascend.times import StepTimes

Experts = Callable[["torch.Tensor", "torch.Tensor", "torch.Tensor", "torch.Tensor"], "torch.Tensor"]


def layer_numbers(prefixes: Sequence[str]) -> list[int]:
    """The model's own number of each routed-experts layer, which need not be consecutive; posts carry it."""
    numbers = [re.search(r"\blayers\.(\d+)\.", prefix) for prefix in prefixes]
    if not all(numbers):
        raise ModelRefused(f"{prefixes[numbers.index(None)]} has no layer number to send over CAM")
    return [int(number[1]) for number in numbers if number is not None]


def farewell_layer(numbers: Sequence[int]) -> int:
    """The number that the last exchange of a session carries."""
    return max(numbers) + 1


def slot_table(numbers: Sequence[int], device: Any) -> torch.Tensor:
    """i64 [largest number + 2]: the place of a layer in the lists of weights, by its number; -1 where it has none.

    The last entry is that of the farewell, which any layer may compute.
    """
    import torch

    table = torch.full((farewell_layer(numbers) + 1,), -1, dtype=torch.int64)
    table[torch.tensor(list(numbers))] = torch.arange(len(numbers))
    table[-1] = 0
    return table.to(device)


def _at_once(call: Callable[[], None]) -> None:
    call()


class PushStep:
    """``experts(x, scales, counts, layer)`` as LayeredExperts; ``slots`` as ``slot_table``.

    ``times``, where they are kept, hears of the ends of the parts.
    """

    def __init__(self, session: PushFfn, experts: Experts, slots: torch.Tensor, times: StepTimes | None = None) -> None:
        self._session = session
        self._experts = experts
        self._slots = slots
        self._times = times
        self.rows = 0
        """Of all eager steps; a graph's stay on the device."""
        self.computing_since = 0.0
        """When the eager step under way got its chunk, on the monotonic clock; 0 while it waits."""

    def on_device(self, mark: Callable[[Callable[[], None]], None] = _at_once) -> tuple[Any, ...]:
        """Every chunk by the same operators over capacity-shaped buffers: layer and counts stay on the device.

        Returns what has to stay alive until the device has passed it. ``mark(call)`` is told of calls that belong to a
        place between two operators; a plan that is recorded makes them there in each replay.
        """
        times = self._times
        got = self._session.receive()
        if times is not None:
            mark(times.taken)
        # A clone: the operators read the storage of their index, and a slice's begins elsewhere.
        layer = self._slots.index_select(0, got.batch_info[2:3].clone())
        y = self._experts(got.x, got.scales, got.counts, layer)
        if times is not None:
            mark(times.computed)
        kept = (layer, *self._session.send(y))
        if times is not None:
            mark(times.sent)
        return kept

    def eager(self) -> tuple[Any, ...]:
        """As ``on_device`` with one look at the counts, so that only valid rows are computed."""
        import torch

        times = self._times
        got = self._session.receive()
        if times is not None:
            times.taken()
        rows = int(got.counts.sum())
        self.computing_since = time.monotonic()
        layer = self._slots.index_select(0, got.batch_info[2:3].clone())
        if rows == 0:
            y = torch.zeros(1, got.x.shape[1], dtype=self._session.member.dtype, device=got.x.device)
        else:
            scales = got.scales[:rows] if got.scales.shape[0] == got.x.shape[0] else got.scales
            y = self._experts(got.x[:rows], scales, got.counts, layer)
        if times is not None:
            times.computed()
        kept = (layer, *self._session.send(y))
        if times is not None:
            times.sent()
        self.rows += rows
        self.computing_since = 0.0
        return kept
