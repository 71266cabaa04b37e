"""Captures times of the next steps of this F rank, and of the posts of the Attention ranks attached to it."""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from ffn_faas.connectors.base import FFNConnector
from ffn_faas.errors import ResourceError, UsageError
from ffn_faas.protocol.messages import Profile
from ffn_faas.service.sessions import Link, Session
from ffn_faas.service.state import ServiceState
from ffn_faas.telemetry import trace
from ffn_faas.telemetry.spans import PostSpan, clock_offset_ns
from ffn_faas.telemetry.trace import AProcess, FProcess, Trace

POLL_S = 0.02
ANSWER_S = 3.0
"""How long an A rank may take to send its spans; without them the trace has F's side only."""

log = logging.getLogger(__name__)


def capture(state: ServiceState, steps: int, over: Callable[[], bool], *, attention: bool) -> Trace:
    """The next ``steps`` steps, or as many as there were when ``over`` said so; ``attention``: posts as well.

    Blocks the calling thread, never the step. Raises ResourceError when another capture is under way or F is not
    ready, UsageError when its backend cannot.
    """
    connector = _connector(state)
    if not state.profiling.acquire(blocking=False):
        raise ResourceError("another profile is being captured", remedy="wait for its end")
    try:
        asked: dict[int, tuple[Session, Link]] = {}
        connector.record(steps)
        while connector.recorded() < steps and not over() and not state.stop:
            if attention:
                _ask_new_ones(state, asked, steps)
            time.sleep(POLL_S)
        own = connector.take_spans()
        answers = _answers(asked)
        world = state.config.world
        return trace.build([FProcess(world.rank, world.size, clock_offset_ns(), own)], answers)
    finally:
        state.profiling.release()


def _connector(state: ServiceState) -> FFNConnector:
    connector, backend = state.connector, state.config.backend
    if connector is None:
        raise ResourceError(f"F is {state.lifecycle.phase.value}", remedy="wait until it is ready")
    if not connector.can_record:
        raise UsageError(f"backend {backend} keeps no times of single steps", remedy="/metrics has its totals")
    return connector


def _ask_new_ones(state: ServiceState, asked: dict[int, tuple[Session, Link]], steps: int) -> None:
    """An A rank that attaches during the capture is recorded from then on."""
    for session in state.sessions.snapshot():
        for link in list(session.links.values()):
            if link.attached and link.epoch not in asked:
                asked[link.epoch] = session, link
                link.ask(Profile(posts=steps))


def _answers(asked: dict[int, tuple[Session, Link]]) -> list[AProcess]:
    for _, link in asked.values():
        link.profiled = None
        link.ask(Profile(posts=0))
    end = time.monotonic() + ANSWER_S
    while time.monotonic() < end and any(_is_owed(*one) for one in asked.values()):
        time.sleep(POLL_S)
    return [
        AProcess(
            session.instance,
            link.attention_rank,
            link.profiled.clock_offset_ns,
            [PostSpan(*times) for times in link.profiled.spans],
        )
        for session, link in sorted(asked.values(), key=lambda one: (one[0].instance, one[1].attention_rank))
        if link.profiled is not None and link.profiled.spans
    ]


def _is_owed(session: Session, link: Link) -> bool:
    return link.profiled is None and session.links.get(link.attention_rank) is link


@contextmanager
def first_steps_kept(state: ServiceState) -> Iterator[None]:
    """``--profile``: while the block runs, a thread writes the first steps to a file; at its end what there is by then.

    Leaving blocks for a second at most, three where an Attention that was asked does not answer. Raises ResourceError,
    and what ``capture`` does.
    """
    config = state.config
    if config.profile_dir is None:
        yield
        return
    _connector(state)
    target = Path(config.profile_dir) / f"ffn-rank-{config.world.rank}.trace.json"
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ResourceError(f"--profile {target.parent} cannot be made: {error.strerror}") from None
    over = threading.Event()

    def run() -> None:
        try:
            captured = capture(state, config.profile_steps, over.is_set, attention=config.world.rank == 0)
            write(target, captured)
        except ResourceError as error:
            log.error("%s", error)
            return
        log.info("the first %d steps are in %s", trace.steps(captured), target)

    thread = threading.Thread(target=run, name="ffn_faas-profile", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(ANSWER_S)


def write(target: Path, captured: Trace) -> None:
    """Raises ResourceError."""
    try:
        target.write_text(json.dumps(captured))
    except OSError as error:
        raise ResourceError(
            f"the trace cannot be written to {target}: {error.strerror}", remedy="make room, or name another place"
        ) from None
