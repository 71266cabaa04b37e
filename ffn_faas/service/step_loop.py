"""The step loop: the backend waits for an item, computes it, sends it back; nothing else happens here."""

from __future__ import annotations

from ffn_faas.backends.base import FFNBackend
from ffn_faas.service.sessions import SessionRegistry
from ffn_faas.service.stop import StopRequest


def run_steps(backend: FFNBackend, stop: StopRequest) -> None:
    """Step until a stop is requested. Runs in the main thread, so that signal handlers run between steps."""
    stop.on_request(backend.cancel_receive)
    while not stop and backend.execute_step():
        pass


def drain(backend: FFNBackend, sessions: SessionRegistry, reason: str, timeout_s: float) -> None:
    """Finish the posts in flight, then tell every A rank that F goes away."""
    backend.drain(timeout_s)
    sessions.end_all(f"F stopped: {reason}")
