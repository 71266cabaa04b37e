"""Several Attention ranks on the rig's A, each with windows and a lane of its own; the rig's own lane 0 is replaced."""

from ffn_faas.connectors.base import WindowGeometry
from ffn_faas.connectors.m2n_attention import M2nAttention
from ffn_faas.connectors.m2n_window import addresses, combine_layout, dispatch_layout
from ffn_faas.protocol.window import flag

EPOCH = 20


class Lanes:
    """``attentions`` by lane. ``capacity``: most rows of a post."""

    def __init__(self, rig, count, capacity):
        self.rig, self.capacity, library = rig, capacity, rig.library
        self.geometry = WindowGeometry(1, capacity, rig.shape.hidden, rig.shape.top_k, 2)
        self.attentions, self.memory = [], []
        for lane in range(count):
            library.call("use_device", rig.f)
            dispatch = library.allocate(dispatch_layout(self.geometry).nbytes)
            library.call("use_device", rig.a)
            combine = library.allocate(combine_layout(self.geometry).nbytes)
            attention = M2nAttention(library, self.geometry, [rig.shape.experts], timeout_s=20.0, beside=rig.beside)
            where = addresses(self.geometry, dispatch, combine, 0)
            attention.set_link(0, 0, where, EPOCH + lane)
            attention.begin()
            library.call("use_device", rig.f)
            rig.service.set_lane(lane, where, capacity, flag(EPOCH + lane, 1))
            self.attentions.append(attention)
            self.memory.append((dispatch, combine))
        library.call("use_device", rig.a)

    def post(self, lane, layer, batch, stream):
        where = batch.x.data_ptr(), batch.ids.data_ptr(), batch.weights.data_ptr()
        self.attentions[lane].dispatch(0, layer, *where, batch.x.shape[0], stream)

    def receive(self, lane, batch, stream):
        self.attentions[lane].receive(0, batch.out.data_ptr(), batch.x.shape[0], stream)

    def poison(self, nan):
        """NaN into the rows of all windows; ``nan`` holds as many values as a window. Nothing is in flight."""
        on_f, on_a = dispatch_layout(self.geometry).hidden, combine_layout(self.geometry).partial
        for dispatch, combine in self.memory:
            for where in (dispatch + on_f, combine + on_a):
                self.rig.library.call("copy", where, nan.data_ptr(), nan.numel() * 2)

    def close(self):
        for attention in self.attentions:
            assert attention.status(0) == "fine"
            attention.close()
        for lane, arenas in enumerate(self.memory):
            self.rig.library.call("use_device", self.rig.f)
            self.rig.service.set_lane(lane, None)
            for arena in arenas:
                self.rig.library.call("free", arena)
