"""Posts of several links as items: merged, split, in turn, and never mixed up."""

import numpy as np
import pytest

from ffn_faas import native
from ffn_faas.connectors.shm import native_geometry
from tests.native.hand_written_peer import HandWrittenPeer
from tests.native.sessions import Sessions
from tests.native.world import EPOCH, answer

BUCKETS = [1, 2, 4, 8, 16, -1]


def test_ready_posts_of_one_layer_are_one_item_and_other_layers_wait_their_turn() -> None:
    sessions = Sessions(4)
    for key, (rows, handle) in enumerate([(3, 0), (5, 1), (2, 0), (0, 0)]):
        sessions.post(key, rows, handle)
    assert sessions.item() == [(0, 3), (2, 2), (3, 0)]
    assert sessions.item() == [(1, 5)]
    assert sessions.item() is None
    sessions.check(0, 1, 2, 3)
    counters = sessions.receiver.counters()
    assert (counters["steps"], counters["posts"], counters["rows"], counters["splits"]) == (2, 4, 10, 0)
    assert sessions.receiver.posts_per_item() == (list(zip(BUCKETS, [1, 0, 1, 0, 0, 0], strict=True)), 4)


def test_an_item_is_never_larger_than_its_limit() -> None:
    sessions = Sessions(3, item_limit=6)
    for key, rows in enumerate((4, 4, 2)):
        sessions.post(key, rows)
    assert [sessions.item(), sessions.item()] == [[(0, 4), (2, 2)], [(1, 4)]]
    sessions.check(0, 1, 2)


def test_a_long_post_comes_in_parts_and_others_are_served_in_between() -> None:
    sessions = Sessions(2, item_limit=4)
    sessions.post(0, 11)
    sessions.post(1, 2, handle=1)
    order = []
    for _ in range(3):
        order.append(sessions.item())
        if order[-1] == [(1, 2)]:
            sessions.check(1)
            sessions.post(1, 2, handle=1)
    assert order == [[(0, 4)], [(1, 2)], [(0, 4)]]
    assert [sessions.item(), sessions.item(), sessions.item()] == [[(1, 2)], [(0, 3)], None]
    sessions.check(0, 1)
    assert sessions.receiver.counters()["splits"] == 2


def test_the_last_part_of_a_long_post_is_merged_with_what_is_ready() -> None:
    sessions = Sessions(2, item_limit=4)
    sessions.post(0, 6)
    assert sessions.item() == [(0, 4)]
    sessions.post(1, 2)
    assert sessions.item() == [(1, 2), (0, 2)]
    sessions.check(0, 1)


@pytest.mark.parametrize("count", [2, 5])
def test_a_decode_waits_for_at_most_one_item_of_every_other_session(count: int) -> None:
    sessions = Sessions(count, item_limit=2)
    for key in range(1, count):
        sessions.post(key, 16, handle=1)
    for _ in range(20):
        sessions.post(0, 1)
        waited = 0
        while sessions.item() != [(0, 1)]:
            waited += 1
            assert waited < count
        sessions.check(0)
        for key in [
            key for key in range(1, count) if sessions.clients[key].counters()["posts"] and answered(sessions, key)
        ]:
            sessions.check(key)
            sessions.post(key, 16, handle=1)


def answered(sessions: Sessions, key: int) -> bool:
    """Whether the outstanding post of a client was answered, by the words of the protocol."""
    offsets = native_geometry(sessions.world.geometry).offsets()
    memory = np.frombuffer(sessions.arenas[key].view(), np.uint8)
    flags = [
        memory[offsets["first_stage"] + offsets[name] :][:8].view(np.uint64)[0]
        for name in ("dispatch_flag", "combine_flag")
    ]
    return bool(flags[0] == flags[1])


def test_one_post_is_computed_where_it_lies_and_merged_ones_elsewhere() -> None:
    sessions = Sessions(2)

    windows = np.frombuffer(sessions.arenas[1].view(), np.uint8)
    for keys in ((1,), (0, 1)):
        for key in keys:
            sessions.post(key, 3)
        item = sessions.receiver.receive(0)
        assert np.shares_memory(np.asarray(item.hidden), windows) is (len(keys) == 1)
        assert np.shares_memory(np.asarray(item.partial), windows) is (len(keys) == 1)
        answer(item, 0, "float32")
        item.complete()
        sessions.check(*keys)


def test_a_sibling_that_breaks_the_protocol_costs_only_itself() -> None:
    sessions = Sessions(2)
    arena = native.load().Arena.create(native_geometry(sessions.world.geometry), EPOCH)
    sessions.receiver.add_link(9, arena, [4, 4])
    hostile = HandWrittenPeer(arena.view(), sessions.receiver.doorbell, sessions.world.geometry, EPOCH)
    sessions.post(0, 3)
    sessions.post(1, 2)
    hostile.post(0, 1, [0, 4], [1.0, 1.0], bytes(32))
    assert sessions.item() == [(0, 3), (1, 2)]
    sessions.check(0, 1)
    assert [link for link, _ in sessions.receiver.take_faults()] == [9]
    assert not hostile.answered()


def test_a_link_removed_in_the_middle_of_an_item_does_not_disturb_the_others() -> None:
    sessions = Sessions(3)
    for key in range(3):
        sessions.post(key, 4)
    item = sessions.receiver.receive(0)
    assert len(item.parts) == 3
    sessions.receiver.remove_link(1)
    answer(item, 0, "float32")
    item.complete()
    sessions.check(0, 2)
    assert not answered(sessions, 1)
    memory = np.frombuffer(sessions.arenas[1].view(), np.uint8)
    offsets = native_geometry(sessions.world.geometry).offsets()
    partial = memory[offsets["first_stage"] + offsets["combine_partial"] :][: 4 * 8 * 4].view(np.float32)
    assert np.isnan(partial).all(), "nothing is written for who is gone"


def test_while_a_merged_item_is_computed_others_are_taken_one_by_one() -> None:
    sessions = Sessions(4)
    sessions.post(0, 1)
    sessions.post(1, 1)
    merged = sessions.receiver.receive(0)
    sessions.post(2, 1)
    sessions.post(3, 1)
    assert [sessions.item(), sessions.item()] == [[(2, 1)], [(3, 1)]]
    answer(merged, 0, "float32")
    merged.complete()
    sessions.check(0, 1, 2, 3)


def test_nonsense_limits_are_refused() -> None:
    for options in ({"item_limit": 0}, {"merge_wait_us": -1}):
        with pytest.raises(ValueError, match=r"item limit is 0 rows|wait for siblings is negative"):
            native.load().ItemReceiver(**options)


@pytest.mark.parametrize("dtype", [0, 2])
def test_the_native_kernel_gives_the_same_bits_alone_merged_and_in_parts(dtype: int) -> None:
    module = native.load()
    hidden, inter, experts = 64, 32, 6
    rng = np.random.default_rng(1)
    kernel = module.ExpertsCpu(
        layers=1, experts=experts, hidden_size=hidden, intermediate_size=inter, dtype=dtype, threads=2
    )
    element = {0: np.float32, 2: np.uint16}[dtype]

    def draw(*shape: int) -> np.ndarray:
        values = rng.normal(size=shape).astype(np.float32)
        return values if dtype == 0 else (values.view(np.uint32) >> 16).astype(np.uint16)

    for expert in range(experts):
        for matrix, shape in enumerate([(inter, hidden), (inter, hidden), (hidden, inter)]):
            values = draw(*shape)
            kernel.pack(0, expert, matrix, values.ctypes.data)
    from ffn_faas.connectors.base import WindowGeometry

    shape = native_geometry(WindowGeometry(1, 40, hidden, 3, np.dtype(element).itemsize))
    posts = [(draw(rows, hidden), rng.integers(-1, experts, (rows, 3)).astype(np.int32)) for rows in (1, 33, 7, 2, 40)]

    def answers(together: bool, **options: int) -> list[bytes]:
        receiver = module.ItemReceiver(merge_wait_us=0, **options)
        calls, outs = [], []
        for key, (x, ids) in enumerate(posts):
            arena = module.Arena.create(shape, key + 1)
            arena.poison()
            client = module.AttentionClient(shape, [experts])
            client.set_layers([0])
            client.set_link(0, arena)
            receiver.add_link(key, arena, [experts])
            weights = np.linspace(0.1, 1, ids.size, dtype=np.float32).reshape(ids.shape)
            call = module.Call(
                stage=0, handle=0, rows=len(x), hidden_size=hidden, top_k=3, dtype=dtype, x=x.ctypes.data,
                ids=ids.ctypes.data, ids_are_int64=False, weights=weights.ctypes.data,
            )  # fmt: skip
            client.dispatch(call)
            out = np.zeros(x.shape, element)
            calls.append((client, call, out, weights))
            outs.append(out)
            while not together and receiver.step(kernel.address, 0):
                pass
        while receiver.step(kernel.address, 0):
            pass
        for client, call, out, _ in calls:
            client.combine(call, out.ctypes.data)
        return [out.tobytes() for out in outs]

    alone = answers(together=False)
    assert answers(together=True) == alone
    assert answers(together=True, item_limit=9) == alone
    assert any(any(values) for values in alone)
