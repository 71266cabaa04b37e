"""A worker does not outlive its launcher."""

from __future__ import annotations

import os
import threading
import time

from ffn_faas.service.stop import StopRequest

POLL_S = 0.5
LIMIT_S = 9.0
"""Nobody waits for this process any more, and its devices are wanted by the next launch."""


def stop_with_parent(stop: StopRequest) -> None:
    """Ask for a stop once the process that started this one is gone. Returns at once; a daemon thread watches."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(POLL_S)
        stop.request(f"the launcher (process {parent}) is gone", limit_s=LIMIT_S)

    threading.Thread(target=watch, name="ffn-parent", daemon=True).start()
