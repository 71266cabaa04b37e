"""F goes away and comes back with new windows: every post is answered once, exactly, whenever that happened."""

import threading
import time

import numpy as np
import pytest

from ffn_faas.connectors.shm import native_geometry
from tests.native.world import EPOCH, FRank, World, batch, join, oracle


class Restarts:
    """Replaces the F ranks of a world: the old ones are gone, the new ones have windows of a new epoch."""

    def __init__(self, world: World) -> None:
        self.world, self.epoch = world, EPOCH

    def kill(self) -> None:
        for rank in self.world.ranks:
            rank.close()
            rank.leave()

    def start(self) -> list:
        world, shape = self.world, native_geometry(self.world.geometry)
        self.epoch += 1
        world.ranks, world.arenas, first = [], [], 0
        for count in world.expert_counts:
            rank = FRank(first, count, max(world.wire_layers) + 1, world.dtype)
            mapped = join(rank, shape, self.epoch, poison=True)
            world.ranks.append(rank)
            world.arenas.append(mapped)
            first += count
        return world.arenas

    def resume(self) -> None:
        self.world.client.resume(self.start(), list(self.world.wire_layers))


@pytest.fixture(params=[1, 3])
def world(request: pytest.FixtureRequest):
    with World([2] * request.param, capacity=4) as made:
        yield made


def combine_later(world: World, call, out: np.ndarray) -> threading.Thread:
    thread = threading.Thread(target=world.client.combine, args=(call, out.ctypes.data), daemon=True)
    thread.start()
    return thread


@pytest.mark.parametrize("rows", [0, 3, 11])
@pytest.mark.parametrize("moment", ["idle", "held at dispatch", "dispatched", "waiting", "resumed unnoticed"])
def test_a_post_is_answered_exactly_whenever_f_was_away(world: World, moment: str, rows: int) -> None:
    restarts = Restarts(world)
    rng = np.random.default_rng(rows)
    world.step(*batch(rng, 5, world))
    x, ids, weights = batch(rng, rows, world)
    call, out = world.call(x, ids, weights, 1), np.full_like(x, np.nan)
    restarts.kill()
    if moment in ("idle", "held at dispatch"):
        world.client.hold()
    if moment == "idle":
        restarts.resume()
    world.client.dispatch(call)
    if moment in ("dispatched", "resumed unnoticed"):
        world.client.hold()
    if moment == "resumed unnoticed":
        restarts.resume()
    thread = combine_later(world, call, out)
    if moment == "waiting":
        time.sleep(0.05)
        world.client.hold()
    if moment not in ("idle", "resumed unnoticed"):
        time.sleep(0.05)
        assert thread.is_alive()
        assert world.client.longest_wait()[0] == 0, "who is held does not wait for an answer"
        restarts.resume()
    thread.join(10)
    np.testing.assert_array_equal(out, oracle(1, x, ids, weights))
    assert world.client.counters()["resent"] == (0 if moment == "idle" else 1)
    np.testing.assert_array_equal(world.step(x, ids, weights), oracle(0, x, ids, weights))


def test_nothing_is_written_while_held(world: World) -> None:
    restarts = Restarts(world)
    restarts.kill()
    world.poison()
    before = [bytes(arena.view()) for arena in world.arenas]
    world.client.hold()
    x, ids, weights = batch(np.random.default_rng(0), 3, world)
    world.client.dispatch(world.call(x, ids, weights))
    assert [bytes(arena.view()) for arena in world.arenas] == before


def test_an_answer_of_only_some_f_ranks_is_not_mixed_with_those_of_the_next(world: World) -> None:
    x, ids, weights = batch(np.random.default_rng(0), 3, world)
    call, out = world.call(x, ids, weights), np.full_like(x, np.nan)
    restarts = Restarts(world)
    for rank in world.ranks[-1:]:
        rank.close()
    world.client.dispatch(call)
    thread = combine_later(world, call, out)
    time.sleep(0.05)
    world.client.hold()
    for rank in world.ranks[:-1]:
        rank.close()
    restarts.resume()
    thread.join(10)
    np.testing.assert_array_equal(out, oracle(0, x, ids, weights))
    for rank in world.ranks:
        assert len(rank.seen.rows) == 1


def test_a_late_answer_of_the_f_that_was_left_is_not_taken() -> None:
    with World([2], capacity=4) as world:
        world.ranks[0].close()
        left = world.ranks[0].receiver
        x, ids, weights = batch(np.random.default_rng(0), 3, world)
        call, out = world.call(x, ids, weights), np.full_like(x, np.nan)
        world.client.dispatch(call)
        thread = combine_later(world, call, out)
        item = left.receive(1_000_000) or left.receive(1_000_000)
        world.client.hold()
        time.sleep(0.02)
        restarts = Restarts(world)
        arenas = restarts.start()
        np.asarray(item.partial)[:] = 777
        world.client.resume(arenas, list(world.wire_layers))
        item.complete()
        thread.join(10)
        np.testing.assert_array_equal(out, oracle(0, x, ids, weights))


def test_failing_ends_the_hold_with_the_reason(world: World) -> None:
    Restarts(world).kill()
    x, ids, weights = batch(np.random.default_rng(0), 3, world)
    call, out = world.call(x, ids, weights), np.full_like(x, np.nan)
    world.client.hold()
    world.client.dispatch(call)
    threading.Timer(0.1, world.client.fail, args=("F did not come back",)).start()
    with pytest.raises(RuntimeError, match=r"^F did not come back$"):
        world.client.combine(call, out.ctypes.data)
    world.client.hold()
    world.client.resume(world.arenas, list(world.wire_layers))
    with pytest.raises(RuntimeError, match=r"^F did not come back$"):
        world.client.dispatch(call)


def test_windows_or_layers_of_another_number_are_refused(world: World) -> None:
    world.client.hold()
    with pytest.raises(ValueError, match="windows of 0 F ranks"):
        world.client.resume([], list(world.wire_layers))
    with pytest.raises(ValueError, match="1 layers, there were 2"):
        world.client.resume(world.arenas, [0])
    Restarts(world).kill()


def test_the_age_of_a_missing_answer_is_told_with_its_rank() -> None:
    with World([2, 2], capacity=4) as world:
        assert world.client.longest_wait() == (0.0, 0)
        world.ranks[1].close()
        x, ids, weights = batch(np.random.default_rng(0), 3, world)
        call, out = world.call(x, ids, weights), np.full_like(x, np.nan)
        world.client.dispatch(call)
        thread = combine_later(world, call, out)
        time.sleep(0.2)
        seconds, rank = world.client.longest_wait()
        assert seconds >= 0.1
        assert rank == 1
        world.client.hold()
        Restarts(world).kill()
        Restarts(world).resume()
        thread.join(10)


def test_restarts_at_random_moments_change_no_result(world: World) -> None:
    restarts, stop = Restarts(world), threading.Event()
    rng = np.random.default_rng(3)

    def churn() -> None:
        while not stop.wait(float(np.random.default_rng().uniform(0, 0.02))):
            world.client.hold()
            restarts.kill()
            restarts.resume()

    thread = threading.Thread(target=churn)
    thread.start()
    try:
        for number in range(300):
            x, ids, weights = batch(rng, number % 10, world)
            call, out = world.call(x, ids, weights), np.full_like(x, np.nan)
            world.client.dispatch(call)
            world.client.combine(call, out.ctypes.data)
            np.testing.assert_array_equal(out, oracle(0, x, ids, weights))
    finally:
        stop.set()
        thread.join()
