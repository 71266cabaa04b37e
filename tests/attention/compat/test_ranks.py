"""Which rank a worker is and which rows carry tokens, against vLLM's own forward context and groups."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from ffn_faas.attention.compat import ranks
from ffn_faas.errors import LaunchDisagreement

pytestmark = pytest.mark.vllm
torch = pytest.importorskip("torch")
pytest.importorskip("vllm")


def config(ranks: int) -> Any:
    return SimpleNamespace(parallel_config=SimpleNamespace(world_size_across_dp=ranks, tensor_parallel_size=2))


class World:
    """Rank 2 of 4; hears what rank 0 says."""

    world_size = 4
    rank_in_group = 2

    def broadcast_object(self, mine: str, src: int) -> str:
        assert mine
        assert src == 0
        return "named by rank 0"


def test_a_worker_of_a_larger_vllm_takes_name_and_rank_from_its_world(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vllm.distributed.parallel_state.get_world_group", World)
    place = ranks.place(config(4))
    assert (place.instance, place.rank, place.size) == ("named by rank 0", 2, 4)


def test_a_world_of_another_size_than_vllm_was_told_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vllm.distributed.parallel_state.get_world_group", World)
    with pytest.raises(LaunchDisagreement, match=r"to run 8 ranks .* its world has 4"):
        ranks.place(config(8))


def test_a_vllm_of_one_worker_asks_nobody_and_is_new_each_time() -> None:
    first, second = ranks.place(config(1)), ranks.place(config(1))
    assert (first.rank, first.size) == (0, 1)
    assert first.instance != second.instance


def masked(padding: list[bool] | None, rows: int, part: int = 0, parts: int = 1) -> list[bool]:
    """Which of ``rows`` rows are left without an expert."""
    from vllm.forward_context import ForwardContext, override_forward_context

    ranks.register_ops()
    ids = torch.arange(2 * rows, dtype=torch.int32).reshape(rows, 2)
    context = ForwardContext(
        no_compile_layers={},
        attn_metadata={},
        slot_mapping={},
        is_padding=None if padding is None else torch.tensor(padding),
    )
    with override_forward_context(context):
        out = torch.ops.ffn_faas.mask_padding(ids, part, parts)
    assert out.data_ptr() != ids.data_ptr()
    gone = (out == -1).all(dim=1)
    assert torch.equal(out[~gone], ids[~gone])
    return [bool(row) for row in gone]


def test_rows_that_vllm_calls_padding_lose_their_experts_and_others_keep_them() -> None:
    assert masked([False, False, True], 3) == [False, False, True]
    assert masked([True] * 4, 4) == [True] * 4
    assert masked([False] * 4, 4) == [False] * 4
    assert masked(None, 2) == [False, False]


def test_a_sequence_parallel_slice_has_its_share_of_the_padding_and_fills_up_with_more() -> None:
    padding = [False, False, False, True, False]
    assert masked(padding, 3, 0, 2) == [False, False, False]
    assert masked(padding, 3, 1, 2) == [True, False, True]
    assert masked([False], 1, 1, 2) == [True]


def test_a_mask_of_another_length_than_the_rows_says_nothing() -> None:
    assert masked([True] * 8, 3) == [False] * 3


def test_the_mask_of_the_running_step_is_read_each_time_a_compiled_graph_runs() -> None:
    from vllm.forward_context import ForwardContext, override_forward_context

    ranks.register_ops()
    compiled = torch.compile(
        lambda ids: torch.ops.ffn_faas.mask_padding(ids, 0, 1) + 0, fullgraph=True, dynamic=True, backend="aot_eager"
    )
    for padding in ([False, True], [True, False], [True, True, False]):
        context = ForwardContext(
            no_compile_layers={}, attn_metadata={}, slot_mapping={}, is_padding=torch.tensor(padding)
        )
        with override_forward_context(context):
            ids = compiled(torch.ones(len(padding), 2, dtype=torch.int32))
        assert [row == [-1, -1] for row in ids.tolist()] == padding


@pytest.mark.parametrize("rows", [1, 2, 5])
def test_gathered_rows_are_cut_to_the_batch(monkeypatch: pytest.MonkeyPatch, rows: int) -> None:
    def all_gather(mine: Any, dim: int) -> Any:
        assert dim == 0
        return torch.cat([mine, mine + 100])

    monkeypatch.setattr("vllm.distributed.tensor_model_parallel_all_gather", all_gather)
    ranks.register_ops()
    each = -(-rows // 2)
    mine = torch.arange(each * 3.0).reshape(each, 3)
    out = torch.ops.ffn_faas.gather_rows(mine, torch.zeros(rows, 3))
    assert torch.equal(out, torch.cat([mine, mine + 100])[:rows])
