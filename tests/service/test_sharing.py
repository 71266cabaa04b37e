"""Instances of different shape on one F world at once: every answer is exact, whoever comes and goes beside it."""

from __future__ import annotations

import contextlib
import threading
import time

import pytest

from tests.service.faults import AttentionProcess
from tests.service.gated_world import GatedWorld
from tests.service.player import Player
from tests.waiting import wait_until

SHAPES = {"one-rank-in-chunks": (1, 7), "two-ranks": (2, 64), "three-ranks-of-one-row": (3, 1)}
"""Ranks and capacity of each instance."""
LAYOUTS = {
    "2A2F": (2, {"data-or-tensor-parallel": (2, 64)}),
    "3A1F": (1, {"first": (1, 64), "second": (1, 16), "third": (1, 64)}),
    "1A3F": (3, {"one": (1, 64)}),
}
"""F ranks, and instances as above; eight experts on three ranks are an uneven split."""
STEPS = 40


@contextlib.contextmanager
def in_parallel(world, shapes):
    """Every rank of every instance posts ``STEPS`` times while the block runs; at its end all have finished."""
    failures = []

    def serve(instance, rank, size, capacity):
        try:
            player = Player(world.port, world.model, instance, None, rank, size, capacity).join()
            for _ in range(STEPS):
                player.step()
            player.close()
        except Exception as error:  # noqa: BLE001 - raised below
            failures.append((instance, rank, error))

    threads = [
        threading.Thread(target=serve, args=(instance, rank, size, capacity))
        for instance, (size, capacity) in shapes.items()
        for rank in range(size)
    ]
    for thread in threads:
        thread.start()
    yield
    for thread in threads:
        thread.join(120)
    assert failures == []
    assert not any(thread.is_alive() for thread in threads)


def test_two_and_more_instances_of_different_shape_share_one_f(tmp_path):
    with GatedWorld(tmp_path, ranks=2) as world:
        world.wait_phase("ready")
        with in_parallel(world, SHAPES):
            for _ in range(3):
                passer_by = Player(world.port, world.model, "comes-and-goes").join()
                passer_by.step()
                passer_by.close()
        text = world.get("/metrics").text
        assert f'ffn_faas:attaches_total{{kind="first"}} {sum(size for size, _ in SHAPES.values()) + 3}.0' in text
        assert "ffn_faas:window_bytes 0.0" in text
        assert [world.get("/status", rank).json()["sessions"] for rank in (0, 1)] == [[], []]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_answer_is_exact_and_a_killed_attention_costs_the_others_nothing(tmp_path, layout):
    f_ranks, shapes = LAYOUTS[layout]
    with GatedWorld(tmp_path, ranks=f_ranks) as world:
        world.wait_phase("ready")
        with in_parallel(world, shapes), AttentionProcess(world, "killed", "half") as other:
            other.wait()
        for rank in range(f_ranks):
            wait_until(lambda rank=rank: world.sessions(rank) == {}, what="the killed instance's end")


@pytest.mark.parametrize("flags", [("--max-sessions", "1"), ("--window-memory", "16KiB")])
def test_who_does_not_fit_is_refused_by_the_limits_name_and_the_other_goes_on(tmp_path, flags):
    with GatedWorld(tmp_path, ranks=1, flags=flags) as world:
        world.wait_phase("ready")
        first = Player(world.port, world.model, "first", capacity=16).join()
        with pytest.raises(Exception, match=flags[0]):
            Player(world.port, world.model, "second", capacity=16).granted()
        first.step()
        first.close()


@pytest.mark.parametrize("slow", [0, 1])
def test_a_post_in_flight_is_answered_by_all_ranks_before_a_stop_ends_its_session(tmp_path, slow):
    with GatedWorld(tmp_path, ranks=2) as world:
        world.wait_phase("ready")
        world.close("compute", slow)
        player = Player(world.port, world.model, "in-flight").join()
        player.dispatched()
        world.wait_at("compute", slow)
        world.client.post(f"http://127.0.0.1:{world.port}/stop")
        world.wait_phase("draining")
        # The other rank has nothing left to do, and time to make a mistake.
        assert not any(has_ended(world, "in-flight", 1 - slow) for _ in range(40))
        world.open("compute", slow)
        player.answered()
        assert [process.wait(30) for process in world.processes] == [0, 0]
        player.close()


def has_ended(world, instance, rank):
    time.sleep(0.01)
    return instance not in world.sessions(rank)
