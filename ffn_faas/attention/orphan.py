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
from dataclasses import dataclass
from pathlib import Path

from ffn_faas import env
from ffn_faas.errors import SessionLost

LIMIT_S = 5.0
"""How long an orphan may take over its orderly end, in which it detaches from F."""
_START_TIME = 18
"""Index of the time of its start among the numbers behind a process's name and state in /proc/PID/stat (proc(5))."""


@dataclass(frozen=True)
class ProcessIdentity:
    """One process, and no later one that gets its number."""

    pid: int
    started: int
    """Clock ticks after the host's start."""
    where: str
    """Host and PID namespace in which ``pid`` means something."""

    @classmethod
    def of(cls, pid: int) -> ProcessIdentity | None:
        """None when there is no such process here, or it has ended and waits to be reaped."""
        try:
            state, *numbers = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
            where = f"{boot}/{Path('/proc/self/ns/pid').readlink()}"
        except OSError:
            return None
        return None if state in "ZX" else cls(pid, int(numbers[_START_TIME]), where)

    @classmethod
    def parse(cls, text: str) -> ProcessIdentity:
        """What ``str`` makes of one. Raises ValueError for anything else."""
        pid, started, where = text.split(" ", 2)
        return cls(int(pid), int(started), where)

    def __str__(self) -> str:
        return f"{self.pid} {self.started} {self.where}"


def mark_first_process() -> None:
    """Name this process to those that it starts, unless multiprocessing started it: then its starter has."""
    if multiprocessing.parent_process() is None:
        env.set_vllm_process(str(ProcessIdentity.of(os.getpid()) or ""))


def end_with_first_process(log: logging.Logger, limit_s: float = LIMIT_S) -> None:
    """Have this process end soon after the first process of its vLLM: by SIGTERM, ``limit_s`` later by SIGKILL.

    Returns at once; a daemon thread watches. Nothing is watched in that first process itself, nor where its number
    means nothing, as on another host. Raises SessionLost when that process is gone already.
    """
    here, named = ProcessIdentity.of(os.getpid()), env.vllm_process()
    if here is None or named is None:
        return
    first = ProcessIdentity.parse(named)
    if first == here or first.where != here.where:
        return
    try:
        descriptor = os.pidfd_open(first.pid)
    except ProcessLookupError:
        raise _gone(first) from None
    except OSError:  # a kernel before 5.3, or a sandbox that has no such call
        return
    if ProcessIdentity.of(first.pid) != first:
        os.close(descriptor)
        raise _gone(first)

    def watch() -> None:
        select.select([descriptor], [], [])
        log.error("%s: it ends within %g s", _gone(first), limit_s)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(limit_s)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, name="ffn-orphan", daemon=True).start()


def _gone(first: ProcessIdentity) -> SessionLost:
    return SessionLost(f"vLLM's process {first.pid} is gone, which this worker belongs to")
