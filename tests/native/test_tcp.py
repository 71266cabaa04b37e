"""Windows over TCP: what a stream peer may send, and how a connection ends."""

import socket
import struct
import time

import numpy as np
import pytest

from ffn_faas import native
from ffn_faas.connectors.shm import native_geometry
from ffn_faas.protocol.stream import ANSWER, POST
from ffn_faas.protocol.window import flag
from tests.native import world as worlds
from tests.native.world import EPOCH, World, answer, batch, oracle

HOSTILE_LINK = 9
EPOCH_OF_THE_OTHER = EPOCH + 4


@pytest.fixture
def world():
    with World([3], top_k=2, hidden_size=4, capacity=4) as made:
        yield made


sockets: list[socket.socket] = []


@pytest.fixture(autouse=True)
def _close_sockets():
    yield
    while sockets:
        sockets.pop().close()


def pair() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        near = socket.create_connection(listener.getsockname())
        far, _ = listener.accept()
    sockets.extend((near, far))
    return near, far


class StreamPeer:
    """An A rank written from ffn_faas/protocol/stream.py alone, beside the client of ``world``."""

    def __init__(self, world: World) -> None:
        rank = world.ranks[0]
        self.socket, far = pair()
        self.socket.settimeout(10)
        arena = native.load().Arena.create(native_geometry(world.geometry), EPOCH_OF_THE_OTHER)
        rank.receiver.add_link(HOSTILE_LINK, arena, rank.counts)
        rank.mirrors.append(native.load().ServiceMirror(far.detach(), arena, rank.receiver, HOSTILE_LINK))

    def post(self, sequence: int, layer: int, rows: int, ids, weights, x, stage: int = 0) -> None:
        head = POST.pack(flag(EPOCH_OF_THE_OTHER, sequence), stage, layer, rows, 0)
        arrays = (np.asarray(ids, np.int32), np.asarray(weights, np.float32), np.asarray(x, np.float32))
        self.socket.sendall(head + b"".join(array.tobytes() for array in arrays))

    def read(self, count: int) -> bytes:
        data = b""
        while len(data) < count:
            part = self.socket.recv(count - len(data))
            if not part:
                raise EOFError
            data += part
        return data

    def answer(self, sequence: int, rows: int) -> np.ndarray:
        assert ANSWER.unpack(self.read(ANSWER.size)) == (flag(EPOCH_OF_THE_OTHER, sequence), 0, rows)
        return np.frombuffer(self.read(rows * 16), np.float32).reshape(rows, 4)


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


def test_a_peer_written_from_the_documentation_is_served(world: World) -> None:
    peer = StreamPeer(world)
    for sequence, rows in enumerate((2, 0, 4), 1):
        x = np.arange(rows * 4, dtype=np.float32).reshape(rows, 4)
        ids = np.array([[0, 2], [-1, 1], [1, 1], [-1, -1]])[:rows]
        weights = np.array([[1.0, 0.5], [7.0, 2.0], [0.25, 1], [3, 3]])[:rows]
        peer.post(sequence, 1, rows, ids, weights, x)
        np.testing.assert_array_equal(peer.answer(sequence, rows), oracle(1, x, ids, weights))
    check_other_link(world)


@pytest.mark.parametrize(
    ("head", "reason"),
    [
        ((flag(EPOCH_OF_THE_OTHER, 1), 0, 0, 5, 0), "5 rows, capacity is 4"),
        ((flag(EPOCH_OF_THE_OTHER, 1), 0, 0, -1, 0), "-1 rows, capacity is 4"),
        ((flag(EPOCH_OF_THE_OTHER, 1), 0, 0, 2**31 - 1, 0), "2147483647 rows, capacity is 4"),
        ((flag(EPOCH_OF_THE_OTHER, 1), 1, 0, 1, 0), "stage 1 of 1"),
        ((flag(EPOCH_OF_THE_OTHER, 1), -1, 0, 1, 0), "stage -1 of 1"),
        ((flag(EPOCH_OF_THE_OTHER, 1), 2**31 - 1, 0, 1, 0), "stage 2147483647 of 1"),
        ((flag(EPOCH_OF_THE_OTHER, 2), 0, 0, 0, 0), "out of turn"),
        ((flag(EPOCH, 1), 0, 0, 0, 0), "out of turn"),
        ((0, 0, 0, 0, 0), "out of turn"),
        ((2**64 - 1, 0, 0, 0, 0), "out of turn"),
        ((flag(EPOCH_OF_THE_OTHER, 1), 0, 2, 0, 0), "layer 2 of 2"),
        ((flag(EPOCH_OF_THE_OTHER, 1), 0, -1, 0, 0), "layer -1 of 2"),
    ],
)
def test_a_wild_head_costs_that_link_and_nothing_else(world: World, head: tuple, reason: str) -> None:
    peer = StreamPeer(world)
    check_other_link(world)
    peer.socket.sendall(POST.pack(*head))
    assert [(link, reason in text) for link, text in faults(world)] == [(HOSTILE_LINK, True)]
    check_other_link(world)


@pytest.mark.parametrize("ids", [[3, 0], [-2, 0], [0, 2**31 - 1], [0, -(2**31)]])
def test_a_wild_expert_id_costs_that_link_and_nothing_else(world: World, ids: list[int]) -> None:
    peer = StreamPeer(world)
    peer.post(1, 0, 1, ids, [1, 1], [0] * 4)
    assert [(link, "local expert" in text) for link, text in faults(world)] == [(HOSTILE_LINK, True)]
    check_other_link(world)


def test_a_second_post_before_the_answer_costs_that_link_and_cannot_change_the_first(world: World) -> None:
    world.ranks[0].close()
    receiver = world.ranks[0].receiver
    peer = StreamPeer(world)
    peer.post(1, 0, 1, [0, 1], [1, 1], [1, 2, 3, 4])
    item = next(filter(None, (receiver.receive(1_000_000) for _ in range(10))))
    peer.post(2, 0, 1, [99, 99], [1, 1], [9, 9, 9, 9])
    assert [(link, "out of turn" in text) for link, text in faults(world)] == [(HOSTILE_LINK, True)]
    assert np.asarray(item.expert_ids).tolist() == [[0, 1]]
    assert np.asarray(item.hidden).view(np.float32).tolist() == [[1, 2, 3, 4]]
    item.complete()


@pytest.mark.parametrize("sent", [0, 1, POST.size, POST.size + 5])
def test_a_peer_that_goes_in_the_middle_of_a_post_is_no_fault_and_leaves_others_alone(world: World, sent: int) -> None:
    peer = StreamPeer(world)
    whole = POST.pack(flag(EPOCH_OF_THE_OTHER, 1), 0, 0, 2, 0) + bytes(64)
    peer.socket.sendall(whole[:sent])
    peer.socket.close()
    check_other_link(world)
    assert world.ranks[0].receiver.take_faults() == []


def test_a_peer_that_reads_nothing_harms_no_other(world: World) -> None:
    peer = StreamPeer(world)
    peer.post(1, 0, 4, [[0, 1]] * 4, [[1, 1]] * 4, [[0] * 4] * 4)
    for _ in range(20):
        check_other_link(world)
    world.ranks[0].leave()


@pytest.mark.parametrize("reply", ["stage", "flag", "rows", "twice", "cut"])
def test_a_hostile_f_fails_only_the_windows_and_says_why(reply: str) -> None:
    module, geometry = native.load(), worlds.WindowGeometry(1, 4, 4, 2, 4)
    near, far = pair()
    arena = module.connect_windows(near.detach(), native_geometry(geometry), EPOCH)
    client = module.AttentionClient(native_geometry(geometry), [3])
    client.set_layers([0])
    client.set_link(0, arena)
    x, ids, weights = np.ones((2, 4), np.float32), np.zeros((2, 2), np.int32), np.ones((2, 2), np.float32)
    call = module.Call(
        stage=0, handle=0, rows=2, hidden_size=4, top_k=2, dtype=module.F32,
        x=x.ctypes.data, ids=ids.ctypes.data, ids_are_int64=False, weights=weights.ctypes.data,
    )  # fmt: skip
    client.dispatch(call)
    far.settimeout(10)
    got = b""
    while len(got) < POST.size + 2 * (8 + 8 + 16):
        part = far.recv(4096)
        assert part, arena.failure
        got += part
    assert POST.unpack_from(got) == (flag(EPOCH, 1), 0, 0, 2, 0)
    good = (flag(EPOCH, 1), 0, 2)
    heads = {"stage": (good[0], 7, 2), "flag": (good[0] + 1, 0, 2), "rows": (good[0], 0, 3), "cut": good}
    body = np.full((2, 4), 5, np.float32).tobytes()
    if reply == "twice":
        far.sendall((ANSWER.pack(*good) + body) * 2)
        out = np.empty_like(x)
        client.combine(call, out.ctypes.data)
        assert (out == 5).all()
    else:
        far.sendall(ANSWER.pack(*heads[reply]) + body[: 3 if reply == "cut" else None])
    far.close()
    deadline = time.monotonic() + 10
    while not arena.failure:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    expected = "inside a message" if reply == "cut" else "F answered"
    assert expected in arena.failure


def test_a_session_over_tcp_and_one_over_shared_memory_share_an_item(monkeypatch: pytest.MonkeyPatch) -> None:
    module = native.load()
    with World([4], capacity=16, hidden_size=8, merge_wait_us=0) as world:
        world.ranks[0].close()
        receiver, shape = world.ranks[0].receiver, native_geometry(world.geometry)
        monkeypatch.setattr(worlds, "over", "tcp")
        remote = module.AttentionClient(shape, [4])
        remote.set_layers(list(world.wire_layers))
        windows = worlds.join(world.ranks[0], shape, EPOCH + 1, key=1)
        remote.set_link(0, windows)
        receiver.cancel()
        receiver.receive(0)
        rng, posts = np.random.default_rng(0), []
        for client in (remote, world.client):
            x, ids, weights = batch(rng, 5, world)
            call = world.call(x, ids, weights)
            client.dispatch(call)
            posts.append((client, call, x, ids, weights))
        time.sleep(0.2)  # the remote post has to travel first
        item = receiver.receive(1_000_000) or receiver.receive(1_000_000)
        assert sorted(link for link, _, _ in item.parts) == [0, 1]
        answer(item, 0, "float32")
        item.complete()
        for client, call, x, ids, weights in posts:
            out = np.full_like(x, np.nan)
            client.combine(call, out.ctypes.data)
            np.testing.assert_array_equal(out, oracle(0, x, ids, weights))


def test_closing_leaves_no_thread_and_no_descriptor(world: World) -> None:
    from pathlib import Path

    def held() -> tuple[int, int]:
        return len(list(Path("/proc/self/task").iterdir())), len(list(Path("/proc/self/fd").iterdir()))

    shape, before = native_geometry(world.geometry), held()
    for number in range(50):
        near, far = pair()
        arena = native.load().Arena.create(shape, EPOCH)
        mirror = native.load().ServiceMirror(far.detach(), arena, world.ranks[0].receiver, 100 + number)
        windows = native.load().connect_windows(near.detach(), shape, EPOCH)
        if number % 2:
            mirror.close()
            mirror.close()
        del mirror, windows, arena
    assert held() == before


def test_posts_of_any_size_cross_a_slow_reader_whole() -> None:
    """Parts larger than the socket buffers: sends and receives come in pieces."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(worlds, "over", "tcp")
        with World([3, 2], capacity=512, hidden_size=2048) as large:
            rng = np.random.default_rng(3)
            for rows in (512, 1, 700):
                x, ids, weights = batch(rng, rows, large)
                np.testing.assert_array_equal(large.step(x, ids, weights), oracle(0, x, ids, weights))


def test_the_stream_layout_is_the_one_that_the_documentation_states() -> None:
    assert (POST.size, ANSWER.size) == (24, 16)
    assert POST.pack(1, 2, 3, 4, 5) == struct.pack("<Q", 1) + struct.pack("<iiii", 2, 3, 4, 5)
