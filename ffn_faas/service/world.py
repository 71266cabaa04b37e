"""The F world as one rank sees it: who has joined, which phase each is in, and one stop for all.

F rank 0 is the hub: every other rank holds a WebSocket to it (http.world serves them). Its loss, either way, ends
the whole world. No joint process group and no rendezvous store is involved, so that torchrun's own store settings
do not matter here.
"""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable

from ffn_faas.config import ServeConfig
from ffn_faas.errors import LaunchDisagreement, WorldLost
from ffn_faas.protocol.messages import (
    Message,
    WorldDrained,
    WorldJoin,
    WorldPhase,
    WorldPhases,
    WorldStop,
    WorldWelcome,
)
from ffn_faas.service.lifecycle import Lifecycle, Phase
from ffn_faas.service.stop import StopRequest

Send = Callable[[Message], None]


class WorldView(ABC):
    """Common to hub and members. ``phases`` and ``addresses`` are in rank order."""

    def __init__(self, config: ServeConfig, lifecycle: Lifecycle, stop: StopRequest) -> None:
        self.config = config
        self.stop = stop
        self.lifecycle = lifecycle
        self.phases = [Phase.STARTING.value] * config.world.size
        self.addresses = [""] * config.world.size
        self.formed = threading.Event()
        self.all_drained = threading.Event()
        """No rank that still stops has a post in flight: sessions may end, for their posts have all been answered."""
        self.rendezvous_port = 0
        """Of the store on F rank 0 over which backends pair; 0 where none does."""
        lifecycle.on_change(self._own_phase_changed)
        stop.on_request(self._tell_stop)

    def form(self) -> None:
        """Block until every F rank has joined. Raises LaunchDisagreement, WorldLost or what stop asks for."""
        deadline = self.config.world_timeout_s
        waited = 0.0
        while not self.formed.wait(0.1):
            self.stop.raise_if_requested()
            waited += 0.1
            if waited >= deadline:
                raise LaunchDisagreement(self._absent(deadline), remedy="start all ranks of the world, or fewer ranks")

    def node_is_ready(self) -> bool:
        """Whether every F rank of this node can serve; what local rank 0's /ready answers."""
        if self.stop or self.lifecycle.phase is not Phase.READY:
            return False
        if self.config.world.local_rank:
            return True
        return all(self.phases[rank] == Phase.READY.value for rank in self.config.world.local_ranks)

    def _left_in_order(self, rank: int) -> bool:
        """Whether a rank whose connection has closed may have done so: the world stops, and it has finished."""
        return bool(self.stop) and self.phases[rank] == Phase.STOPPED.value

    def await_others(self, timeout_s: float) -> None:  # noqa: ARG002
        """The world stops and this rank has finished: F rank 0 waits for the others, so that it hears of a loss."""
        return

    @abstractmethod
    def drained(self) -> None:
        """The world stops and nothing is in flight on this rank: tell the others. Idempotent, never blocks."""

    @abstractmethod
    def close(self) -> None:
        """Leave the world. Idempotent."""

    @abstractmethod
    def _absent(self, seconds: float) -> str:
        """Who has not joined after ``seconds``."""

    @abstractmethod
    def _own_phase_changed(self) -> None:
        """Pass this rank's phase on."""

    @abstractmethod
    def _tell_stop(self) -> None:
        """Pass the stop on."""

    def _stop_message(self) -> WorldStop:
        return WorldStop(reason=self.stop.reason, lost=self.stop.error is not None)


class WorldHub(WorldView):
    """F rank 0."""

    def __init__(self, config: ServeConfig, lifecycle: Lifecycle, stop: StopRequest, own_address: str) -> None:
        self._lock = threading.Lock()
        self._phase_lock = threading.Lock()
        self._members: dict[int, Send] = {}
        self._closed = False
        self._drained: set[int] = set()
        super().__init__(config, lifecycle, stop)
        self.addresses[0] = own_address
        if config.world.size == 1:
            self.formed.set()

    def refusal(self, join: WorldJoin) -> LaunchDisagreement | None:
        """Why this rank cannot be part of the world; while that forms, the whole launch is then wrong."""
        ours = self.config.launch_settings()
        for name in sorted(ours.keys() | join.launch.keys()):
            if ours.get(name) != join.launch.get(name):
                return LaunchDisagreement(
                    f"{name}: F rank 0 has {ours.get(name)}, F rank {join.rank} has {join.launch.get(name)}",
                    remedy="start every F rank with the same command line",
                )
        if not 0 < join.rank < self.config.world.size:
            return LaunchDisagreement(f"F rank {join.rank} is not in a world of {self.config.world.size}")
        if join.rank in self._members:
            return LaunchDisagreement(f"two processes claim to be F rank {join.rank}")
        return None

    def join(self, join: WorldJoin, send: Send) -> None:
        """Take a rank in; ``send`` (any thread, never blocks) reaches it. Everyone is welcomed when all are here."""
        with self._lock:
            self._members[join.rank] = send
            self.addresses[join.rank] = join.address
            complete = len(self._members) == self.config.world.size - 1
        if complete:
            self._tell_all(WorldWelcome(addresses=self.addresses, rendezvous_port=self.rendezvous_port))
            self.formed.set()

    def heard(self, rank: int, message: WorldPhase | WorldStop | WorldDrained) -> None:
        """A member's phase, its wish to stop the world, or that it has drained."""
        if isinstance(message, WorldDrained):
            self._has_drained(rank)
        elif isinstance(message, WorldPhase):
            self.phases[rank] = message.phase
            if message.phase == Phase.FAILED.value:
                self.lost(rank, message.reason)
            self._tell_all(WorldPhases(phases=self.phases))
            if message.phase == Phase.STOPPED.value:
                self._has_drained(rank)  # one that stops before it was ready has nothing to drain
        elif message.lost:
            self.lost(rank, message.reason)
        else:
            self.stop.request(message.reason)

    def gone(self, rank: int) -> None:
        """A member's connection has closed."""
        if not self._closed and not self._left_in_order(rank):
            self.lost(rank, "its connection closed")

    def lost(self, rank: int, reason: str) -> None:
        """A member is gone, or has failed."""
        self._members.pop(rank, None)
        text = f"F rank {rank} ({self.addresses[rank]}) was lost: {reason}"
        self.stop.request(text, WorldLost(text, remedy="look at that rank's log; the launcher restarts the world"))

    def drained(self) -> None:
        self._has_drained(0)

    def _has_drained(self, rank: int) -> None:
        with self._lock:
            self._drained.add(rank)
            complete = self._drained >= {0, *self._members}
        if complete and not self.all_drained.is_set():
            self.all_drained.set()
            self._tell_all(WorldDrained())

    def await_others(self, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while self.stop.error is None and time.monotonic() < deadline:
            if all(self.phases[rank] == Phase.STOPPED.value for rank in list(self._members)):
                return
            time.sleep(0.02)

    def close(self) -> None:
        """The members' sockets end with the HTTP server."""
        self._closed = True

    def _absent(self, seconds: float) -> str:
        absent = [rank for rank in range(1, self.config.world.size) if rank not in self._members]
        return f"F ranks {absent} of {self.config.world.size} did not join F rank 0 within {seconds:.0f} s"

    def _own_phase_changed(self) -> None:
        with self._phase_lock:  # two threads may change the phase in a row: what is told last must be the latest
            self.phases[0] = self.lifecycle.phase.value
            self._tell_all(WorldPhases(phases=self.phases))

    def _tell_stop(self) -> None:
        self._tell_all(self._stop_message())

    def _tell_all(self, message: Message) -> None:
        with self._lock:
            sends = list(self._members.values())
        for send in sends:
            send(message)
