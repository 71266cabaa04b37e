"""What the client and the receiver say to calls that cannot be right."""

import os
from pathlib import Path

import numpy as np
import pytest

from ffn_faas import native
from ffn_faas.connectors.shm import native_geometry
from tests.native.world import EPOCH, World, batch


@pytest.fixture
def world():
    with World([2, 2], capacity=8) as made:
        yield made


def test_a_second_post_on_a_stage_is_an_error_and_the_first_one_is_still_answered(world: World) -> None:
    x, ids, weights = batch(np.random.default_rng(0), 3, world)
    call, out = world.call(x, ids, weights), np.empty_like(x)
    world.client.dispatch(call)
    with pytest.raises(RuntimeError, match="stage 0 has a post outstanding"):
        world.client.dispatch(call)
    with pytest.raises(RuntimeError, match="while a post is outstanding"):
        world.client.set_layers([0])
    world.client.combine(call, out.ctypes.data)
    with pytest.raises(RuntimeError, match="no post to combine"):
        world.client.combine(call, out.ctypes.data)


def test_combine_of_another_batch_than_dispatched_is_an_error(world: World) -> None:
    x, ids, weights = batch(np.random.default_rng(0), 3, world)
    world.client.dispatch(world.call(x, ids, weights))
    with pytest.raises(ValueError, match="2 rows of layer 0, but 3 rows of layer 0 were dispatched"):
        world.client.combine(world.call(x[:2], ids[:2], weights[:2]), np.empty_like(x).ctypes.data)


@pytest.mark.parametrize("bad", [4, -2])
def test_an_expert_id_out_of_range_is_refused_before_anything_is_sent(world: World, bad: int) -> None:
    x, ids, weights = batch(np.random.default_rng(0), 3, world)
    ids[2, 1] = bad
    with pytest.raises(ValueError, match=f"row 2 names expert {bad} of 4"):
        world.client.dispatch(world.call(x, ids, weights))
    ids[2, 1] = 0
    world.step(x, ids, weights)


def test_unknown_stages_and_layers_are_refused(world: World) -> None:
    x, ids, weights = batch(np.random.default_rng(0), 1, world)
    with pytest.raises(ValueError, match="stage 1 was not agreed"):
        world.client.dispatch(world.call(x, ids, weights, stage=1))
    with pytest.raises(ValueError, match="no layer 2 among 2"):
        world.client.dispatch(world.call(x, ids, weights, handle=2))


def test_dispatch_before_all_windows_are_there_names_the_missing_rank(world: World) -> None:
    client = native.load().AttentionClient(native_geometry(world.geometry), [2, 2])
    client.set_layers([0])
    client.set_link(0, world.arenas[0])
    x, ids, weights = batch(np.random.default_rng(0), 1, world)
    with pytest.raises(RuntimeError, match="windows of F rank 1 are not set"):
        client.dispatch(world.call(x, ids, weights))


def test_an_item_is_completed_once() -> None:
    with World([1], top_k=1) as world:
        rank = world.ranks[0]
        rank.close()
        x, ids, weights = batch(np.random.default_rng(0), 1, world)
        world.client.dispatch(world.call(x, ids, weights))
        item = rank.receiver.receive(1_000_000) or rank.receiver.receive(1_000_000)
        item.complete()
        with pytest.raises(RuntimeError, match="completed before"):
            item.complete()


def test_a_link_key_is_used_once(world: World) -> None:
    with pytest.raises(ValueError, match="link 0 exists"):
        world.ranks[0].receiver.add_link(0, world.arenas[0], [1])


@pytest.mark.parametrize("epoch", [0, 1 << 24])
def test_an_epoch_that_a_flag_cannot_hold_is_refused(world: World, epoch: int) -> None:
    with pytest.raises(ValueError, match="epoch"):
        native.load().Arena.create(native_geometry(world.geometry), epoch)


def test_windows_of_another_epoch_are_refused_and_their_descriptors_closed(world: World) -> None:
    module = native.load()
    arena = module.Arena.create(native_geometry(world.geometry), EPOCH)
    before = len(list(Path("/proc/self/fd").iterdir()))
    with pytest.raises(ValueError, match=f"epoch is {EPOCH}, agreed was {EPOCH + 1}"):
        module.Arena.map(os.dup(arena.fd), -1, native_geometry(world.geometry), EPOCH + 1)
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_memory_that_could_shrink_under_its_user_is_refused(world: World) -> None:
    module = native.load()
    shape = native_geometry(world.geometry)
    arena = module.Arena.create(shape, EPOCH)
    with pytest.raises(PermissionError):
        os.ftruncate(arena.fd, 0)
    unsealed = os.memfd_create("unsealed")
    os.write(unsealed, bytes(arena.view()))
    with pytest.raises(ValueError, match="can be resized"):
        module.Arena.map(unsealed, -1, shape, EPOCH)
