"""GPU memory shared by CUDA IPC, A's side: the client that an AttentionSession drives."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ffn_faas.connectors.m2n import open_memory
from ffn_faas.connectors.m2n_attention import M2nAttention
from ffn_faas.connectors.m2n_window import addresses, combine_layout, dispatch_layout
from ffn_faas.errors import HandshakeRefused
from ffn_faas.protocol.messages import DeviceMemory

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ffn_faas.connectors.base import WindowGeometry, WindowOffer
    from ffn_faas.connectors.m2n_library import Device, Library


@dataclass(frozen=True)
class MappedWindows:
    """Addresses on A's device, and what F needs to map its half."""

    dispatch_address: int
    combine_address: int
    combine: DeviceMemory
    epoch: int


class M2nClient:
    """Windows of every F rank of one session, and the ops over them. ``fetch`` and ``set_link``: any thread."""

    def __init__(
        self,
        library: Library,
        device: Device,
        geometry: WindowGeometry,
        expert_counts: Sequence[int],
        timeout_s: float = 0.0,
    ) -> None:
        self.reason = ""
        self.layers: list[int] = []
        self._library = library
        self._device = device
        self._geometry = geometry
        self._ranks = len(expert_counts)
        self._mapped: dict[int, MappedWindows] = {}
        library.call("use_device", device.index)
        self.attention = M2nAttention(library, geometry, expert_counts, timeout_s)

    def fetch(self, offer: WindowOffer, geometry: WindowGeometry, epoch: int, timeout: float) -> MappedWindows:  # noqa: ARG002
        """Map F's windows and make our own. Raises ResourceError, HandshakeRefused."""
        if offer.dispatch is None or offer.dispatch.nbytes < dispatch_layout(geometry).nbytes:
            raise HandshakeRefused(
                "F's windows are not as agreed", remedy="run the same version of ffn_faas on both sides"
            )
        self._library.call("use_device", self._device.index)
        dispatch = open_memory(self._library, offer.dispatch)
        nbytes = combine_layout(geometry).nbytes
        combine = self._library.allocate(nbytes)
        handle = self._library.export(combine).hex()
        memory = DeviceMemory(handle=handle, offset=0, nbytes=nbytes, device=self._device.uuid)
        return MappedWindows(dispatch, combine, memory, epoch)

    def set_layers(self, indices: list[int]) -> None:
        """F's layer number of each of our layers."""
        self.layers = indices

    def set_link(self, ffn_rank: int, arena: MappedWindows) -> None:
        """The windows of one F rank; with the last one the session begins."""
        for stage in range(self._geometry.stages):
            where = addresses(self._geometry, arena.dispatch_address, arena.combine_address, stage)
            self.attention.set_link(stage, ffn_rank, where)
        self._mapped[ffn_rank] = arena
        if len(self._mapped) == self._ranks:
            self.attention.begin(arena.epoch)

    def fail(self, reason: str) -> None:
        """Pending and later waits end; results of theirs are NaN, and ``reason`` says why."""
        self.reason = self.reason or reason
        self.attention.stop()

    def close(self) -> None:
        """Unmap and free; nothing may be in flight, and F has detached us."""
        self.attention.close()
        while self._mapped:
            _, arena = self._mapped.popitem()
            self._library.call("close", arena.dispatch_address)
            self._library.call("free", arena.combine_address)
