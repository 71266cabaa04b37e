"""A worker does not outlive its launcher."""

from __future__ import annotations

import os
import threading

from ffn_faas.service.stop import StopRequest

POLL_S = 0.5


def stop_with_parent(stop: StopRequest) -> None:
    """Ask for a stop once the process that started this one is gone. Returns at once; a daemon thread watches."""
    parent = os.getppid()

    def watch() -> None:
        while not stop.wait(POLL_S):
            if os.getppid() != parent:
                stop.request(f"the launcher (process {parent}) is gone")

    threading.Thread(target=watch, name="ffn-parent", daemon=True).start()
