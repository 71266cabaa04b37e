"""Shared memory between real processes: how windows are handed over, and what a death leaves behind."""

import os
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from ffn_faas import native
from ffn_faas.connectors.base import WindowGeometry, WindowOffer
from ffn_faas.connectors.shm import ShmConnector
from ffn_faas.connectors.shm_client import fetch_windows
from ffn_faas.errors import HandshakeRefused, ResourceError
from tests.connectors.processes import Attention, Service
from tests.waiting import wait_until

GEOMETRY = WindowGeometry(stages=1, capacity=6, hidden_size=16, top_k=3, element_size=4)
EPOCH = 3
OVER_EACH = pytest.mark.parametrize("over", ["shm", "tcp"])


@pytest.fixture
def connector():
    made = ShmConnector()
    yield made
    made.close()


@pytest.fixture
def services():
    made = [Service(0, 3), Service(3, 2)]
    yield made
    for service in made:
        service.close()


def shared_memory_of_this_process() -> list[str]:
    return [line for line in Path("/proc/self/maps").read_text().splitlines() if "memfd:ffn_faas" in line]


def test_a_ticket_is_good_for_one_peer(connector: ShmConnector) -> None:
    _, offer = connector.open_link(GEOMETRY, EPOCH, [4])
    arena = fetch_windows(offer, GEOMETRY, EPOCH, 5)
    assert arena.nbytes == offer.nbytes
    with pytest.raises(HandshakeRefused, match=r"unknown, used or withdrawn"):
        fetch_windows(offer, GEOMETRY, EPOCH, 5)


def test_a_wrong_or_withdrawn_ticket_is_refused_and_the_right_one_still_works(connector: ShmConnector) -> None:
    link, offer = connector.open_link(GEOMETRY, EPOCH, [4])
    with pytest.raises(HandshakeRefused, match=r"unknown"):
        fetch_windows(WindowOffer(offer.broker, "0" * 64, offer.nbytes), GEOMETRY, EPOCH, 5)
    fetch_windows(offer, GEOMETRY, EPOCH, 5)
    other, withdrawn = connector.open_link(GEOMETRY, EPOCH, [4])
    connector.close_link(other)
    connector.close_link(other)
    with pytest.raises(HandshakeRefused, match=r"withdrawn"):
        fetch_windows(withdrawn, GEOMETRY, EPOCH, 5)
    connector.close_link(link)


def test_a_broker_out_of_reach_names_both_causes_and_the_remedy() -> None:
    with pytest.raises(ResourceError, match=r"one host and in one network namespace .*hostNetwork"):
        fetch_windows(WindowOffer("ffn_faas-nobody", "0" * 64, 1), GEOMETRY, EPOCH, 5)


@pytest.mark.parametrize(
    ("geometry", "epoch", "reason"),
    [
        (GEOMETRY, EPOCH + 1, f"epoch is {EPOCH}, agreed was {EPOCH + 1}"),
        (WindowGeometry(1, 7, 16, 3, 4), EPOCH, "size is"),
        (WindowGeometry(1, 6, 32, 3, 2), EPOCH, "size is|hidden size is"),
    ],
)
def test_windows_that_are_not_as_agreed_are_refused_with_both_values(
    connector: ShmConnector, geometry: WindowGeometry, epoch: int, reason: str
) -> None:
    _, offer = connector.open_link(GEOMETRY, EPOCH, [4])
    with pytest.raises(HandshakeRefused, match=reason):
        fetch_windows(offer, geometry, epoch, 5)


def test_more_memory_than_there_is_is_refused_before_it_is_touched(connector: ShmConnector) -> None:
    with pytest.raises(ResourceError, match=r"windows of 1048576 rows need .* bytes"):
        connector.open_link(WindowGeometry(8, 1 << 20, 1 << 18, 8, 4), EPOCH, [4])


def test_the_memory_is_private_and_has_no_name(connector: ShmConnector) -> None:
    before = set(Path("/dev/shm").iterdir())
    _, offer = connector.open_link(GEOMETRY, EPOCH, [4])
    arena = fetch_windows(offer, GEOMETRY, EPOCH, 5)
    assert set(Path("/dev/shm").iterdir()) <= before
    made = native.load().Arena.create(connector_geometry(), EPOCH)
    assert stat.S_IMODE(os.fstat(made.fd).st_mode) == 0o600
    assert arena.fd == -1


def connector_geometry():
    from ffn_faas.connectors.shm import native_geometry

    return native_geometry(GEOMETRY)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_another_user_gets_nothing(connector: ShmConnector) -> None:
    _, offer = connector.open_link(GEOMETRY, EPOCH, [4])
    script = (
        "import os, socket, sys; os.setuid(65534); s = socket.socket(socket.AF_UNIX);"
        "s.connect(chr(0) + sys.argv[1]); s.sendall(sys.argv[2].encode()); print(socket.recv_fds(s, 4096, 2)[:2])"
    )
    run = subprocess.run(
        [sys.executable, "-c", script, offer.broker, offer.ticket], capture_output=True, text=True, check=True
    )
    assert "user 65534 is not user 0" in run.stdout
    assert run.stdout.rstrip().endswith(", [])")
    fetch_windows(offer, GEOMETRY, EPOCH, 5)


def test_a_peer_that_says_nothing_does_not_keep_the_broker_from_others(connector: ShmConnector) -> None:
    import socket

    _, offer = connector.open_link(GEOMETRY, EPOCH, [4])
    with socket.socket(socket.AF_UNIX) as silent:
        silent.connect(b"\0" + offer.broker.encode())
        fetch_windows(offer, GEOMETRY, EPOCH, 10)


@pytest.mark.parametrize("spin_us", [0, 50])
@OVER_EACH
def test_no_wake_up_is_lost_between_processes(spin_us: int, over: str) -> None:
    made = [Service(0, 3, spin_us=spin_us), Service(3, 2, spin_us=spin_us)]
    attentions = [
        Attention(made, GEOMETRY, epoch, "rounds", over, rounds=3000, seed=epoch, spin_us=spin_us) for epoch in (1, 2)
    ]
    for attention in attentions:
        attention.start()
    for attention in attentions:
        attention.expect("done 3000")
        assert attention.end() == 0
    for service in made:
        service.close()
        statistics = service.connector.statistics()
        assert statistics["steps"] >= 6000
        assert statistics["item_s"] == 0


@OVER_EACH
def test_attention_killed_after_a_dispatch_costs_only_its_own_link(services: list[Service], over: str) -> None:
    before = set(Path("/dev/shm").iterdir())
    survivor = Attention(services, GEOMETRY, 1, "rounds", rounds=500, seed=1)
    victim = Attention(services, GEOMETRY, 2, "die", over, seed=2)
    survivor.start()
    victim.start()
    victim.expect("dispatched")
    assert victim.end() == -signal.SIGKILL
    survivor.expect("done 500")
    assert survivor.end() == 0
    wait_until(lambda: not shared_memory_of_this_process(), 10)
    assert set(Path("/dev/shm").iterdir()) <= before
    assert [service.connector.take_faults() for service in services] == [[], []]


@OVER_EACH
def test_attention_killed_at_any_moment_leaves_f_serving_the_next(services: list[Service], over: str) -> None:
    rng = np.random.default_rng(7)
    for epoch in range(1, 6):
        victim = Attention(services, GEOMETRY, epoch, "forever", over, seed=epoch)
        victim.start()
        time.sleep(float(rng.uniform(0.0, 0.15)))
        victim.process.kill()
        assert victim.end() == -signal.SIGKILL
    last = Attention(services, GEOMETRY, 9, "rounds", over, rounds=200, seed=9)
    last.start()
    last.expect("done 200")
    assert last.end() == 0
    wait_until(lambda: not shared_memory_of_this_process(), 10)
