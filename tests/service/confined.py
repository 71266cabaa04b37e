"""Run a module where something is scarce, as a process of its own.

    python -m tests.service.confined HOW MODULE [arguments]

HOW: address-space=BYTES, cgroup=DIRECTORY (of a hierarchy of cgroups), shm-read-only or shm-full (a /dev/shm of this
process's own; needs root).
"""

from __future__ import annotations

import ctypes
import os
import resource
import runpy
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

CLONE_NEWNS = 0x20000
SHM = Path("/dev/shm")


def confine(how: str) -> None:
    kind, _, value = how.partition("=")
    if kind == "address-space":
        resource.setrlimit(resource.RLIMIT_AS, (int(value), int(value)))
    elif kind == "cgroup":
        Path(value, "cgroup.procs").write_text(str(os.getpid()))
    else:
        if ctypes.CDLL(None, use_errno=True).unshare(CLONE_NEWNS) != 0:
            raise OSError(ctypes.get_errno(), "no mount namespace of its own")
        mount("--make-rprivate", "/")
        mount("-t", "tmpfs", "-o", "size=64k", "tmpfs", str(SHM))
        if kind == "shm-full":
            with suppress(OSError), (SHM / "filler").open("wb", buffering=0) as filler:
                while filler.write(bytes(4096)):
                    pass
        else:
            mount("-o", "remount,ro", str(SHM))


def mount(*words: str) -> None:
    subprocess.run(["mount", *words], check=True)


if __name__ == "__main__":
    confine(sys.argv[1])
    module = sys.argv[2]
    del sys.argv[1:3]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
