"""What moves token batches between A and F, seen from F: windows of every attached A rank as one stream of items."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ffn_faas.errors import HandshakeRefused

if TYPE_CHECKING:
    from ffn_faas.protocol.messages import DeviceMemory
    from ffn_faas.telemetry.spans import StepSpan


@dataclass(frozen=True)
class WindowGeometry:
    """Agreed at attach; fixes the memory layout of the windows of one (A rank, F rank) pair.

    ``capacity`` rows per window, ``hidden_size`` elements of ``element_size`` bytes per row, ``top_k`` expert ids
    and weights per row, one dispatch and one combine window per stage.
    """

    stages: int
    capacity: int
    hidden_size: int
    top_k: int
    element_size: int


TCP = "tcp:"
"""Begins ``WindowOffer.broker`` of windows on another host."""


@dataclass(frozen=True)
class WindowOffer:
    """How the peer gets at the windows of one link; sent in ``protocol.messages.Windows``."""

    broker: str
    """shm: the abstract socket that hands over descriptors. tcp: ``tcp:PORT``; on A ``tcp:HOST:PORT``."""
    ticket: str
    nbytes: int
    dispatch: DeviceMemory | None = None
    """Transport m2n: where A's posts go, in F's GPU memory; there is no broker then."""


@dataclass(frozen=True)
class Distribution:
    """How often values fell between bounds. ``counts`` has one more entry than ``bounds``; not cumulative."""

    bounds: list[float]
    counts: list[int]
    total: float
    """Sum of all values."""


class Item(ABC):
    """What one step computes: a post, several posts of a layer, or a part of one. Valid until ``complete``, not after.

    ``parts`` names (link, stage, rows) of each, in the order of their rows. ``hidden`` [rows, hidden_size] in the wire
    type and ``partial`` [rows, hidden_size] f32 may be buffers over the windows themselves (the peer may write
    ``hidden`` if it breaks the protocol: only values depend on that); ``expert_ids`` [rows, top_k] i32 (local ids,
    -1 = no expert here) and ``weights`` [rows, top_k] f32 are private copies whose bounds were checked.
    """

    parts: list[tuple[int, int, int]]
    layer: int
    rows: int
    hidden: Any
    expert_ids: Any
    weights: Any
    partial: Any

    @abstractmethod
    def complete(self) -> None:
        """``partial`` is written: hand it back and release the combine flags. Never blocks."""


class FFNConnector(ABC):
    """F side of one transport. Links come and go at any time, from any thread, while another thread receives."""

    transport: str

    @abstractmethod
    def open_link(self, geometry: WindowGeometry, epoch: int, expert_counts: list[int]) -> tuple[int, WindowOffer]:
        """Allocate the windows of one (A rank, F rank) pair; returns its key and what the peer needs to map them.

        ``expert_counts[layer]`` bounds the local expert ids that posts of that layer may carry.
        Raises ResourceError when the memory cannot be had.
        """

    def open_remote_link(
        self,
        geometry: WindowGeometry,  # noqa: ARG002
        epoch: int,  # noqa: ARG002
        expert_counts: list[int],  # noqa: ARG002
    ) -> tuple[int, WindowOffer]:
        """``open_link`` for a peer on another host. Raises HandshakeRefused where there is no such."""
        raise HandshakeRefused(f"transport {self.transport} reaches one host only")

    def accept_reply(self, link: int, combine: DeviceMemory) -> None:  # noqa: ARG002
        """The peer's own windows, before ``activate_link``; transports that have none refuse them. May block."""
        raise HandshakeRefused(f"transport {self.transport} takes no windows from Attention")

    def rank_loaded(self, attention_rank: int) -> None:  # noqa: B027
        """An A rank is ready to pair; only where the backend pairs. Any thread; never blocks."""

    def rank_detached(self, attention_rank: int) -> bool:  # noqa: ARG002
        """An A rank has detached in order; whether it stays attached all the same, until F ends the session."""
        return False

    def rank_left(self, attention_rank: int, reason: str, *, orderly: bool) -> None:  # noqa: B027
        """An attachment has ended, for whatever reason. Any thread; never blocks."""

    @abstractmethod
    def activate_link(self, link: int) -> None:
        """The peer has mapped the windows: from now on its posts are received. May block for some milliseconds."""

    @abstractmethod
    def close_link(self, link: int) -> None:
        """Forget a link and free its windows; an item of it in flight ends first, silently. Idempotent."""

    @abstractmethod
    def receive(self, timeout_s: float) -> Item | None:
        """Wait for an item; None after ``timeout_s``, on a signal, or when cancelled. Releases the GIL."""

    @abstractmethod
    def cancel_receive(self) -> None:
        """Make a pending or the next ``receive`` return None at once. Any thread; never blocks."""

    @abstractmethod
    def take_faults(self) -> list[tuple[int, str]]:
        """Links that broke the protocol since the last call, each with the reason; their sessions have to end."""

    @abstractmethod
    def statistics(self) -> dict[str, float]:
        """Counters kept by the step itself; safe and cheap from any thread.

        Keys: steps, posts, splits (items that were not a post's last part), rows (totals), idle_s (since the last step
        ended), item_s (age of the item in flight, 0 when there is none). Where it is measured: wait_s, compute_s,
        post_s (totals); where there are graphs: captures, replays.
        """

    def step_seconds(self) -> dict[str, Distribution]:
        """Seconds of steps in parts: wait (since the step before), compute, send. {} where they are not measured."""
        return {}

    def posts_per_item(self) -> Distribution | None:
        """How many posts, or parts of them, an item held."""
        return None

    def expert_rows(self) -> list[list[int]] | None:
        """Rows computed by layer and local expert; [] before the first session, None where they are not counted."""
        return None

    can_record = False
    """Whether times of single steps can be kept: ``record``, ``recorded`` and ``take_spans`` work."""
    times_elsewhere = "/metrics has its totals"
    """What somebody is told who asks for times of single steps where none are kept."""

    def record(self, steps: int) -> None:
        """Keep times of the next ``steps`` items (1 to spans.MOST). Any thread, as all here; never waits for a step.

        Where a device keeps them it is asked for them: ResourceError when it does not answer.
        """
        raise NotImplementedError

    def recorded(self) -> int:
        """How many are kept so far."""
        raise NotImplementedError

    def take_spans(self) -> list[StepSpan]:
        """Stop keeping, and hand out what was."""
        raise NotImplementedError

    @property
    def clock_error_ns(self) -> int:
        """How far the spans taken last may be off CLOCK_MONOTONIC; 0 where that clock itself was read."""
        return 0

    @abstractmethod
    def close(self) -> None:
        """Free everything. Idempotent."""
