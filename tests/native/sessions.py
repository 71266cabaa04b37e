"""Several Attention clients on one F rank that a test steps itself."""

from __future__ import annotations

import numpy as np

from ffn_faas import native
from ffn_faas.connectors.shm import native_geometry
from tests.native.world import EPOCH, World, answer, batch, oracle


class Sessions:
    """One F rank stepped by the test, and any number of Attention clients on it."""

    def __init__(
        self,
        count: int,
        *,
        experts: int = 4,
        capacity: int = 16,
        hidden_size: int = 8,
        merge_wait_us: int = 0,
        **options: int,
    ) -> None:
        shape = {"capacity": capacity, "hidden_size": hidden_size}
        self.world = World([experts], merge_wait_us=merge_wait_us, **shape, **options)
        self.world.ranks[0].close()
        self.receiver = self.world.ranks[0].receiver
        self.clients = [self.world.client]
        self.arenas = list(self.world.arenas)
        self.posts: dict[tuple[int, int], tuple] = {}
        for key in range(1, count):
            self.attach(key)
        self.receiver.cancel()
        assert self.receiver.receive(0) is None
        self.rng = np.random.default_rng(count)

    def attach(self, key: int) -> None:
        """A new link and client, the next or in the place of one that was removed."""
        geometry, counts = native_geometry(self.world.geometry), self.world.expert_counts
        arena = native.load().Arena.create(geometry, EPOCH + key)
        client = native.load().AttentionClient(geometry, counts)
        client.set_layers(list(self.world.wire_layers))
        client.set_link(0, arena)
        self.receiver.add_link(key, arena, counts * 2)
        self.clients[key : key + 1] = [client]
        self.arenas[key : key + 1] = [arena]

    def post(self, key: int, rows: int, handle: int = 0, stage: int = 0) -> None:
        if not any(posted == key for posted, _ in self.posts):
            self.arenas[key].poison()
        x, ids, weights = batch(self.rng, rows, self.world, padding=0)
        call = self.world.call(x, ids, weights, handle, stage)
        self.clients[key].dispatch(call)
        self.posts[key, stage] = (call, handle, x, ids, weights)

    def item(self):
        """Take one item, compute it, and say which links it was made of."""
        item = self.receiver.receive(0)
        if item is None:
            return None
        answer(item, 0, "float32")
        parts = [(link, rows) for link, _, rows in item.parts]
        assert sum(rows for _, rows in parts) == item.rows
        item.complete()
        return parts

    def check(self, *keys: int, stage: int = 0) -> None:
        for key in keys:
            call, handle, x, ids, weights = self.posts.pop((key, stage))
            out = np.full_like(x, np.nan)
            self.clients[key].combine(call, out.ctypes.data)
            np.testing.assert_array_equal(out, oracle(handle, x, ids, weights))
