"""The step loop: the backend waits for an item, computes it, sends it back; nothing else happens here."""

from __future__ import annotations

import time

from ffn_faas.backends.base import FFNBackend
from ffn_faas.connectors.base import FFNConnector
from ffn_faas.service.sessions import Cause, SessionRegistry
from ffn_faas.service.stop import StopRequest
from ffn_faas.service.world import WorldView

POLL_S = 0.005


def run_steps(backend: FFNBackend, connector: FFNConnector, sessions: SessionRegistry, stop: StopRequest) -> None:
    """Step until a stop is requested. Runs in the main thread, so that signal handlers run between steps.

    A link whose peer broke the protocol takes its own session down and nothing else.
    """
    stop.on_request(backend.cancel_receive)
    while not stop and backend.execute_step():
        for window, reason in connector.take_faults():
            sessions.end_window(window, reason)


def drain(
    backend: FFNBackend, world: WorldView, sessions: SessionRegistry, stop: StopRequest, timeout_s: float
) -> None:
    """Finish the posts in flight, on this rank and on all others, then tell every A rank that F goes away.

    A post has its answer when all F ranks have sent theirs: until then its session lives on each of them, and parts of
    posts that come meanwhile are computed too. A rank that is lost, or ``timeout_s``, ends the waiting.
    One that paired is told first: a receive that is pending ends only by what Attention sends as its last.
    """
    reason, deadline = stop.reason, time.monotonic() + timeout_s
    if backend.pairs:
        backend.cancel_receive()
        sessions.end_all(Cause.F_STOPPED, f"F stopped: {reason}")
    backend.drain(timeout_s)
    world.drained()
    while not (backend.pairs or stop.error or world.all_drained.wait(POLL_S)) and time.monotonic() < deadline:
        backend.drain(deadline - time.monotonic())
    sessions.end_all(Cause.F_STOPPED, f"F stopped: {reason}")
