"""Which Attention instances are attached to this F rank. State only: sockets live in http.attach."""

from __future__ import annotations

import secrets
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum

from ffn_faas.protocol.messages import Attach, Profile, Profiled


@dataclass(frozen=True)
class Limits:
    """What F grants over all sessions; None is no limit."""

    max_sessions: int | None = None
    window_memory: int | None = None
    """Bytes."""


NO_LIMITS = Limits()


class Cause(str, Enum):
    """Why an A rank's attachment ended; the label of a metric."""

    DETACHED = "detached"
    RETURNING = "returning"
    CONNECTION_LOST = "connection_lost"
    SIBLING_LOST = "sibling_lost"
    REPLACED = "replaced"
    PROTOCOL_BROKEN = "protocol_broken"
    F_STOPPED = "f_stopped"
    F_FAILED = "f_failed"

    @property
    def is_orderly(self) -> bool:
        """Whether the other ranks of the instance may stay attached."""
        return self in (Cause.DETACHED, Cause.RETURNING)


@dataclass(frozen=True)
class Ending:
    """How an attachment ends. ``final``: A is at fault, or has lost a rank; else F goes away and A may wait."""

    cause: Cause
    reason: str
    final: bool = True


@dataclass
class Link:
    """One A rank of a session on this F rank. ``window`` is the connector's key, None before the windows exist."""

    attention_rank: int
    peer: str
    close: Callable[[Ending], None]
    """End the attachment; any thread, never blocks."""
    window_bytes: int
    """Shared memory of this pair, counted from the grant on."""
    attempt: int = 0
    epoch: int = 0
    """Of this link's windows; set by ``SessionRegistry.join``, never used again."""
    window: int | None = None
    attached: bool = False
    ask: Callable[[Profile], None] = lambda message: None
    """Send a message to the A rank; any thread, never blocks."""
    profiled: Profiled | None = None
    """Its last answer."""


@dataclass
class Session:
    """The life of one attached Attention instance on this F rank."""

    id: str
    instance: str
    num_attention_ranks: int
    capacity: int
    stages: int
    links: dict[int, Link] = field(default_factory=dict)


class SessionRegistry:
    """Sessions by instance. Every method may be called from any thread."""

    def __init__(self, limits: Limits = NO_LIMITS, merge_bytes: int = 0) -> None:
        """``merge_bytes``: memory in which posts are merged, taken once there is more than one lane to merge."""
        self._limits = limits
        self._merge_bytes = merge_bytes
        self._merging = False
        self._lock = threading.Lock()
        self._sessions: dict[str, Session] = {}
        self._next_epoch = secrets.randbelow(1 << 16) + 1
        self.attached_total: Counter[str] = Counter(first=0, again=0)
        self.refused_total: Counter[str] = Counter()
        self.ended_total: Counter[str] = Counter({cause.value: 0 for cause in Cause})

    def snapshot(self) -> list[Session]:
        with self._lock:
            return list(self._sessions.values())

    @property
    def window_bytes(self) -> int:
        """Memory granted to windows of all sessions."""
        return sum(link.window_bytes for session in self.snapshot() for link in list(session.links.values()))

    @property
    def shared_bytes(self) -> int:
        """Memory for merging posts; it belongs to no session and stays once it was needed."""
        return self._merge_bytes if self._merging else 0

    def over_limit(self, attach: Attach, window_bytes: int) -> str | None:
        """Which limit another ``window_bytes`` for ``attach`` would break; None when it fits."""
        limits, sessions = self._limits, self.snapshot()
        known = any(session.instance == attach.instance for session in sessions)
        if limits.max_sessions is not None and not known and len(sessions) >= limits.max_sessions:
            return (
                f"sessions: {len(sessions)} Attention instances are attached, F serves at most {limits.max_sessions} "
                "(--max-sessions); raise it or detach one"
            )
        used = self.window_bytes - self._replaced_bytes(attach) + self.shared_bytes
        merging = self._merge_bytes if not self._merging and self._would_merge(attach) else 0
        if limits.window_memory is not None and used + window_bytes + merging > limits.window_memory:
            extra = f" and {merging} for merging its posts with those of others" if merging else ""
            return (
                f"window memory: this A rank needs {window_bytes} bytes{extra}, {used} of {limits.window_memory} "
                "(--window-memory) are granted; raise it, or attach with a smaller capacity"
            )
        return None

    def _would_merge(self, attach: Attach) -> bool:
        """Whether there are several lanes once ``attach`` is in."""
        others = sum(
            (session.instance, rank) != (attach.instance, attach.attention_rank)
            for session in self.snapshot()
            for rank in list(session.links)
        )
        return attach.stages > 1 or others > 0

    def _replaced_bytes(self, attach: Attach) -> int:
        with self._lock:
            session = self._sessions.get(attach.instance)
            stale = session.links.get(attach.attention_rank) if session is not None else None
            return stale.window_bytes if stale is not None else 0

    def conflict(self, attach: Attach) -> str | None:
        """Why ``attach`` contradicts what its instance already holds here; None when it does not."""
        with self._lock:
            session = self._sessions.get(attach.instance)
            if session is None:
                return None
            if session.num_attention_ranks != attach.num_attention_ranks:
                return (
                    f"instance {attach.instance} attached with {session.num_attention_ranks} A ranks, "
                    f"A rank {attach.attention_rank} says {attach.num_attention_ranks}"
                )
            if session.stages != attach.stages:
                return f"instance {attach.instance} attached with {session.stages} stages, now {attach.stages}"
            link = session.links.get(attach.attention_rank)
            if link is not None and link.attempt >= attach.attempt:
                return f"A rank {attach.attention_rank} of instance {attach.instance} is already attached"
            return None

    def join(self, attach: Attach, capacity: int, link: Link) -> Session:
        """Add an A rank to its instance's session, which the first one opens. ``conflict`` was None just before.

        What is left of an earlier attempt of the same rank is replaced and closed.
        """
        merging = self._would_merge(attach)
        with self._lock:
            self._merging = self._merging or merging
            session = self._sessions.get(attach.instance)
            if session is None:
                session = Session(
                    id=secrets.token_hex(6),
                    instance=attach.instance,
                    num_attention_ranks=attach.num_attention_ranks,
                    capacity=capacity,
                    stages=attach.stages,
                )
                self._sessions[attach.instance] = session
            link.epoch = self._next_epoch
            self._next_epoch = self._next_epoch % ((1 << 24) - 1) + 1
            stale = session.links.get(attach.attention_rank)
            session.links[attach.attention_rank] = link
        if stale is not None:
            stale.close(Ending(Cause.REPLACED, "this A rank has attached again", final=False))
        return session

    def leave(self, session: Session, link: Link, cause: Cause) -> list[Link]:
        """Take an A rank out; returns the links of its instance that have to end with it.

        Those are none when it left in order, or has attached again meanwhile. The session ends with its last link.
        """
        with self._lock:
            self.ended_total[cause.value] += 1
            if session.links.get(link.attention_rank) is not link:
                return []
            del session.links[link.attention_rank]
            if cause.is_orderly and session.links:
                return []
            others = list(session.links.values())
            if self._sessions.get(session.instance) is session:
                del self._sessions[session.instance]
            return others

    def attached(self, link: Link) -> None:
        """The windows of ``link`` are mapped: its posts are served from now on."""
        with self._lock:
            link.attached = True
            self.attached_total["again" if link.attempt else "first"] += 1

    def refused(self, why: str) -> None:
        """Count a refusal by a word that says why."""
        with self._lock:
            self.refused_total[why] += 1

    def end_window(self, window: int, reason: str) -> None:
        """End the session that ``window`` belongs to, if there still is one."""
        for session in self.snapshot():
            for link in list(session.links.values()):
                if link.window == window:
                    link.close(Ending(Cause.PROTOCOL_BROKEN, reason))

    def end_all(self, cause: Cause, reason: str, *, final: bool = False) -> None:
        """Tell every A rank that F goes away, ``final``: for good; the sockets' own handlers then leave."""
        for session in self.snapshot():
            for link in list(session.links.values()):
                link.close(Ending(cause, reason, final))

    def other_instance(self, attach: Attach) -> str | None:
        """An attached instance that ``attach`` is not of; None when there is none."""
        return next((s.instance for s in self.snapshot() if s.instance != attach.instance), None)
