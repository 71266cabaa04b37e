"""Which F rank owns which expert."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ffn_faas.protocol.topology import expert_counts, expert_range

worlds = st.integers(1, 64).flatmap(lambda size: st.tuples(st.integers(size, 512), st.just(size)))


@given(worlds)
def test_every_expert_has_exactly_one_owner_and_shares_differ_by_at_most_one(world):
    num_experts, size = world
    owned = [expert for rank in range(size) for expert in expert_range(num_experts, size, rank)]
    assert owned == list(range(num_experts))
    counts = expert_counts(num_experts, size)
    assert max(counts) - min(counts) <= 1


def test_uneven_splits_are_as_written_down():
    assert expert_counts(8, 3) == [3, 3, 2]
    assert expert_counts(128, 3) == [43, 43, 42]
    assert list(expert_range(8, 3, 2)) == [6, 7]


@pytest.mark.parametrize(("num_experts", "size"), [(2, 3), (8, 0)])
def test_a_world_that_cannot_be_served_is_an_error(num_experts, size):
    with pytest.raises(ValueError, match="cannot split"):
        expert_counts(num_experts, size)
