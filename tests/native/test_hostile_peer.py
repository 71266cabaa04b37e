"""A peer that breaks the protocol loses its own link and nothing else."""

import os
import time
from contextlib import suppress

import numpy as np
import pytest

from ffn_faas import native
from ffn_faas.connectors.shm import native_geometry
from tests.native.hand_written_peer import HandWrittenPeer
from tests.native.world import EPOCH, World, batch, oracle

HOSTILE_LINK = 9


@pytest.fixture
def world():
    with World([3], top_k=2, hidden_size=4, capacity=4) as made:
        yield made


@pytest.fixture
def peer(world: World) -> HandWrittenPeer:
    arena = native.load().Arena.create(native_geometry(world.geometry), EPOCH)
    receiver = world.ranks[0].receiver
    receiver.add_link(HOSTILE_LINK, arena, world.ranks[0].counts)
    return HandWrittenPeer(arena.view(), receiver.doorbell, world.geometry, EPOCH)


def faults(world: World) -> list[tuple[int, str]]:
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        found = world.ranks[0].receiver.take_faults()
        if found:
            return found
        time.sleep(0.001)
    return []


def check_other_link(world: World) -> None:
    x, ids, weights = batch(np.random.default_rng(0), 4, world)
    np.testing.assert_array_equal(world.step(x, ids, weights), oracle(0, x, ids, weights))


def test_a_peer_written_from_the_documentation_is_served(world: World, peer: HandWrittenPeer) -> None:
    for rows in (2, 0, 1):
        x = np.arange(rows * 4, dtype=np.float32).reshape(rows, 4)
        ids, weights = np.array([[0, 2], [-1, 1]])[:rows], np.array([[1.0, 0.5], [7.0, 2.0]])[:rows]
        peer.post(1, rows, ids.ravel().tolist(), weights.ravel().tolist(), x.tobytes())
        np.testing.assert_array_equal(peer.answer(rows), oracle(1, x, ids, weights))
    check_other_link(world)


@pytest.mark.parametrize(
    ("layer", "rows", "ids", "reason"),
    [
        (0, 5, [], "5 rows, capacity is 4"),
        (0, -1, [], "-1 rows, capacity is 4"),
        (0, 2**31 - 1, [], "2147483647 rows, capacity is 4"),
        (2, 1, [0, 0], "layer 2 of 2"),
        (-1, 1, [0, 0], "layer -1 of 2"),
        (0, 2, [0, 1, 2, 3], "local expert 3 of 3"),
        (0, 1, [-2, 0], "local expert -2 of 3"),
        (0, 1, [0, -(2**31)], "local expert -2147483648 of 3"),
    ],
)
def test_a_wild_number_closes_that_link_with_a_reason(
    world: World, peer: HandWrittenPeer, layer: int, rows: int, ids: list[int], reason: str
) -> None:
    check_other_link(world)
    peer.post(layer, rows, ids, [1.0] * len(ids), bytes(16))
    assert [(link, reason in text) for link, text in faults(world)] == [(HOSTILE_LINK, True)]
    check_other_link(world)
    peer.post(0, 1, [0, 0], [1.0, 1.0], bytes(16))
    check_other_link(world)
    assert not peer.answered(), "nothing is served on a closed link"
    assert world.ranks[0].receiver.take_faults() == []


@pytest.mark.parametrize("number", [0, 1, (EPOCH + 1) << 40 | 1, EPOCH << 40 | 2, EPOCH << 40, 2**64 - 1])
def test_a_flag_of_another_epoch_or_out_of_turn_is_no_post(world: World, peer: HandWrittenPeer, number: int) -> None:
    peer.release(number)
    check_other_link(world)
    assert len(world.ranks[0].seen.rows) == 1


def test_a_second_post_before_the_answer_waits_and_cannot_change_the_checked_copy(world: World) -> None:
    world.ranks[0].close()
    arena = native.load().Arena.create(native_geometry(world.geometry), EPOCH)
    receiver = world.ranks[0].receiver
    receiver.add_link(HOSTILE_LINK, arena, world.ranks[0].counts)
    peer = HandWrittenPeer(arena.view(), receiver.doorbell, world.geometry, EPOCH)
    peer.post(0, 1, [0, 1], [1.0, 1.0], bytes(16))
    item = receiver.receive(1_000_000) or receiver.receive(1_000_000)
    ids = np.asarray(item.expert_ids)
    peer.post(0, 1, [99, 99], [1.0, 1.0], bytes(16))
    assert receiver.receive(10_000) is None
    assert ids.tolist() == [[0, 1]]
    item.complete()
    assert receiver.receive(1_000_000) is None
    assert [link for link, _ in receiver.take_faults()] == [HOSTILE_LINK]


def test_ringing_without_a_post_only_wakes_f(world: World) -> None:
    for _ in range(1000):
        os.write(world.ranks[0].receiver.doorbell, b"\1" + bytes(7))
    check_other_link(world)


def test_a_full_doorbell_still_wakes_f(world: World) -> None:
    doorbell = world.ranks[0].receiver.doorbell
    for _ in range(20):
        with suppress(BlockingIOError):
            os.write(doorbell, (2**64 - 2).to_bytes(8, "little"))
        check_other_link(world)
