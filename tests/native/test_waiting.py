"""How waits end: by an answer, a failure, a cancel, a signal, a timeout."""

import signal
import threading
import time

import numpy as np
import pytest

from ffn_faas import native
from ffn_faas.connectors.shm import native_geometry
from tests.native.world import EPOCH, FRank, World, batch, oracle


@pytest.mark.parametrize("asleep", [False, True])
def test_fail_ends_a_pending_combine_with_its_reason(asleep: bool) -> None:
    with World([2, 2], spin_us=0 if asleep else 5_000_000) as world:
        for rank in world.ranks:
            rank.close()
        x, ids, weights = batch(np.random.default_rng(0), 3, world)
        call, out = world.call(x, ids, weights), np.empty_like(x)
        world.client.dispatch(call)
        failed_at: list[float] = []

        def fail() -> None:
            time.sleep(0.1)
            failed_at.append(time.monotonic())
            world.client.fail("F rank 1 is lost: killed")

        thread = threading.Thread(target=fail)
        thread.start()
        with pytest.raises(RuntimeError, match=r"^F rank 1 is lost: killed$"):
            world.client.combine(call, out.ctypes.data)
        took = time.monotonic() - failed_at[0]
        thread.join()
        print(f"\ncombine ended {took * 1e3:.2f} ms after fail (asleep: {asleep})")
        assert took < 5
        world.client.fail("another reason")
        with pytest.raises(RuntimeError, match="F rank 1 is lost: killed"):
            world.client.dispatch(call)


def test_cancel_ends_the_pending_receive_or_else_the_next() -> None:
    receiver = native.load().ItemReceiver()
    threading.Timer(0.1, receiver.cancel).start()
    started = time.monotonic()
    assert receiver.receive(60_000_000) is None
    receiver.cancel()
    assert receiver.receive(60_000_000) is None
    assert time.monotonic() - started < 30


def test_receive_returns_after_its_timeout() -> None:
    started = time.monotonic()
    assert native.load().ItemReceiver().receive(20_000) is None
    assert time.monotonic() - started >= 0.02


def test_a_signal_ends_the_wait_so_that_its_handler_runs() -> None:
    heard: list[int] = []
    previous = signal.signal(signal.SIGALRM, lambda number, _: heard.append(number))
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        started = time.monotonic()
        assert native.load().ItemReceiver().receive(60_000_000) is None
        assert heard == [signal.SIGALRM]
        assert time.monotonic() - started < 30
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)


def test_only_one_thread_may_receive() -> None:
    receiver = native.load().ItemReceiver()
    thread = threading.Thread(target=receiver.receive, args=(2_000_000,))
    thread.start()
    time.sleep(0.1)
    with pytest.raises(RuntimeError, match="another thread is receiving"):
        receiver.receive(0)
    receiver.cancel()
    thread.join()


def test_a_link_added_while_f_sleeps_is_served() -> None:
    with World([2]) as world:
        time.sleep(0.05)
        x, ids, weights = batch(np.random.default_rng(0), 3, world)
        np.testing.assert_array_equal(world.step(x, ids, weights), oracle(0, x, ids, weights))


def test_a_link_may_be_removed_while_an_item_of_it_is_computed() -> None:
    with World([2]) as world:
        rank = world.ranks[0]
        rank.close()
        x, ids, weights = batch(np.random.default_rng(0), 3, world)
        world.client.dispatch(world.call(x, ids, weights))
        item = rank.receiver.receive(1_000_000) or rank.receiver.receive(1_000_000)
        hidden, partial = item.hidden, np.asarray(item.partial)
        rank.receiver.remove_link(0)
        rank.receiver.remove_link(0)
        assert rank.receiver.receive(0) is None
        partial[:] = 1
        assert bytes(hidden)
        item.complete()
        del item
        partial[:] = 2
        assert rank.receiver.counters()["taken_at_ns"] == 0


def test_links_are_served_in_turn() -> None:
    module = native.load()
    with World([2], item_limit=1) as world:
        receiver = world.ranks[0].receiver
        world.ranks[0].close()
        shape = native_geometry(world.geometry)
        clients = []
        for key in (1, 2):
            arena = module.Arena.create(shape, EPOCH)
            receiver.add_link(key, arena, [2, 2])
            client = module.AttentionClient(shape, [2])
            client.set_layers([0])
            client.set_link(0, arena)
            clients.append(client)
        x, ids, weights = batch(np.random.default_rng(0), 1, world)
        call, out = world.call(x, ids, weights), np.empty_like(x)
        order = []
        for client in (world.client, *clients):
            client.dispatch(call)
        receiver.cancel()
        receiver.receive(0)
        for _ in range(4):
            item = receiver.receive(1_000_000)
            order.append(item.parts[0][0])
            np.asarray(item.partial)[:] = 0
            item.complete()
            if item.parts[0][0] == 0:
                world.client.combine(call, out.ctypes.data)
                world.client.dispatch(call)
        assert order == [0, 1, 2, 0]


def test_links_come_and_go_while_others_are_served() -> None:
    with World([2]) as world:
        rank: FRank = world.ranks[0]
        shape = native_geometry(world.geometry)
        stop = threading.Event()

        def churn() -> None:
            key = 1
            while not stop.is_set():
                rank.receiver.add_link(key, native.load().Arena.create(shape, EPOCH), [2, 2])
                rank.receiver.remove_link(key)
                key += 1

        thread = threading.Thread(target=churn)
        thread.start()
        rng = np.random.default_rng(1)
        for _ in range(200):
            x, ids, weights = batch(rng, 3, world)
            np.testing.assert_array_equal(world.step(x, ids, weights), oracle(0, x, ids, weights))
        stop.set()
        thread.join()
