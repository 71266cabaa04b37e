"""Two sets of answers, token by token."""

from __future__ import annotations

import pytest

from ffn_faas.demo.answers import Answer
from ffn_faas.demo.comparison import Parting, compare


def answer(tokens: list[int], logprobs: list[float] | None = None, top: list[dict[str, float]] | None = None) -> Answer:
    logprobs = logprobs or [-1.0] * len(tokens)
    own = [{f"token_id:{token}": value} for token, value in zip(tokens, logprobs, strict=True)]
    return Answer("prompt", "text", tokens, logprobs, top or own, 1.0)


def test_the_same_answers_are_equal() -> None:
    compared = compare([answer([1, 2, 3]), answer([4])], [answer([1, 2, 3]), answer([4])])
    assert (compared.equal, compared.compared, compared.changed) == (True, 4, 0)
    assert (compared.max_logprob_diff, compared.partings) == (0.0, [])


def test_every_differing_position_counts_and_the_first_is_the_parting() -> None:
    compared = compare([answer([1, 9, 3, 8])], [answer([1, 2, 3, 4])])
    assert (compared.equal, compared.compared, compared.changed) == (False, 4, 2)
    assert compared.partings == [Parting(prompt=0, position=1, stock_token=2, token=9, gap=None)]


def test_the_gap_is_how_much_better_stock_held_its_own_token() -> None:
    stock = answer([2], [-0.5], [{"token_id:2": -0.5, "token_id:9": -0.75}])
    assert compare([answer([9])], [stock]).partings[0].gap == pytest.approx(0.25)


def test_logprobs_are_compared_up_to_the_parting_only() -> None:
    mine, stock = answer([1, 9, 3], [-1.0, -1.0, -9.0]), answer([1, 2, 3], [-1.25, -1.0, -1.0])
    assert compare([mine], [stock]).max_logprob_diff == 0.25


def test_runners_up_count_too() -> None:
    mine = answer([1], [-1.0], [{"token_id:1": -1.0, "token_id:5": -2.0}])
    stock = answer([1], [-1.0], [{"token_id:1": -1.0, "token_id:5": -2.5, "token_id:6": -3.0}])
    assert compare([mine], [stock]).max_logprob_diff == 0.5


def test_a_missing_token_counts_as_changed() -> None:
    compared = compare([answer([1, 2])], [answer([1, 2, 3])])
    assert (compared.equal, compared.compared, compared.changed) == (False, 3, 1)


def test_no_answers_are_not_equal() -> None:
    assert not compare([], []).equal
