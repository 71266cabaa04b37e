"""Times that kernels keep in a ring: which entries are whole, how they come to the host's clock. Without a GPU."""

import ctypes
import itertools
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ffn_faas.connectors.m2n import M2nConnector
from ffn_faas.connectors.m2n_library import KEPT_TIMES, Counters, Device, Items, ItemTimes, Posts, PostTimes
from ffn_faas.connectors.m2n_recorder import ItemRecorder, PostRecorder
from ffn_faas.connectors.m2n_times import Reading, host_clock, numbered
from ffn_faas.errors import ResourceError

AHEAD = 5_000_000_000
"""The device's clock shows so much more than the host's."""


class DeviceStandIn:
    """Rings in memory of this process, written as the kernels do; its clock runs ``drift`` too fast, in millionths."""

    def __init__(self, drift=0):
        self.items, self.posts = Items(), (Posts(), Posts())
        self.drift, self.begun, self.destroyed = drift, time.monotonic_ns(), 0
        self.while_copying = lambda: None
        self.service_times = lambda handle: ctypes.addressof(self.items)

    def now(self, host_ns=None):
        host_ns = time.monotonic_ns() if host_ns is None else host_ns
        return host_ns + AHEAD + (host_ns - self.begun) * self.drift // 1_000_000

    def call(self, name, *arguments):
        getattr(self, f"_{name}")(*arguments)

    def _use_device(self, index):
        assert index == 3

    def _observer_create(self, handle):
        handle._obj.value = 1

    def _observer_destroy(self, handle):
        self.destroyed += 1

    def _observer_copy(self, observer, target, address, nbytes):
        ctypes.memmove(target, address, nbytes)
        if nbytes > 8:
            self.while_copying()

    def _observer_clock(self, observer, device, host, error):
        host._obj.value = time.monotonic_ns()
        device._obj.value = self.now(host._obj.value)
        error._obj.value = 700

    def item(self, layer=0, rows=1):
        """One more item, each part of it 10 us of the host's clock."""
        number, at = self.items.ended + 1, time.monotonic_ns()
        times = (self.now(at + 10_000 * part) for part in range(4))
        self.items.kept[(number - 1) % KEPT_TIMES] = ItemTimes(number, *times, layer, rows, 1, 0)
        self.items.ended = number
        return at

    def post(self, stage=0, layer=0, rows=1):
        number, at = self.posts[stage].ended + 1, time.monotonic_ns()
        times = (self.now(at + 10_000 * part) for part in range(5))
        self.posts[stage].kept[(number - 1) % KEPT_TIMES] = PostTimes(number, *times, layer, rows)
        self.posts[stage].ended = number
        return at


@given(
    length=st.integers(2, 9),
    ended=st.integers(0, 40),
    meanwhile=st.integers(0, 20),
    first=st.integers(0, 45),
    limit=st.integers(0, 20),
)
def test_only_whole_entries_are_taken_whatever_was_written_while_copying(length, ended, meanwhile, first, limit):
    ring = [PostTimes() for _ in range(length)]

    def write(number):
        ring[(number - 1) % length] = PostTimes(number, summed=number)

    for number in range(1, ended + 1):
        write(number)
    for number in range(ended + 1, ended + meanwhile + 1):
        write(number)
    # The one in flight has written some of its fields over an old entry, which still has its number.
    ring[(ended + meanwhile) % length].summed = 10**6
    taken = numbered(ring, range(first, first + limit), ended, ended + meanwhile)
    assert all(entry.summed == entry.number for entry in taken)
    asked = [number for number in range(max(first, 1), first + limit) if number <= ended]
    lost = [number for number in asked if number <= ended + meanwhile + 1 - length]
    assert [entry.number for entry in taken] == asked[len(lost) :]


def test_device_time_runs_along_the_line_between_two_readings():
    to_host = host_clock(Reading(1_000, 50_000, 3), Reading(11_000, 59_990, 3))
    assert [to_host(at) for at in (1_000, 6_000, 11_000)] == [50_000, 54_995, 59_990]
    assert to_host(500) == 49_500
    assert to_host(12_000) == 60_990


def test_readings_at_one_moment_are_no_division_by_zero():
    assert host_clock(Reading(1_000, 50_000, 3), Reading(1_000, 50_004, 3))(1_100) == 50_104


@pytest.mark.parametrize("drift", [0, 80, -80])
def test_items_come_in_order_on_the_hosts_clock_and_wait_since_the_one_before(drift):
    device = DeviceStandIn(drift)
    recorder = ItemRecorder(device, ctypes.addressof(device.items))
    assert recorder.take() == []
    device.item()
    begin = time.monotonic_ns()
    recorder.record(3)
    begun = [device.item(layer, rows) for layer, rows in ((4, 7), (5, 8), (6, 9), (7, 1))]
    spans = recorder.take()
    assert [(span.layer, span.rows, span.parts) for span in spans] == [(4, 7, 1), (5, 8, 1), (6, 9, 1)]
    for at, span in zip(begun, spans, strict=False):
        assert abs(span.taken - at) <= 2, "as written, but for rounding"
        assert abs(span.sent - at - 30_000) <= 6
        assert span.began <= span.taken == span.gathered <= span.sorted <= span.computed <= span.sent
    assert begin <= spans[0].began <= begun[0] + 2, "no wait from before the recording"
    for before, span in itertools.pairwise(spans):
        assert span.began == min(before.sent, span.taken)
    assert recorder.error_ns == 700
    assert recorder.take() == [], "once only"
    recorder.close()
    recorder.close()
    assert device.destroyed == 1


def test_items_overwritten_while_the_ring_is_copied_are_left_out():
    device = DeviceStandIn()
    recorder = ItemRecorder(device, ctypes.addressof(device.items))
    for _ in range(KEPT_TIMES):
        device.item()
    recorder.record(100)
    for number in range(KEPT_TIMES - 100):
        device.item(layer=number)
    device.while_copying = lambda: [device.item() for _ in range(150)]
    spans = recorder.take()
    # 8192 + 8242 items have ended, the next is in flight: 8244 is the oldest that is safe, 8193 the first asked for.
    assert [span.layer for span in spans] == list(range(51, 100))


def test_posts_of_all_stages_come_in_the_order_of_their_dispatch():
    device = DeviceStandIn()
    recorder = PostRecorder(device, [ctypes.addressof(ring) for ring in device.posts])
    device.post(stage=1)
    recorder.record(4)
    order = [(0, 0), (1, 0), (0, 1), (1, 1), (0, 2)]
    begun = [device.post(stage, layer, rows=3) for stage, layer in order]
    spans = recorder.take()
    assert [(span.stage, span.layer, span.rows) for span in spans] == [(*one, 3) for one in order[:4]]
    for at, span in zip(begun, spans, strict=False):
        assert list(span[:5]) == [pytest.approx(at + 10_000 * part, abs=5) for part in range(5)]


def test_the_connector_counts_what_has_ended_without_asking_the_device():
    device = DeviceStandIn()
    service = type("Service", (), {})()
    service.counters, service.times = Counters(), ItemRecorder(device, ctypes.addressof(device.items))
    connector = M2nConnector(device, Device(3, "GPU", "0" * 32, (9, 0), 132, 1), service)

    def step(*, ended):
        service.counters.items += 1
        service.counters.taken += 2
        if ended:
            device.item()
            service.counters.completed += 2

    step(ended=True)
    connector.record(5)
    assert connector.recorded() == 0
    step(ended=True)
    step(ended=False)
    assert connector.recorded() == 1, "one is in flight"
    assert len(connector.take_spans()) == 1
    assert connector.clock_error_ns == 700


@pytest.mark.parametrize("begun", [True, False])
def test_a_closed_recorder_says_so_and_never_hands_the_device_a_handle_that_is_gone(begun):
    device = DeviceStandIn()
    items, posts = ItemRecorder(device, ctypes.addressof(device.items)), PostRecorder(device, [])
    for recorder in (items, posts):
        if begun:
            recorder.record(4)
        recorder.close()
        recorder.close()
        with pytest.raises(ResourceError, match="closed"):
            recorder.take() if begun else recorder.record(4)
    assert device.destroyed == 2
