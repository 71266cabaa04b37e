"""A receive that may have no end, in a thread of its own."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ffn_faas.ascend.coordinator import FfnStartup
    from ffn_faas.ascend.device import Device


def run_watched(run: Callable[[], None], device: Device, startup: FfnStartup, interrupt: Callable[[], None]) -> None:
    """``run`` with ``device`` bound; blocks until it returns, and raises what it raises.

    Raises what ``interrupt`` raises, or what another rank has failed with, while ``run`` goes on: its receive has no
    end when Attention is lost.
    """
    failures: list[BaseException] = []

    def target() -> None:
        try:
            device.bind()
            run()
        except BaseException as error:  # noqa: BLE001 - raised below, in the thread that waits
            failures.append(error)

    thread = threading.Thread(target=target, name="ffn-warm-up", daemon=True)
    thread.start()
    while thread.is_alive():
        thread.join(startup.poll_s)
        if thread.is_alive():
            interrupt()
            startup.raise_if_failed()
    for failure in failures:
        raise failure
