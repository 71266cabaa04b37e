"""A link between two network namespaces that delays and drops packets, also where the kernel has no netem.

Its ends are TUN devices; a thread carries the packets from each to the other. Needs root and /dev/net/tun.
"""

from __future__ import annotations

import ctypes
import fcntl
import heapq
import os
import select
import struct
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

TUNSETIFF, IFF_TUN, IFF_NO_PI = 0x400454CA, 1, 0x1000
LARGEST_PACKET = 1 << 16


def open_tun(namespace: str, name: str) -> int:
    """A new device ``name`` in ``namespace``; the descriptor is the caller's, and the device lasts as long as it.

    Raises OSError.
    """

    def enter() -> int:
        # A thread of its own: only that is in the other namespace.
        with Path("/run/netns", namespace).open("rb") as place:
            if ctypes.CDLL(None, use_errno=True).setns(place.fileno(), 0) != 0:
                raise OSError(ctypes.get_errno(), f"cannot enter {namespace}")
        device = os.open("/dev/net/tun", os.O_RDWR)
        fcntl.ioctl(device, TUNSETIFF, struct.pack("16sH22x", name.encode(), IFF_TUN | IFF_NO_PI))
        return device

    with ThreadPoolExecutor(1) as executor:
        return executor.submit(enter).result()


class SlowLink:
    """Carries packets until ``close``; ``delay_s`` each way and ``drop_every`` (0: none) may change at any time."""

    def __init__(self, ends: tuple[tuple[str, str], tuple[str, str]]) -> None:
        """``ends``: namespace and name of each device."""
        self.delay_s, self.drop_every = 0.0, 0
        self.carried = self.dropped = 0
        self._devices = [open_tun(*end) for end in ends]
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def close(self) -> None:
        self._stop.set()
        self._thread.join()
        for device in self._devices:
            os.close(device)

    def _run(self) -> None:
        waiting: list[tuple[float, int, int, bytes]] = []
        while not self._stop.is_set():
            now = time.monotonic()
            while waiting and waiting[0][0] <= now:
                _, _, device, packet = heapq.heappop(waiting)
                with suppress(OSError):  # a device that is down takes none
                    os.write(device, packet)
            patience = min(0.1, waiting[0][0] - now) if waiting else 0.1
            ready, _, _ = select.select(self._devices, [], [], patience)
            for device in ready:
                packet = os.read(device, LARGEST_PACKET)
                self.carried += 1
                if self.drop_every and self.carried % self.drop_every == 0:
                    self.dropped += 1
                    continue
                other = self._devices[1 - self._devices.index(device)]
                heapq.heappush(waiting, (time.monotonic() + self.delay_s, self.carried, other, packet))
