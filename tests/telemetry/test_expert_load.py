"""How evenly rows fall on experts."""

import pytest

from ffn_faas.telemetry.expert_load import imbalance_ratio, top


def test_the_busiest_experts_come_first_and_unused_ones_not_at_all():
    rows = [[5, 0, 9], [9, 1, 0]]
    assert top(rows, 3) == [(9, 0, 2), (9, 1, 0), (5, 0, 0)]
    assert top(rows, 10)[-1] == (1, 1, 1)
    assert top([[0, 0]], 5) == []


@pytest.mark.parametrize(
    ("rows", "ratio"),
    [
        ([[4, 4, 4, 4]], 1.0),
        ([[8, 0, 0, 0]], 4.0),
        ([[4, 4], [8, 0]], 1.5),  # (4 + 8) / (4 + 4)
        ([[0, 0], [0, 0]], 1.0),
        ([], 1.0),
        ([[]], 1.0),
    ],
)
def test_the_imbalance_ratio_is_the_busiest_experts_rows_over_the_average_ones(rows, ratio):
    assert imbalance_ratio(rows) == ratio
