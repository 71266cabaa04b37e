"""From a wanted size to a shape."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ffn_faas.demo.shapes import shape_for
from ffn_faas.errors import UsageError
from ffn_faas.units import parse_size


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("64MiB", 67108864),
        ("1GiB", 1073741824),
        ("1.5 KiB", 1536),
        ("500MB", 500000000),
        ("7", 7),
        ("2gib", 2147483648),
    ],
)
def test_a_size_is_read_with_its_unit(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "MiB", "-1GiB", "1 apple", "1TiBB"])
def test_anything_else_is_refused_by_name(text: str) -> None:
    with pytest.raises(UsageError, match="is not a size"):
        parse_size(text)


@given(size=st.integers(1, 8 << 30), experts=st.none() | st.integers(1, 256))
def test_a_shape_holds_at_least_the_wanted_bytes_and_not_much_more(size: int, experts: int | None) -> None:
    shape = shape_for(size, experts)
    layer = shape.experts * 3 * shape.hidden * shape.intermediate * 2
    assert shape.expert_bytes == shape.layers * layer
    assert shape.expert_bytes >= size
    assert shape.expert_bytes < size + 4 * layer
    assert shape.hidden % 32 == shape.intermediate % 32 == 0
    assert 1 <= shape.top_k <= shape.experts
