"""Names in /dev/shm that processes leave when their end was not theirs to choose.

Python's resource tracker unlinks them as well, but it may be killed, or be too late on a busy machine.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from pathlib import Path

import psutil


def mapped_by(processes: Iterable[psutil.Process]) -> set[Path]:
    """Files of /dev/shm that any of ``processes`` has mapped; those that may not be looked into have none."""
    found = set()
    for process in processes:
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{process.pid}/maps").read_text(errors="replace").splitlines():
                path = line.partition(" /")[2]
                if path.startswith("dev/shm/") and not path.endswith(" (deleted)"):
                    found.add(Path("/", path))
    return found


def remove_unused(files: set[Path]) -> None:
    """Unlink those of ``files`` that still exist and that no process has mapped."""
    left = {file for file in files if file.exists()}
    if left:
        for file in left - mapped_by(psutil.process_iter()):
            with contextlib.suppress(OSError):
                file.unlink()
