"""Ends what a killed demo leaves: ``python -m ffn_faas.demo.guardian``, a child of the demo, in a session of its own.

Its stdin is a pipe that only the demo holds. Each line is the id of a session that the demo started; when the pipe
ends, the demo is gone, and so is soon every process of those sessions. A child that the kernel ended with the demo
may have left some: stock vLLM's engine outlives an API server that dies while it starts.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import time
from pathlib import Path

import psutil

from ffn_faas.demo.shared_memory import mapped_by, remove_unused

LOOK_S = 0.5
"""How often it looks what they have in /dev/shm: when the demo dies, those that had it may be gone already."""
GRACE_S = 10.0
"""For ends in order, which unlink shared memory."""
TRACKERS_S = 3.0
"""For Python's resource trackers, which then unlink what killed processes left."""


def main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    sessions, memory = set[int](), set[Path]()
    while True:
        told, _, _ = select.select([sys.stdin], [], [], LOOK_S)
        if told:
            lines = os.read(sys.stdin.fileno(), 4096).split()  # each was one write: never half of one
            if not lines:
                break
            sessions |= set(map(int, lines))
        memory |= mapped_by(_living(sessions))
    for process in _living(sessions):
        with contextlib.suppress(psutil.Error):
            process.terminate()
    _wait_for(sessions, GRACE_S)
    for process in _living(sessions):
        with contextlib.suppress(psutil.Error):
            if not is_tracker(process):
                process.kill()
    _wait_for(sessions, TRACKERS_S)
    for process in _living(sessions):
        with contextlib.suppress(psutil.Error):
            process.kill()
    _wait_for(sessions, TRACKERS_S)
    remove_unused(memory)


def is_tracker(process: psutil.Process) -> bool:
    """Whether it is a resource tracker of Python's multiprocessing."""
    try:
        return any("resource_tracker" in argument for argument in process.cmdline())
    except psutil.Error:
        return False


def of_sessions(sessions: set[int]) -> list[psutil.Process]:
    """Every process of this host, zombies too, whose session is one of those."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if os.getsid(process.pid) in sessions:
                found.append(process)
    return found


def _living(sessions: set[int]) -> list[psutil.Process]:
    living = []
    for process in of_sessions(sessions):
        with contextlib.suppress(psutil.Error):
            if process.status() != psutil.STATUS_ZOMBIE:
                living.append(process)
    return living


def _wait_for(sessions: set[int], seconds: float) -> None:
    end = time.monotonic() + seconds
    while _living(sessions) and time.monotonic() < end:
        time.sleep(0.05)


if __name__ == "__main__":
    main()
