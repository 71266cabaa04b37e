"""The session of one A rank with every F rank: attach, layers, windows, end. No vLLM imports."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

from ffn_faas.attention.link import LOG_EVERY_S, FLink
from ffn_faas.connectors.base import WindowGeometry, WindowOffer
from ffn_faas.errors import FfnError, HandshakeRefused, SessionLost
from ffn_faas.protocol.messages import (
    AnyMessage,
    Attach,
    Attached,
    Detach,
    Ended,
    Granted,
    Layers,
    LayersAccepted,
    Refused,
    Windows,
    WindowsMapped,
)

LAYERS_TIMEOUT_S = 60.0


class Client(Protocol):
    """The data plane of an A rank: ``ffn_faas._native.AttentionClient``."""

    def set_layers(self, indices: list[int]) -> None:
        """F's layer number of each layer handle."""

    def set_link(self, ffn_rank: int, arena: Any) -> None:
        """The mapped windows of one F rank."""

    def fail(self, reason: str) -> None:
        """Make every pending and later op raise with ``reason``."""


@dataclass(frozen=True)
class DataPlane:
    """How the session makes its client and maps windows; a seam for tests and other transports."""

    make_client: Callable[[WindowGeometry, list[Granted]], Client]
    fetch_windows: Callable[[WindowOffer, WindowGeometry, int, float], Any]
    """(offer, geometry, epoch, timeout in seconds) -> arena."""
    hidden_size: int
    top_k: int
    element_size: int


class AttentionSession:
    """attach -> declare_layers -> wait_ready -> (ops run) -> close; each call blocks and raises FfnError.

    F is dead when a socket closes: then ``client.fail`` is called from the reader thread, within a second on one
    host, and every op raises. Attaching again after that is for a later version: the seam is a new session object,
    whose client replaces the bound one.
    """

    def __init__(self, address: str, attach: Attach, data_plane: DataPlane, log: logging.Logger) -> None:
        self.client: Client | None = None
        self.links: list[FLink] = []
        self._address = address
        self._attach = attach
        self._data_plane = data_plane
        self._log = log
        self._changed = threading.Condition()
        self._layers: dict[int, list[int]] = {}
        self._attached: set[int] = set()
        self._failure: FfnError | None = None
        self._closing = False
        self._geometry: WindowGeometry | None = None

    def attach(self, timeout_s: float, token: str | None = None) -> None:
        """Attach to every F rank; F rank 0 names the others. ``timeout_s`` bounds the wait for all of them together."""
        deadline = time.monotonic() + timeout_s
        self._open(0, self._address, timeout_s, token)
        first = self._granted()[0]
        for rank in range(1, first.num_ffn_ranks):
            self._open(rank, first.addresses[rank], deadline - time.monotonic(), token)
        grants = self._granted()
        capacities = {grant.capacity for grant in grants}
        if len(capacities) > 1:
            raise HandshakeRefused(
                f"F ranks grant different capacities: {', '.join(str(grant.capacity) for grant in grants)}",
                remedy="start every F rank with the same --max-num-batched-tokens",
            )
        plane = self._data_plane
        geometry = WindowGeometry(
            self._attach.stages, first.capacity, plane.hidden_size, plane.top_k, plane.element_size
        )
        with self._changed:
            self._raise_if_failed()
            self._geometry = geometry
            self.client = plane.make_client(geometry, grants)
            self._changed.notify_all()
        self._log.info(
            "Attached to %d F rank(s): session %s, capacity %d rows, experts %s",
            len(grants),
            first.session,
            first.capacity,
            "+".join(map(str, first.expert_counts)),
        )

    def declare_layers(self, names: list[str]) -> None:
        """Tell F which layers this rank built; handle i of the ops stands for ``names[i]`` from now on."""
        for link in self.links:
            link.send(Layers(names=names))
        self._wait(
            lambda: len(self._layers) == len(self.links),
            lambda: f"the answer to {len(names)} layer names",
            LAYERS_TIMEOUT_S,
        )
        indices = self._layers[0]
        for rank, theirs in self._layers.items():
            if theirs != indices or len(theirs) != len(names):
                raise HandshakeRefused(f"F rank {rank} numbers the layers as {theirs}, F rank 0 as {indices}")
        if self.client is not None:
            self.client.set_layers(indices)

    def wait_ready(self, patience_s: float) -> None:
        """Block until every F rank is READY and its windows are mapped; a log line every 5 s names F's phase.

        Gives up only when no F rank made any progress for ``patience_s`` seconds.
        """
        self._wait(lambda: len(self._attached) == len(self.links), self._standing, patience_s)

    def close(self) -> None:
        """Detach and close the sockets. Idempotent; blocks for about a second at most."""
        with self._changed:
            if self._closing:
                return
            self._closing = True
        for link in self.links:
            with suppress(SessionLost):
                link.send(Detach())
            link.close()
        if self.client is not None:
            self.client.fail("this Attention has detached from F")

    def _open(self, rank: int, address: str, timeout_s: float, token: str | None) -> None:
        link = FLink(rank, address, self._log)
        link.attach(self._attach, token, timeout_s)
        self.links.append(link)
        link.read(self._on_message, self._on_close)

    def _granted(self) -> list[Granted]:
        return [link.granted for link in self.links if link.granted is not None]

    def _wait(self, done: Callable[[], bool], what: Callable[[], str], patience_s: float) -> None:
        started = time.monotonic()
        next_log = started + LOG_EVERY_S
        standing, moved = self._standing(), started
        with self._changed:
            while not done():
                self._raise_if_failed()
                self._changed.wait(timeout=0.2)
                now = time.monotonic()
                if self._standing() != standing:
                    standing, moved = self._standing(), now
                if now - moved > patience_s:
                    raise SessionLost(
                        f"A rank {self._attach.attention_rank} waited {patience_s:g} s without any progress for "
                        f"{what()}"
                    )
                if now >= next_log:
                    self._log.info("Waiting for %s (%.0f s)", what(), now - started)
                    next_log = now + LOG_EVERY_S
            self._raise_if_failed()

    def _standing(self) -> str:
        return ", ".join(
            f"{link}: " + ("attached" if link.rank in self._attached else f"{link.phase} {link.progress:.0%}")
            for link in self.links
        )

    def _raise_if_failed(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _on_message(self, link: FLink, message: AnyMessage) -> None:
        if isinstance(message, Windows):
            self._map(link, message)
            return
        with self._changed:
            if isinstance(message, LayersAccepted):
                self._layers[link.rank] = message.indices
            elif isinstance(message, Attached):
                self._attached.add(link.rank)
            elif isinstance(message, Refused):
                self._fail(HandshakeRefused(f"{link} refused this Attention rank: {message.reason}"))
            elif isinstance(message, Ended):
                self._fail(SessionLost(f"{link} ended the session: {message.reason}"))
            else:
                self._fail(SessionLost(f"{link} sent an unexpected {message.type!r}"))
            self._changed.notify_all()

    def _map(self, link: FLink, message: Windows) -> None:
        with self._changed:
            while self._geometry is None and self._failure is None and not self._closing:
                self._changed.wait(timeout=0.2)
            client, geometry = self.client, self._geometry
        if client is None or geometry is None or link.granted is None:
            return
        offer = WindowOffer(message.broker, message.ticket, message.nbytes, message.dispatch)
        try:
            arena = self._data_plane.fetch_windows(offer, geometry, link.granted.epoch, 10.0)
            client.set_link(link.rank, arena)
            link.send(WindowsMapped(combine=getattr(arena, "combine", None)))
        except (FfnError, OSError) as error:
            with self._changed:
                self._fail(SessionLost(f"the windows of {link} cannot be mapped: {error}"))

    def _on_close(self, link: FLink, reason: str) -> None:
        with self._changed:
            self._fail(SessionLost(f"{link} is lost: {reason}"))

    def _fail(self, error: FfnError) -> None:
        """The first failure wins; called with the condition held."""
        if self._failure is not None or self._closing:
            return
        self._failure = error
        self._log.error("ffn_faas session ended: %s", error)
        if self.client is not None:
            self.client.fail(str(error))
        self._changed.notify_all()
