"""The layout as written down against the layout as compiled."""

import struct
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ffn_faas.connectors.base import WindowGeometry
from ffn_faas.protocol import window

geometries = st.builds(
    WindowGeometry,
    stages=st.integers(1, 8),
    capacity=st.integers(1, 1 << 20),
    hidden_size=st.integers(1, 20_000),
    top_k=st.integers(1, 256),
    element_size=st.sampled_from([1, 2, 4]),
)


@given(geometries)
def test_the_documented_layout_is_the_compiled_one(geometry: WindowGeometry) -> None:
    from ffn_faas.connectors.shm import native_geometry

    layout = window.window_layout(geometry)
    fields = {name: getattr(layout, name) for name in layout.__dataclass_fields__}
    assert fields == native_geometry(geometry).offsets()


@given(geometries)
def test_fields_follow_each_other_without_overlap(geometry: WindowGeometry) -> None:
    layout = window.window_layout(geometry)
    rows = geometry.capacity
    spans = [
        (layout.dispatch_flag, 8),
        (layout.dispatch_layer, 4),
        (layout.dispatch_rows, 4),
        (layout.dispatch_ids, rows * geometry.top_k * 4),
        (layout.dispatch_weights, rows * geometry.top_k * 4),
        (layout.dispatch_hidden, rows * geometry.hidden_size * geometry.element_size),
        (layout.combine_flag, 8),
        (layout.combine_sleeping, 4),
        (layout.combine_partial, rows * geometry.hidden_size * 4),
        (layout.stage_stride, 0),
    ]
    for (begin, size), (following, _) in pairwise(spans):
        assert begin + size <= following
    assert layout.stage(geometry.stages) == layout.nbytes
    lines = [begin // window.ALIGNMENT for begin, size in spans if size == 8 or begin == layout.combine_sleeping]
    assert len(set(lines)) == len(lines), "flags and words lie on cache lines of their own"


def test_the_header_says_what_was_agreed() -> None:
    from ffn_faas import native
    from ffn_faas.connectors.shm import native_geometry

    geometry = WindowGeometry(stages=2, capacity=3, hidden_size=4, top_k=5, element_size=2)
    arena = native.load().Arena.create(native_geometry(geometry), 7)
    header = struct.unpack_from("<8sII6Q", arena.view(), 0)
    assert header == (b"FFNWIN01", window.LAYOUT_VERSION, 2, 3, 4, 5, 2, 7, window.window_layout(geometry).nbytes)
    assert int.from_bytes(header[0], "little") == window.MAGIC
    assert native.load().LAYOUT_VERSION == window.LAYOUT_VERSION


@pytest.mark.parametrize("field", ["stages", "capacity", "hidden_size", "top_k", "element_size"])
def test_a_geometry_out_of_range_is_refused_by_name(field: str) -> None:
    from ffn_faas import native

    sizes = {"stages": 1, "capacity": 1, "hidden_size": 1, "top_k": 1, "element_size": 2, field: 0}
    with pytest.raises(ValueError, match=field):
        native.load().Geometry(**sizes)
