"""Windows in GPU memory: nothing overlaps, everything is aligned, and both sides agree."""

from dataclasses import astuple

from hypothesis import given
from hypothesis import strategies as st

from ffn_faas.connectors.base import WindowGeometry
from ffn_faas.connectors.m2n_window import addresses, combine_layout, dispatch_layout

geometries = st.builds(
    WindowGeometry,
    stages=st.integers(1, 8),
    capacity=st.integers(1, 5000),
    hidden_size=st.integers(1, 64).map(lambda n: 128 * n),
    top_k=st.integers(1, 32),
    element_size=st.just(2),
)


@given(geometries)
def test_fields_of_a_stage_follow_each_other_without_overlap(geometry):
    rows = geometry.capacity
    layout = dispatch_layout(geometry)
    assert layout.flag + 8 <= layout.head
    assert layout.head + 8 <= layout.ids
    assert layout.ids + rows * geometry.top_k * 4 <= layout.weights
    assert layout.weights + rows * geometry.top_k * 4 <= layout.hidden
    assert layout.hidden + rows * geometry.hidden_size * 2 <= layout.stage_stride
    combine = combine_layout(geometry)
    assert combine.flag + 8 <= combine.partial
    assert combine.partial + rows * geometry.hidden_size * 2 <= combine.stage_stride


@given(geometries)
def test_arenas_are_whole_2_mib_allocations_and_rows_lie_on_16_bytes(geometry):
    for layout in (dispatch_layout(geometry), combine_layout(geometry)):
        assert layout.nbytes % (2 << 20) == 0
        assert layout.nbytes >= layout.stage_stride * geometry.stages
        assert all(offset % 16 == 0 for offset in astuple(layout) if offset not in (8, layout.nbytes))
        assert layout.stage_stride % 128 == 0


@given(geometries, st.data())
def test_addresses_of_different_stages_never_meet(geometry, data):
    stage = data.draw(st.integers(0, geometry.stages - 1))
    here = addresses(geometry, 1 << 40, 1 << 41, stage)
    layout, combine = dispatch_layout(geometry), combine_layout(geometry)
    assert here.dispatch_flag == (1 << 40) + stage * layout.stage_stride
    assert here.dispatch_hidden + geometry.capacity * geometry.hidden_size * 2 <= (1 << 40) + layout.nbytes
    assert here.combine_flag == (1 << 41) + stage * combine.stage_stride
    assert here.combine_partial + geometry.capacity * geometry.hidden_size * 2 <= (1 << 41) + combine.nbytes


def test_a_known_geometry_lies_where_the_document_says():
    layout = dispatch_layout(WindowGeometry(2, 128, 2048, 8, 2))
    assert (layout.flag, layout.head, layout.ids, layout.weights, layout.hidden) == (0, 64, 128, 4224, 8320)
    assert layout.stage_stride == 8320 + 128 * 4096
    assert layout.nbytes == 2 << 20
