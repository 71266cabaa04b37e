"""One attachment of an A rank to every F rank, from the first connect until any of them is lost. No vLLM imports."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

from ffn_faas.attention.link import LOG_EVERY_S, FLink
from ffn_faas.connectors.base import TCP, WindowGeometry, WindowOffer
from ffn_faas.credentials import Credentials
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
    Loaded,
    Profile,
    Refused,
    Windows,
    WindowsMapped,
)

LAYERS_TIMEOUT_S = 60.0
FAREWELL_S = 5.0
PAIRABLE = ("pairing", "capturing", "ready")
"""Phases of F in which this Attention may pair with it."""


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
    can_hold: bool = False
    """Whether the client is a ``session.HoldingClient``."""
    pairs: bool = False
    """Whether the client is a ``session.PairingClient``."""


class Attempt:
    """open -> use -> declare_layers -> wait_ready; each blocks and raises FfnError. ``failure`` is the first one.

    ``on_over`` (any thread, no lock held) hears of the end of this attachment once, and whether it is final: F has
    refused us or ended our session for good, so that attaching again is of no use. ``on_profile`` (reader thread)
    answers an F rank that asks for times of posts.
    """

    def __init__(
        self,
        address: str,
        attach: Attach,
        data_plane: DataPlane,
        log: logging.Logger,
        on_over: Callable[[Attempt, FfnError, bool], None],
        on_profile: Callable[[FLink, Profile], None] = lambda link, message: None,
    ) -> None:
        self.links: list[FLink] = []
        self.arenas: dict[int, Any] = {}
        self.failure: FfnError | None = None
        self._address = address
        self._attach = attach
        self._data_plane = data_plane
        self._log = log
        self._on_over = on_over
        self._on_profile = on_profile
        self._changed = threading.Condition()
        self._layers: dict[int, list[int]] = {}
        self._attached: set[int] = set()
        self._closing = self._parting = False
        self._ended: set[int] = set()
        self._geometry: WindowGeometry | None = None
        self._on_all_ended: Callable[[], None] | None = None
        self._on_arena: Callable[[int, Any], None] = lambda rank, arena: None

    def open(self, timeout_s: float, credentials: Credentials) -> list[Granted]:
        """Attach to every F rank; F rank 0 names the others. ``timeout_s`` bounds the wait for all of them together."""
        deadline = time.monotonic() + timeout_s
        first = self._open(0, self._address, timeout_s, credentials)
        others = range(1, first.num_ffn_ranks)
        left = (deadline - time.monotonic() for _ in others)
        grants = [first, *(self._open(r, first.addresses[r], next(left), credentials) for r in others)]
        if len({grant.capacity for grant in grants}) > 1:
            raise HandshakeRefused(
                f"F ranks grant different capacities: {', '.join(str(grant.capacity) for grant in grants)}",
                remedy="start every F rank with the same --max-num-batched-tokens",
            )
        return grants

    def use(self, geometry: WindowGeometry, on_arena: Callable[[int, Any], None] | None = None) -> None:
        """From now on windows are mapped; ``on_arena`` gets (F rank, windows) before F hears that they are."""
        with self._changed:
            self._raise_if_failed()
            self._geometry = geometry
            self._on_arena = on_arena or self._on_arena
            self._changed.notify_all()

    def when_all_ended(self, call: Callable[[], None]) -> None:
        """``call`` (any thread) once every F rank has ended the session because it goes away."""
        self._on_all_ended = call

    def declare_layers(self, names: list[str], timeout_s: float = LAYERS_TIMEOUT_S) -> list[int]:
        """Tell F which layers this rank built; returns F's numbers of them."""
        for link in self.links:
            link.send(Layers(names=names))
        answered = f"the answer to {len(names)} layer names"
        self._wait(lambda: len(self._layers) == len(self.links), lambda: answered, timeout_s)
        indices = self._layers[0]
        for rank, theirs in self._layers.items():
            if theirs != indices or len(theirs) != len(names):
                raise HandshakeRefused(f"F rank {rank} numbers the layers as {theirs}, F rank 0 as {indices}")
        return indices

    def wait_ready(self, patience_s: float, limit_s: float | None = None) -> None:
        """Block until every F rank is READY and its windows are mapped; a log line every 5 s names F's phase.

        Gives up when no F rank made any progress for ``patience_s`` seconds, and in any case after ``limit_s``.
        """
        self._wait(lambda: len(self._attached) == len(self.links), self._standing, patience_s, limit_s)

    def pair(self, patience_s: float, meet: Callable[[str, int, Callable[[], None]], None]) -> None:
        """Once every F rank is loaded, start together with it: ``meet(host, port, interrupt)`` blocks for that.

        Gives up like ``wait_ready``.
        """
        self._wait(lambda: all(link.phase in PAIRABLE for link in self.links), self._standing, patience_s)
        for link in self.links:
            link.send(Loaded())
        first = self.links[0]
        if first.granted is None:
            raise SessionLost(f"{first} has granted nothing")
        meet(first.peer_host, first.granted.rendezvous_port, self._raise_if_failed)

    def part(self, farewell: Callable[[], None]) -> None:
        """Detach from an F that this Attention has paired with: once all of F ends the session, say ``farewell``."""
        for link in self.links:
            with suppress(SessionLost):
                link.send(Detach())
        with self._changed:
            self._parting = True
            ended = self._changed.wait_for(lambda: len(self._ended) == len(self.links), FAREWELL_S)
        if ended:
            farewell()

    def broken_windows(self) -> str | None:
        """Which F rank's windows can no longer be reached, and why; None while all can."""
        for rank, arena in list(self.arenas.items()):
            if failure := getattr(arena, "failure", ""):
                return f"the windows of {self.links[rank]} are lost: {failure}"
        return None

    def close(self, *, returning: bool = False) -> None:
        """Detach and close the sockets. Idempotent; blocks for about a second at most."""
        with self._changed:
            if self._closing:
                return
            self._closing = True
            self._changed.notify_all()
        for link in self.links:
            with suppress(SessionLost):
                link.send(Detach(returning=returning))
        for link in self.links:
            link.close()

    def _open(self, rank: int, address: str, timeout_s: float, credentials: Credentials) -> Granted:
        link = FLink(rank, address, self._log)
        granted = link.attach(self._attach, credentials, timeout_s)
        self.links.append(link)
        link.read(self._on_message, self._on_close)
        return granted

    def _wait(
        self, done: Callable[[], bool], what: Callable[[], str], patience_s: float, limit_s: float | None = None
    ) -> None:
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
                if limit_s is not None and now - started > limit_s:
                    raise SessionLost(f"A rank {self._attach.attention_rank} waited {limit_s:g} s for {what()}")
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
        if self.failure is not None:
            raise self.failure

    def _on_message(self, link: FLink, message: AnyMessage) -> None:
        if isinstance(message, Windows):
            self._map(link, message)
        elif isinstance(message, LayersAccepted):
            with self._changed:
                self._layers[link.rank] = message.indices
                self._changed.notify_all()
        elif isinstance(message, Attached):
            with self._changed:
                self._attached.add(link.rank)
                self._changed.notify_all()
        elif isinstance(message, Profile):
            self._on_profile(link, message)
        elif isinstance(message, Refused):
            error = HandshakeRefused(f"{link} refused this Attention rank: {message.reason}")
            self._over(error, final=message.final)
        elif isinstance(message, Ended):
            with self._changed:
                self._ended.add(link.rank)
                all_ended = not message.final and len(self._ended) == len(self.links)
                self._changed.notify_all()
            self._over(SessionLost(f"{link} ended the session: {message.reason}"), final=message.final)
            if all_ended and self._on_all_ended is not None and not self._parting:
                threading.Thread(target=self._on_all_ended, name="ffn_faas-farewell", daemon=True).start()
        else:
            self._over(SessionLost(f"{link} sent an unexpected {message.type!r}"), final=True)

    def _map(self, link: FLink, message: Windows) -> None:
        with self._changed:
            while self._geometry is None and self.failure is None and not self._closing:
                self._changed.wait(timeout=0.2)
            geometry = self._geometry
        if geometry is None or link.granted is None:
            return
        broker = message.broker
        if broker.startswith(TCP):
            broker = f"{TCP}{link.peer_host}:{broker.removeprefix(TCP)}"
        offer = WindowOffer(broker, message.ticket, message.nbytes, message.dispatch)
        try:
            arena = self._data_plane.fetch_windows(offer, geometry, link.granted.epoch, 10.0)
            self.arenas[link.rank] = arena
            self._on_arena(link.rank, arena)
            link.send(WindowsMapped(combine=getattr(arena, "combine", None)))
        except (FfnError, OSError) as error:
            self._over(SessionLost(f"the windows of {link} cannot be mapped: {error}"), final=False)

    def _on_close(self, link: FLink, reason: str) -> None:
        self._over(SessionLost(f"{link} is lost: {reason}"), final=False)

    def _over(self, error: FfnError, *, final: bool) -> None:
        with self._changed:
            if self.failure is not None or self._closing:
                return
            self.failure = error
            self._changed.notify_all()
        self._on_over(self, error, final)
