"""What a rank sends and in which order, with ops that write down how they are called."""

from __future__ import annotations

from typing import Any

import pytest

from ffn_faas.attention.remote_experts import Rows, run_remote


class Ops:
    def __init__(self, calls: list[tuple[Any, ...]]) -> None:
        self._calls = calls

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any) -> str:
            self._calls.append((name, *arguments))
            return name

        return call


def calls_of(rows: Rows) -> list[tuple[Any, ...]]:
    calls: list[tuple[Any, ...]] = []
    ops: Any = Ops(calls)
    hidden: Any = "hidden"
    weights: Any = "weights"
    ids: Any = "ids"
    result: Any = run_remote(ops, 7, hidden, weights, ids, lambda: calls.append(("shared experts",)), rows)
    assert result == calls[-1][0]
    return calls


def test_shared_experts_run_between_send_and_receive() -> None:
    assert calls_of(Rows()) == [
        ("dispatch", "hidden", "weights", "ids", 7),
        ("shared experts",),
        ("combine", "dispatch", "hidden", "weights", "ids", 7),
    ]


def test_a_tensor_parallel_rank_sends_its_part_and_gathers_those_of_the_others_after_it_received_its_own() -> None:
    assert calls_of(Rows(rank=1, size=2)) == [
        ("dispatch", "hidden", "weights", "ids", 7, 1, 2),
        ("shared experts",),
        ("combine", "dispatch", "hidden", "weights", "ids", 7, 1, 2),
        ("gather_rows", "combine", "hidden"),
    ]


def test_what_is_a_slice_already_is_neither_sliced_nor_gathered() -> None:
    assert [name for name, *_ in calls_of(Rows(rank=1, size=2, is_slice=True))] == [
        "dispatch",
        "shared experts",
        "combine",
    ]
    assert calls_of(Rows(rank=1, size=2, is_slice=True)) == calls_of(Rows())


@pytest.mark.parametrize(
    ("rows", "part"),
    [
        (Rows(may_be_padding=True), (0, 1)),
        (Rows(1, 2, may_be_padding=True), (0, 1)),
        (Rows(1, 2, is_slice=True, may_be_padding=True), (1, 2)),
    ],
)
def test_padding_is_taken_out_of_the_rows_that_the_rank_holds_before_anything_is_sent(
    rows: Rows, part: tuple[int, int]
) -> None:
    (
        mask,
        dispatch,
        *_,
    ) = calls_of(rows)
    assert mask == ("mask_padding", "ids", *part)
    assert dispatch[3] == "mask_padding"
