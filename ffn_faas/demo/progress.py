"""What the demo says while it works, on stderr; and how it waits for its processes without missing a death."""

from __future__ import annotations

import http.client
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from ffn_faas.demo import http_client
from ffn_faas.demo.processes import Child, Children
from ffn_faas.units import MIB

_QUIET_S = 5.0
_T = TypeVar("_T")


def say(text: str) -> None:
    """One line of progress."""
    print(text, file=sys.stderr, flush=True)


def report_bytes(label: str) -> Callable[[int, int], None]:
    """A byte counter for ``make_checkpoint``."""
    return lambda done, total: say(f"{label}: {done / MIB:.0f} of {total / MIB:.0f} MiB")


def wait_ready(children: Children, child: Child, port: int, path: str, timeout_s: float) -> float:
    """Poll ``path`` until it answers 200; returns the seconds since ``child`` was started.

    Raises ChildFailed when any child ends meanwhile, or after ``timeout_s``.
    """
    said, said_at = "", child.started_at
    while True:
        children.require_alive()
        status, state = _probe(port, path)
        seconds = time.monotonic() - child.started_at
        if status == 200:
            say(f"{child.name}: ready after {seconds:.1f} s")
            return seconds
        if seconds > timeout_s:
            raise child.failure(f"was not ready after {timeout_s:.0f} s")
        if (state and state != said) or time.monotonic() - said_at > _QUIET_S:
            said, said_at = state, time.monotonic()
            say(f"{child.name}: {state or 'starting'}, {seconds:.0f} s")
        time.sleep(0.1)


def watched(children: Children, work: Callable[[], _T]) -> _T:
    """The result of ``work``, run on a thread. Raises ChildFailed as soon as a child ends, whatever ``work`` does."""
    executor = ThreadPoolExecutor(1)
    future = executor.submit(work)
    executor.shutdown(wait=False)
    while not future.done():
        children.require_alive()
        time.sleep(0.02)
    if future.exception() is not None:
        children.explain(settle_s=10.0)
    children.require_alive()
    return future.result()


def _probe(port: int, path: str) -> tuple[int, str]:
    """(status, what the body says of phase and progress); 0 when nobody answers."""
    try:
        status, body = http_client.request(port, "GET", path, timeout_s=2.0)
    except (OSError, http.client.HTTPException):
        return 0, ""
    if not isinstance(body, dict) or "phase" not in body:
        return status, ""
    progress = body.get("progress")
    return status, str(body["phase"]) + (f" {progress:.0%}" if isinstance(progress, (int, float)) else "")
