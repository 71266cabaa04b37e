"""The session of one A rank with F: attached once, held while F is away, attached again. No vLLM imports."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol, cast, runtime_checkable

from ffn_faas.attention.attempt import LAYERS_TIMEOUT_S, Attempt, Client, DataPlane
from ffn_faas.attention.link import RETRY_S, FLink
from ffn_faas.connectors.base import WindowGeometry
from ffn_faas.credentials import NOTHING, Credentials
from ffn_faas.errors import FfnError, HandshakeRefused, ResourceError, SessionLost, UsageError
from ffn_faas.protocol.messages import Attach, Granted, Profile, Profiled, Times
from ffn_faas.telemetry.spans import clock_offset_ns

WATCH_EVERY_S = 0.25


class HoldingClient(Client, Protocol):
    """A client whose calls can wait while F is away; DataPlane.can_hold says that this is one."""

    def hold(self) -> None:
        """Calls wait until ``resume`` or ``fail``."""

    def resume(self, arenas: list[Any], layers: list[int]) -> None:
        """New windows by F rank; posts without an answer are sent again."""

    def longest_wait(self) -> tuple[float, int]:
        """Seconds that a call has been waiting for an answer, and the F rank it waits for."""


class PairingClient(Client, Protocol):
    """A client that starts together with F; DataPlane.pairs says that this is one."""

    def meet(self, host: str, port: int, interrupt: Callable[[], None]) -> None:
        """Block until A and F have started together over the store at ``host``."""

    def farewell(self) -> None:
        """The last exchange, which lets F's pending receive end."""


@runtime_checkable
class RecordingClient(Protocol):
    """A client that can keep times of single posts. Both raise ResourceError where a device does not answer."""

    def record(self, limit: int) -> None:
        """Keep those of the next ``limit`` posts."""

    def take_spans(self) -> list[Times]:
        """What was kept: the fields of ``telemetry.spans.PostSpan``."""


@dataclass(frozen=True)
class LossPolicy:
    """What to do when F is away; connector_extra_config has the keys."""

    reattach_timeout_s: float = 0.0
    """How long to wait for F to come back; 0: fail at once."""
    answer_timeout_s: float = 60.0
    """A post without an answer for so long means that F is away."""


class AttentionSession:
    """attach -> declare_layers -> wait_ready -> (ops run) -> close; each call blocks and raises FfnError.

    F is away when a socket closes, when it says that it stops, or when an answer is overdue. Then every op waits, or
    with ``reattach_timeout_s`` 0 raises at once. A thread attaches to all F ranks again; on success pending posts are
    sent again and the ops go on. When that takes too long, or F refuses, every op raises the reason.
    """

    def __init__(
        self,
        address: str,
        attach: Attach,
        data_plane: DataPlane,
        log: logging.Logger,
        policy: LossPolicy | None = None,
    ) -> None:
        self.client: Client | None = None
        self.reattached = 0
        self._address = address
        self._attach = attach
        self._data_plane = data_plane
        self._log = log
        self._policy = policy or LossPolicy()
        if self._policy.reattach_timeout_s and not data_plane.can_hold:
            raise UsageError(
                f"connector_extra_config.reattach_timeout_s is {self._policy.reattach_timeout_s:g}, but transport "
                f"{attach.transport} cannot wait for F to come back",
                remedy="leave it out",
            )
        self._changed = threading.Condition()
        self._attempt = Attempt(address, attach, data_plane, log, self._over, self._profile)
        self._credentials = NOTHING
        self._grants: list[Granted] = []
        self._names: list[str] = []
        self._geometry: WindowGeometry | None = None
        self._established = False
        self._lost: FfnError | None = None
        self._failed = False
        self._closing = False

    @property
    def links(self) -> list[FLink]:
        return self._attempt.links

    def attach(self, timeout_s: float, credentials: Credentials = NOTHING) -> None:
        """Attach to every F rank; ``timeout_s`` bounds the wait for all of them together."""
        self._credentials = credentials
        self._grants = self._attempt.open(timeout_s, credentials)
        first, plane = self._grants[0], self._data_plane
        geometry = WindowGeometry(
            self._attach.stages, first.capacity, plane.hidden_size, plane.top_k, plane.element_size
        )
        client = plane.make_client(geometry, self._grants)
        with self._changed:
            self._geometry, self.client = geometry, client
        self._attempt.use(geometry, client.set_link)
        self._log.info(
            "Attached to %d F rank(s): instance %s, session %s, capacity %d rows, experts %s",
            len(self._grants),
            self._attach.instance[:12],
            first.session,
            first.capacity,
            "+".join(map(str, first.expert_counts)),
        )

    def declare_layers(self, names: list[str]) -> None:
        """Tell F which layers this rank built; handle i of the ops stands for ``names[i]`` from now on."""
        indices = self._attempt.declare_layers(names)
        self._names = list(names)
        if self.client is not None:
            self.client.set_layers(indices)

    def wait_ready(self, patience_s: float) -> None:
        """Block until every F rank is READY and its windows are mapped; a log line every 5 s names F's phase.

        Gives up only when no F rank made any progress for ``patience_s`` seconds.
        """
        if self._data_plane.pairs:
            client = cast(PairingClient, self.client)
            self._attempt.when_all_ended(client.farewell)
            self._attempt.pair(patience_s, client.meet)
            self._log.info("Paired with F: %s", client)
        self._attempt.wait_ready(patience_s)
        with self._changed:
            if self._attempt.failure is not None:
                raise self._attempt.failure
            self._established = True
        if self._data_plane.can_hold:
            threading.Thread(target=self._watch_to_the_end, name="ffn_faas-watch", daemon=True).start()

    def close(self) -> None:
        """Detach and close the sockets. Idempotent; blocks for about a second at most."""
        with self._changed:
            if self._closing:
                return
            parting = self._data_plane.pairs and self._established and not self._failed
            self._closing = True
            self._changed.notify_all()
        if parting:
            self._attempt.part(cast(PairingClient, self.client).farewell)
        self._attempt.close()
        if self.client is not None:
            self.client.fail("this Attention has detached from F")

    @property
    def _is_done(self) -> bool:
        return self._closing or self._failed

    def _over(self, attempt: Attempt, error: FfnError, final: bool) -> None:
        """The attachment is over: hold, or fail for good."""
        with self._changed:
            if self._is_done or attempt is not self._attempt or self._lost is not None:
                return
            self._lost = error
            if self._established and self._policy.reattach_timeout_s and not final:
                cast(HoldingClient, self.client).hold()
            else:
                self._fail(error)
            self._changed.notify_all()

    def _profile(self, link: FLink, message: Profile) -> None:
        """F asks for times of posts: keep the next ones, or send what was kept."""
        client, spans = self.client, list[Times]()
        try:
            if message.posts and isinstance(client, RecordingClient):
                client.record(message.posts)
            elif isinstance(client, RecordingClient):
                spans = client.take_spans()
        except ResourceError as error:
            self._log.warning("Times of posts are not to be had: %s", error)
        if message.posts:
            return
        with suppress(SessionLost):
            link.send(Profiled(clock_offset_ns=clock_offset_ns(), spans=spans))

    def _fail(self, error: FfnError) -> None:
        """With the condition held."""
        self._failed = True
        self._log.error("ffn_faas session ended: %s", error)
        if self.client is not None:
            self.client.fail(str(error))

    def _watch_to_the_end(self) -> None:
        """Thread: whatever ends the watch, no op waits for ever."""
        try:
            self._watch()
        finally:
            with self._changed:
                if not self._is_done:
                    self._fail(SessionLost("the thread that attaches to F again has failed", remedy="see the log"))

    def _watch(self) -> None:
        """Look after overdue answers, attach again when F is lost."""
        client = cast(HoldingClient, self.client)
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._is_done or self._lost is not None, WATCH_EVERY_S)
                lost, attempt = self._lost, self._attempt
                if self._is_done:
                    return
            if lost is not None:
                self._come_back(lost)
                continue
            broken = attempt.broken_windows()
            if broken is not None:
                self._over(attempt, SessionLost(broken), final=False)
                continue
            seconds, rank = client.longest_wait()
            if seconds > self._policy.answer_timeout_s:
                text = f"{attempt.links[rank]} has not answered a post for {seconds:.0f} s (answer_timeout_s)"
                self._over(attempt, SessionLost(text), final=False)

    def _come_back(self, lost: FfnError) -> None:
        timeout_s = self._policy.reattach_timeout_s
        started = time.monotonic()
        self._log.warning("%s; requests wait while this Attention attaches again, for up to %g s", lost, timeout_s)
        self._attempt.close(returning=True)
        why: FfnError = lost
        while (left := started + timeout_s - time.monotonic()) > 0 and not self._is_done:
            attempt = self._next_attempt()
            try:
                self._attach_again(attempt, left)
            except HandshakeRefused as error:
                attempt.close()
                why = error
                break
            except FfnError as error:
                attempt.close(returning=True)
                why = error
                time.sleep(min(RETRY_S, max(0.0, started + timeout_s - time.monotonic())))
            else:
                seconds = time.monotonic() - started
                self._log.warning("F is back after %.1f s; this Attention goes on (%s)", seconds, lost)
                return
        with self._changed:
            if self._is_done:
                return
            if isinstance(why, HandshakeRefused):
                self._fail(HandshakeRefused(f"attaching again after a loss ({lost}): {why}"))
            else:
                text = f"F did not come back within {timeout_s:g} s (reattach_timeout_s); lost: {lost}; last: {why}"
                self._fail(SessionLost(text, remedy="start F, then this Attention"))

    def _next_attempt(self) -> Attempt:
        self._attach = self._attach.model_copy(
            update={
                "attempt": self._attach.attempt + 1,
                "capacity": self._grants[0].capacity,
                "capacity_is_required": True,
            }
        )
        return Attempt(self._address, self._attach, self._data_plane, self._log, self._over, self._profile)

    def _attach_again(self, attempt: Attempt, left: float) -> None:
        deadline = time.monotonic() + left
        grants = attempt.open(left, self._credentials)
        now, before = grants[0].expert_counts, self._grants[0].expert_counts
        if now != before:
            raise HandshakeRefused(
                f"experts per F rank: F has {now} now, it had {before}", remedy="start F with as many ranks as before"
            )
        if self._geometry is not None:
            attempt.use(self._geometry)
        layers = attempt.declare_layers(self._names, min(LAYERS_TIMEOUT_S, max(0.0, deadline - time.monotonic())))
        rest = max(0.0, deadline - time.monotonic())
        attempt.wait_ready(rest, rest)
        with self._changed:
            if attempt.failure is not None:
                raise attempt.failure
            if self._is_done:
                raise SessionLost("this Attention is closing")
            cast(HoldingClient, self.client).resume([attempt.arenas[rank] for rank in range(len(grants))], layers)
            self._attempt, self._lost = attempt, None
            self.reattached += 1
