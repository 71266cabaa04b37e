"""SIGTERM and SIGINT ask for a stop; a second one forces it.

Python runs signal handlers in the main thread only, which may be inside a native call that never returns. So a thread
reads the interpreter's wakeup descriptor instead.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ffn_faas.errors import Stuck
from ffn_faas.service.stop import StopRequest

STOPPING = (signal.SIGTERM, signal.SIGINT)


@contextmanager
def stop_on_signals(stop: StopRequest, bound: Callable[[int, int], None] | None = None) -> Iterator[None]:
    """Within the block, signals become stop requests; earlier handlers come back afterwards. Main thread only.

    ``bound(from_fd, to_fd)``, if given, stands in between and passes the signal numbers on (LastWords.bound_signals).
    """
    wakeup_read, wakeup_write = os.pipe()
    os.set_blocking(wakeup_write, False)
    readable = wakeup_read
    if bound is not None:
        readable, forward = os.pipe()
        bound(wakeup_read, forward)
    threading.Thread(target=_listen, args=(readable, stop), name="ffn-signals", daemon=True).start()
    # The handlers do nothing: being there keeps the default action away and lets waits return.
    previous = {number: signal.signal(number, lambda *_: None) for number in STOPPING}
    earlier_fd = signal.set_wakeup_fd(wakeup_write, warn_on_full_buffer=False)
    try:
        yield
    finally:
        signal.set_wakeup_fd(earlier_fd)
        for number, earlier in previous.items():
            signal.signal(number, earlier)
        os.close(wakeup_write)


def _listen(readable: int, stop: StopRequest) -> None:
    seen = 0
    while byte := os.read(readable, 1):
        if byte[0] not in STOPPING:
            continue
        seen += 1
        name = signal.Signals(byte[0]).name
        if seen > 1:
            print(f"ffn_faas: second signal ({name}) while stopping: forced", file=sys.stderr, flush=True)
            os._exit(Stuck.exit_code)
        stop.request(name)
