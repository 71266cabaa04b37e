"""An F rank that stands still where a test wants it: ``ffn_faas serve`` with a backend that waits at gates.

A gate is a file: while ``GATES/<place>-<rank>`` exists, the rank stays there. Places: starting, loading, capturing,
compute (an item is taken and not answered), answered (an item is answered, the next one is not looked at). The
rest of the places: release never returns, broken-release and broken-compute raise, compiling holds the interpreter lock
for 5 s. The experts are those of tests.native.world, in numpy: no torch is imported, a rank starts in about a second.
"""

from __future__ import annotations

import ctypes
import sys
import time
from pathlib import Path

from ffn_faas import backends, cli
from ffn_faas.backends.base import FFNBackend
from ffn_faas.connectors.shm import ShmConnector
from ffn_faas.protocol.topology import expert_range
from tests.native.world import answer


class GatedBackend(FFNBackend):
    name = "gated"
    kernel_name = "numpy"
    gates = Path()

    def __init__(self, config, spec):
        self._rank, self._spec = config.world.rank, spec
        self._first = expert_range(spec.num_experts, config.world.size, config.world.rank).start
        self._connector = None
        self._cancelled = False

    def _stand(self, place, check=lambda: None):
        gate = self.gates / f"{place}-{self._rank}"
        if gate.exists():
            (self.gates / f"at-{place}-{self._rank}").touch()
        while gate.exists():
            check()
            time.sleep(0.005)

    def prepare(self):
        self._stand("starting")

    def load(self, progress):
        self._stand("loading", lambda: progress(1, 2))
        progress(2, 2)
        return 0

    def connect(self):
        self._connector = ShmConnector()
        return self._connector

    def capture(self):
        self._stand("capturing")
        if (self.gates / f"compiling-{self._rank}").exists():
            ctypes.PyDLL(None).sleep(5)  # holds the interpreter lock, as a compiler may

    def execute_step(self):
        self._step(0.1)
        return not self._cancelled

    def _step(self, timeout_s):
        item = self._connector.receive(timeout_s)
        if item is None:
            return False
        self._stand("compute")
        if (self.gates / f"broken-compute-{self._rank}").exists():
            raise RuntimeError("the expert kernel failed with code 7")
        if item.rows:
            answer(item, self._first, self._spec.dtype)
        item.complete()
        self._stand("answered")
        return True

    def cancel_receive(self):
        self._cancelled = True
        if self._connector is not None:
            self._connector.cancel_receive()

    def drain(self, deadline_s):
        deadline = time.monotonic() + deadline_s
        while time.monotonic() < deadline and self._step(0.0):
            pass

    def release(self):
        if (self.gates / f"release-{self._rank}").exists():
            libc, lock = ctypes.PyDLL(None), ctypes.create_string_buffer(64)
            libc.pthread_mutex_lock(lock)
            libc.pthread_mutex_lock(lock)  # a native call that never returns and holds the interpreter lock
        if (self.gates / f"broken-release-{self._rank}").exists():
            raise RuntimeError("the device is gone")
        if self._connector is not None:
            self._connector.close()


if __name__ == "__main__":
    GatedBackend.gates = Path(sys.argv[1])
    backends.BUILT_IN["gated"] = ("__main__", "GatedBackend")
    sys.exit(cli.main(["serve", *sys.argv[2:], "--backend", "gated"]))
