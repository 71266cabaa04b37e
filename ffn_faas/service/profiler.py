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
from ffn_faas.protocol.messages import Profile, Profiled
from ffn_faas.service.sessions import Link, Session
from ffn_faas.service.state import ServiceState
from ffn_faas.telemetry import trace
from ffn_faas.telemetry.spans import PostSpan, clock_offset_ns
from ffn_faas.telemetry.trace import AProcess, FProcess, Trace

POLL_S = 0.02
ANSWER_S = 3.0
"""How long an A rank may take to send its spans; without them the trace has F's side only."""

FAR_NS = 3600 * 10**9
"""Posts that lie further from now, by A's own account, are not shown."""

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
        process = FProcess(world.rank, world.size, clock_offset_ns(), own, connector.clock_error_ns)
        return trace.build([process], answers)
    finally:
        state.profiling.release()


def _connector(state: ServiceState) -> FFNConnector:
    connector, backend = state.connector, state.config.backend
    if connector is None:
        raise ResourceError(f"F is {state.lifecycle.phase.value}", remedy="wait until it is ready")
    if not connector.can_record:
        raise UsageError(f"backend {backend} keeps no times of single steps", remedy=connector.times_elsewhere)
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
    told = sorted(asked.values(), key=lambda one: (one[0].instance, one[1].attention_rank))
    made = [_process(session, link, link.profiled) for session, link in told if link.profiled is not None]
    return [process for process in made if process.spans]


def _process(session: Session, link: Link, answer: Profiled) -> AProcess:
    """Without the spans that no clock has shown: one rank's numbers must not spoil the trace for the others."""
    now = time.time_ns()
    spans = [
        PostSpan(*times)
        for times in answer.spans
        if list(times[:5]) == sorted(times[:5])
        and max(abs(times[0] + answer.clock_offset_ns - now), abs(times[4] + answer.clock_offset_ns - now)) < FAR_NS
    ]
    if len(spans) < len(answer.spans):
        left_out, name = len(answer.spans) - len(spans), f"A rank {link.attention_rank} of instance {session.instance}"
        log.warning("%d of %d posts of %s are left out: its clock is far off", left_out, len(answer.spans), name)
    return AProcess(session.instance, link.attention_rank, answer.clock_offset_ns, spans)


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
