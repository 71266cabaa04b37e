"""GPU memory shared by CUDA IPC, A's side: the client that an AttentionSession drives."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ffn_faas.connectors.m2n import open_memory
from ffn_faas.connectors.m2n_attention import M2nAttention
from ffn_faas.connectors.m2n_window import addresses, combine_layout, dispatch_layout
from ffn_faas.errors import HandshakeRefused, SessionLost
from ffn_faas.protocol.messages import DeviceMemory

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ffn_faas.connectors.base import WindowGeometry, WindowOffer
    from ffn_faas.connectors.m2n_library import Device, Library
    from ffn_faas.protocol.messages import Times


@dataclass(frozen=True)
class MappedWindows:
    """Addresses on A's device, and what F needs to map its half."""

    dispatch_address: int
    combine_address: int
    combine: DeviceMemory
    epoch: int


class M2nClient:
    """Windows of every F rank of one session, and the ops over them.

    Any thread calls ``fetch``, ``set_link``, ``hold``, ``resume``, ``fail`` and ``longest_wait``, also while kernels
    of this client wait on the device: none of them waits for these. ``lethal``: a lost session ends the CUDA context
    of the process (M2nAttention.trap), else results of its waits are NaN.
    """

    def __init__(
        self,
        library: Library,
        device: Device,
        geometry: WindowGeometry,
        expert_counts: Sequence[int],
        timeout_s: float = 0.0,
        *,
        lethal: bool = False,
    ) -> None:
        self.reason = ""
        self.layers: list[int] = []
        self.geometry = geometry
        self._library = library
        self._device = device
        self._lethal = lethal
        self._ranks = len(expert_counts)
        self._mapped: dict[int, dict[int, MappedWindows]] = {0: {}}
        """By number of the session (0 is the first), then by F rank."""
        self._offered = 0
        self._overdue: tuple[int, float] = (0, 0.0)
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
        self._set_link(ffn_rank, arena, offered=False)
        first = self._mapped[0]
        first[ffn_rank] = arena
        if len(first) == self._ranks:
            self.attention.begin()

    def hold(self) -> None:
        """Waits go on until ``resume`` or ``fail``; nothing is to be done for that."""

    def resume(self, arenas: list[MappedWindows], layers: list[int]) -> None:
        """New windows by F rank: waits in flight and later ones go over to them, and send their post again.

        Captured graphs hold F's layer numbers: SessionLost when they are others now. Earlier windows stay until
        ``close``: freeing would wait for the kernels that wait, and an F that is late but not dead may still write.
        """
        if layers != self.layers:
            raise SessionLost(f"F numbers the layers as {layers} now, as {self.layers} before")
        self._library.call("use_device", self._device.index)
        self.attention.offer(0)
        for rank, arena in enumerate(arenas):
            self._set_link(rank, arena, offered=True)
        self._offered += 1
        self._mapped[self._offered] = dict(enumerate(arenas))
        self.attention.offer(self._offered)

    def longest_wait(self) -> tuple[float, int]:
        """Seconds that a wait has been in flight, and the F rank it waits for. Makes no call of CUDA."""
        now = time.monotonic()
        flag, rank = next(
            (seen for stage in range(self.geometry.stages) if (seen := self.attention.long_wait(stage))[0]), (0, 0)
        )
        if flag != self._overdue[0]:
            self._overdue = (flag, now)
        return (now - self._overdue[1] if flag else 0.0), rank

    def record(self, limit: int) -> None:
        """Times of the next ``limit`` posts are asked for. Raises ResourceError once the context has ended."""
        self._library.call("use_device", self._device.index)
        self.attention.times.record(limit)

    def take_spans(self) -> list[Times]:
        """Those of the posts answered since, on CLOCK_MONOTONIC."""
        self._library.call("use_device", self._device.index)
        return [*self.attention.times.take()]

    def fail(self, reason: str) -> None:
        """Pending and later waits end, and ``reason`` says why."""
        self.reason = self.reason or reason
        if self._lethal:
            self.attention.trap()
        else:
            self.attention.stop()

    def close(self) -> None:
        """Unmap and free; nothing may be in flight, and F has detached us."""
        self.attention.close()
        while self._mapped:
            for arena in self._mapped.popitem()[1].values():
                self._library.call("close", arena.dispatch_address)
                self._library.call("free", arena.combine_address)

    def _set_link(self, ffn_rank: int, arena: MappedWindows, *, offered: bool) -> None:
        for stage in range(self.geometry.stages):
            where = addresses(self.geometry, arena.dispatch_address, arena.combine_address, stage)
            self.attention.set_link(stage, ffn_rank, where, arena.epoch, offered=offered)
