"""Whoever asks for a stop may come when all is closed: the native side is not asked with a handle that is gone."""

import ctypes

import pytest

from ffn_faas.connectors.base import WindowGeometry
from ffn_faas.connectors.m2n_attention import M2nAttention
from ffn_faas.connectors.m2n_library import Counters
from ffn_faas.connectors.m2n_service import M2nService, ServiceShape


class FakeLibrary:
    """Hands out handles and notes which of them are stopped, and whether they were live."""

    def __init__(self):
        self.live, self.stopped = set(), []
        self._counters = Counters()

    def call(self, name, *arguments):
        if name.endswith("_create"):
            handle = arguments[-1]._obj
            handle.value = len(self.live) + 1
            self.live.add(handle.value)
        elif name.endswith("_destroy"):
            self.live.remove(arguments[0].value)

    def _stop(self, handle, word):
        self.stopped.append((handle.value in self.live, word))

    service_stop = attention_stop = _stop

    def service_bytes(self, config):
        return 1

    def service_counters(self, handle):
        return ctypes.pointer(self._counters)

    def service_times(self, handle):
        return 1


def service(library):
    return M2nService(library, ServiceShape(128, 64, 2, 4, [0], 4, 8), 1, 2)


def attention(library):
    return M2nAttention(library, WindowGeometry(1, 8, 128, 2, 2), [4])


@pytest.mark.parametrize("make", [service, attention])
def test_a_stop_after_the_end_reaches_nobody(make):
    library = FakeLibrary()
    made = make(library)
    made.stop()
    made.close()
    made.stop()
    made.stop(stopped=False)
    made.close()
    assert library.stopped == [(True, 1)]
    assert not library.live


def test_a_trap_after_the_end_reaches_nobody():
    library = FakeLibrary()
    made = attention(library)
    made.trap()
    made.close()
    made.trap()
    assert library.stopped == [(True, 2)]
