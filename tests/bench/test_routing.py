"""Routing of a bench: what a batch may ask for, and how skewed it is."""

from pathlib import Path

import numpy as np
import pytest

from ffn_faas.bench.routing import Router
from ffn_faas.errors import UsageError


@pytest.mark.parametrize("form", ["uniform", "zipf", "zipf:1.5"])
def test_a_row_names_no_expert_twice_and_its_weights_sum_to_one(form: str) -> None:
    ids, weights = Router(form, 32, 8).draw(500, seed=3)
    assert ids.shape == weights.shape == (500, 8)
    assert ids.dtype == np.int32
    assert ids.min() >= 0
    assert ids.max() < 32
    assert all(len(set(row)) == 8 for row in ids.tolist())
    assert np.allclose(weights.sum(1), 1, atol=1e-6)


def test_the_same_seed_gives_the_same_batch_and_another_one_another() -> None:
    router = Router("uniform", 64, 4)
    assert np.array_equal(router.draw(16, 1)[0], router.draw(16, 1)[0])
    assert not np.array_equal(router.draw(16, 1)[0], router.draw(16, 2)[0])


def test_zipf_asks_one_expert_of_each_token_by_its_rank() -> None:
    """With top-1 expert r is drawn with probability (1/r) / H(8), H(8) = 2.717857."""
    counts = np.bincount(Router("zipf", 8, 1).draw(40_000, seed=5)[0][:, 0], minlength=8) / 40_000
    assert counts == pytest.approx([0.3679, 0.1840, 0.1226, 0.0920, 0.0736, 0.0613, 0.0526, 0.0460], abs=0.012)


def test_recorded_tokens_follow_each_other_and_begin_anew(tmp_path: Path) -> None:
    recorded = np.array([[0, 1], [2, 3], [4, 5]], np.int64)
    np.savez(tmp_path / "ids.npz", ids=recorded)
    ids, _ = Router(f"recorded:{tmp_path / 'ids.npz'}", 6, 2).draw(7, seed=0)
    begin = recorded.tolist().index(ids[0].tolist())
    assert ids.tolist() == [recorded[(begin + i) % 3].tolist() for i in range(7)]


def test_what_cannot_be_drawn_is_refused(tmp_path: Path) -> None:
    np.savez(tmp_path / "ids.npz", ids=np.array([[0, 9]]))
    np.savez(tmp_path / "floats.npz", ids=np.array([[0.5, 1.0]]))
    with pytest.raises(UsageError, match="names expert 9, this layer has 8"):
        Router(f"recorded:{tmp_path / 'ids.npz'}", 8, 2)
    with pytest.raises(UsageError, match=r"\[n, 3\] integers are needed"):
        Router(f"recorded:{tmp_path / 'ids.npz'}", 16, 3)
    with pytest.raises(UsageError, match="integers are needed"):
        Router(f"recorded:{tmp_path / 'floats.npz'}", 16, 2)
    with pytest.raises(UsageError, match="cannot read ids"):
        Router(f"recorded:{tmp_path / 'none.npz'}", 16, 2)
    with pytest.raises(UsageError, match="--routing pareto is not known"):
        Router("pareto", 16, 2)
    with pytest.raises(UsageError, match="names no number"):
        Router("zipf:steep", 16, 2)
