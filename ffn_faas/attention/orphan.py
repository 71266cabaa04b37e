"""A worker of Attention does not outlive the vLLM that it belongs to.

vLLM's workers end with its engine; its engine lives on when the API server in front of it is killed, unreachable for
ever, and would keep its session at F.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import select
import signal
import threading
import time

from ffn_faas import env

LIMIT_S = 5.0
"""How long an orphan may take over its orderly end, in which it detaches from F."""


def mark_first_process() -> None:
    """Name this process to those that it starts, unless multiprocessing started it: then its starter has."""
    if multiprocessing.parent_process() is None:
        env.set_vllm_process(os.getpid())


def end_with_first_process(log: logging.Logger, limit_s: float = LIMIT_S) -> None:
    """Have this process end soon after the first process of its vLLM: by SIGTERM, ``limit_s`` later by SIGKILL.

    Returns at once; a daemon thread watches. Nothing is watched in that first process itself, nor below one that is no
    ancestor of this process, as with workers on other hosts.
    """
    first = env.vllm_process()
    if first is None or first not in _ancestors():
        return
    try:
        descriptor = os.pidfd_open(first)
    except OSError:  # gone already, or a kernel before 5.3
        return
    if first not in _ancestors():  # its number had gone to another process
        os.close(descriptor)
        return

    def watch() -> None:
        select.select([descriptor], [], [])
        log.error(
            "vLLM's process %d, which this worker belongs to, is gone: the worker ends, within %g s", first, limit_s
        )
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(limit_s)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, name="ffn-orphan", daemon=True).start()


def _ancestors() -> list[int]:
    import psutil

    return [process.pid for process in psutil.Process().parents()]
