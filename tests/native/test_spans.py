"""Times of single items and posts: kept only when asked for, in order, as many as asked for."""

from __future__ import annotations

import time

import numpy as np
import pytest

from .world import World, batch


def steps(world: World, count: int, rows: int = 5) -> None:
    rng = np.random.default_rng(0)
    for _ in range(count):
        world.step(*batch(rng, rows, world))


def test_nothing_is_kept_that_nobody_asked_for():
    with World([2, 2]) as world:
        steps(world, 3)
        assert world.client.take_spans() == []
        assert [rank.receiver.take_spans() for rank in world.ranks] == [[], []]


def test_times_of_both_sides_follow_each_other_and_stop_at_the_limit():
    with World([4]) as world:
        receiver = world.ranks[0].receiver
        steps(world, 2)
        begin = time.monotonic_ns()
        receiver.record(3)
        world.client.record(3)
        steps(world, 5)
        end = time.monotonic_ns()
        assert receiver.recorded() == 3
        items, posts = receiver.take_spans(), world.client.take_spans()
        assert len(items) == len(posts) == 3
        for item, post in zip(items, posts, strict=True):
            began, taken, gathered, sorted_at, computed, sent, layer, rows, parts = item
            assert sorted_at == 0, "this F computes in Python and sorts nothing"
            assert begin <= began <= taken <= gathered <= computed <= sent <= end
            dispatching, dispatched, waiting, answered, summed, stage, post_layer, post_rows = post
            assert begin <= dispatching <= dispatched <= waiting <= answered <= summed <= end
            assert dispatching <= taken <= computed <= answered, "the item lies inside its post"
            assert (layer, rows, parts) == (0, 5, 1)
            assert (stage, post_layer, post_rows) == (0, 0, 5)
        assert receiver.take_spans() == world.client.take_spans() == []


def test_every_chunk_of_a_long_batch_is_a_post_of_its_own():
    with World([4], capacity=4) as world:
        world.client.record(10)
        steps(world, 1, rows=9)
        posts = world.client.take_spans()
        assert [post[-1] for post in posts] == [4, 4, 1]
        ends = [post[4] for post in posts]
        assert all(end <= following[0] for end, following in zip(ends, posts[1:], strict=False))


@pytest.mark.parametrize("limit", [0, -1, 4097])
def test_a_number_out_of_bounds_is_refused(limit):
    with World([4]) as world:
        for one in (world.client, world.ranks[0].receiver):
            with pytest.raises(ValueError, match="4096"):
                one.record(limit)
