"""F's connector without a GPU: device work runs in the stepping thread only, and lanes come and go."""

import threading
import time

import pytest

from ffn_faas.connectors.base import WindowGeometry
from ffn_faas.connectors.m2n import M2nConnector
from ffn_faas.connectors.m2n_library import Counters, Device
from ffn_faas.errors import HandshakeRefused, ResourceError
from ffn_faas.protocol.messages import DeviceMemory

OURS, THEIRS = "0" * 32, "1" * 32
GEOMETRY = WindowGeometry(2, 16, 128, 2, 2)


class FakeLibrary:
    def __init__(self):
        self.live, self.opened, self.threads, self.broken, self.made = {}, {}, set(), False, 0

    def _note(self):
        self.threads.add(threading.get_ident())

    def allocate(self, nbytes):
        self._note()
        self.made += 1
        address = self.made << 20
        self.live[address] = nbytes
        return address

    def export(self, address):
        return address.to_bytes(64, "big")

    def open(self, handle):
        self._note()
        if self.broken:
            raise ResourceError("GPU: cudaIpcOpenMemHandle: invalid resource handle")
        self.made += 1
        self.opened[self.made] = handle
        return self.made

    def call(self, name, address):
        self._note()
        del {"free": self.live, "close": self.opened}[name][address]


class FakeService:
    def __init__(self):
        self.counters, self.lanes, self.faulty, self.stopped, self.steps = Counters(), {}, set(), False, 0
        self.captures = self.replays = 0
        self.told, self.stopped_at_lane = [], []

    def set_lane(self, lane, addresses, capacity=0, first_flag=0):
        self.lanes[lane] = (capacity, first_flag) if addresses else None
        self.stopped_at_lane.append(self.stopped)

    def lane_fault(self, lane):
        return lane in self.faulty

    def step(self, *, captured):
        self.steps += 1

    def idle(self):
        pass

    def stop(self, *, stopped=True):
        self.stopped = stopped
        self.told.append(stopped)


@pytest.fixture
def made():
    library, service = FakeLibrary(), FakeService()
    connector = M2nConnector(library, Device(0, "GPU", OURS, (9, 0), 132, 1), service)
    over = threading.Event()

    def steps():
        while not over.is_set():
            connector.step(captured=True)

    thread = threading.Thread(target=steps)
    thread.start()
    yield connector, library, service, thread
    over.set()
    thread.join()
    connector.close()
    assert not library.live
    assert not library.opened


def reply(device=THEIRS):
    return DeviceMemory(handle="ab" * 64, offset=0, nbytes=4096, device=device)


def test_a_session_gets_lanes_for_its_stages_and_gives_them_back(made):
    connector, library, service, thread = made
    link, offer = connector.open_link(GEOMETRY, 5, [4])
    assert offer.dispatch.device == OURS
    assert offer.dispatch.nbytes == offer.nbytes == 2 << 20
    connector.accept_reply(link, reply())
    connector.activate_link(link)
    assert service.lanes == {0: (16, 5 << 40 | 1), 1: (16, 5 << 40 | 1)}
    other, _ = connector.open_link(GEOMETRY, 6, [4])
    connector.accept_reply(other, reply())
    connector.activate_link(other)
    assert sorted(service.lanes) == [0, 1, 2, 3]
    connector.close_link(link)
    third, _ = connector.open_link(GEOMETRY, 7, [4])
    connector.accept_reply(third, reply())
    connector.activate_link(third)
    assert service.lanes[0] == service.lanes[1] == (16, 7 << 40 | 1)
    assert library.threads == {thread.ident}


def test_one_gpu_for_both_sides_is_refused_by_its_uuid(made):
    connector, *_ = made
    link, _ = connector.open_link(GEOMETRY, 5, [4])
    with pytest.raises(HandshakeRefused, match="--share-device"):
        connector.accept_reply(link, reply(OURS))


def test_memory_that_cannot_be_opened_names_the_namespaces(made):
    connector, library, *_ = made
    link, _ = connector.open_link(GEOMETRY, 5, [4])
    library.broken = True
    with pytest.raises(ResourceError, match="PID and IPC namespaces"):
        connector.accept_reply(link, reply())


def test_windows_without_a_reply_never_become_a_lane(made):
    connector, _, service, _ = made
    link, _ = connector.open_link(GEOMETRY, 5, [4])
    with pytest.raises(HandshakeRefused, match="none of its own"):
        connector.activate_link(link)
    assert service.lanes == {}


def test_a_post_out_of_bounds_is_reported_once_for_its_link(made):
    connector, _, service, _ = made
    link, _ = connector.open_link(GEOMETRY, 5, [4])
    connector.accept_reply(link, reply())
    connector.activate_link(link)
    service.faulty = {1}
    service.counters.faults = 1
    connector.open_link(GEOMETRY, 6, [4])
    faults = connector.take_faults()
    assert [fault[0] for fault in faults] == [link]
    assert connector.take_faults() == []


def test_an_item_taken_and_not_completed_ages(made):
    connector, _, service, _ = made
    assert connector.statistics()["item_s"] == 0.0
    service.counters.taken = 1
    connector.statistics()
    assert connector.statistics()["item_s"] > 0.0
    service.counters.completed = 1
    assert connector.statistics()["item_s"] == 0.0


def test_a_session_opens_without_waiting_for_posts_that_may_not_come(made):
    connector, _, service, _ = made
    link, _ = connector.open_link(GEOMETRY, 5, [4])
    connector.accept_reply(link, reply())
    connector.activate_link(link)
    assert service.stopped_at_lane == [True, True]
    assert service.told[:2] == [True, False]
    steps = service.steps
    while service.steps < steps + 2:
        time.sleep(0.001)
    assert service.stopped is False


def test_a_cancelled_receive_stays_cancelled_whatever_is_asked_for_meanwhile(made):
    connector, _, service, _ = made
    connector.cancel_receive()
    connector.open_link(GEOMETRY, 5, [4])
    steps = service.steps
    while service.steps < steps + 2:
        time.sleep(0.001)
    assert service.stopped is True
