"""The twin's honesty rules, one function each: it passes on an honest twin and raises where the rule is broken.

They take a Loader, which gives the twin, honest or with one rule switched off (tests/cam/mutations.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch

from ffn_faas.ascend import twin
from ffn_faas.ascend.op_module import OpModule
from ffn_faas.errors import UsageError
from tests.cam.twin import calls
from tests.cam.twin.background import Background
from tests.cam.twin.calls import Sizes
from tests.cam.twin.system import CONTEXT, Int4, System

UNIQUE = count()


@dataclass(frozen=True)
class Loader:
    directory: Path
    mutations: tuple[str, ...] = ()

    def __call__(self, **settings: Any) -> OpModule:
        return twin.load(self.directory, mutations=self.mutations, **settings)


def the_capacity_tail_is_poisoned(load: Loader) -> None:
    ops = load()
    for sizes in (Sizes(attention=1, ffn=1, group=str(quant), quant=quant) for quant in (0, 1)):
        x, ids, _ = calls.inputs(sizes, 5, 1)
        calls.dispatch_send(ops, sizes, 0, 0, x, ids)
        rows, scales, _, counts = calls.dispatch_recv(ops, sizes, 0)
        valid = int(counts.sum())
        assert valid == 10
        if sizes.quant:
            assert (rows[valid:] == 127).all()
            assert scales[valid:].isnan().all()
            assert not scales[:valid].isnan().any()
        else:
            assert rows[valid:].isnan().all()
            assert scales.isnan().all()
    middle, middle_scales, result = matmuls(ops, rows, scales, counts, sizes)
    assert (middle[valid:] == 127).all()
    assert middle_scales[valid:].isnan().all()
    assert result[valid:].isnan().all()
    assert not result[:valid].isnan().any()


def groups_arrive_in_an_order_nobody_can_build_on(load: Loader) -> None:
    orders = [delivered(load(seed=seed), seed) for seed in (1, 2, 1)]
    assert orders[0] == orders[2]
    assert orders[0] != orders[1]
    for order in orders:
        firsts = {layer: next(group for group, at in order if at == layer) for _, layer in order}
        assert set(firsts.values()) == {0, 1}
    assert any(between_chunks(order) for order in orders)


def a_dispatch_receive_cannot_be_cancelled(load: Loader) -> None:
    ops, sizes = load(), Sizes(attention=1, ffn=1)
    waiting = Background(lambda: calls.dispatch_recv(ops, sizes, 0))
    assert not waiting.ended(0.7)
    x, ids, _ = calls.inputs(sizes, 3, 1)
    calls.dispatch_send(ops, sizes, 0, 0, x, ids)
    assert int(waiting.result()[3].sum()) == 6


def a_window_in_flight_is_not_overwritten(load: Loader) -> None:
    ops, sizes = load(), Sizes(attention=1, ffn=1)
    x, ids, _ = calls.inputs(sizes, 3, 1)
    calls.dispatch_send(ops, sizes, 0, 4, x, ids)
    with pytest.raises(RuntimeError, match="dispatches layer 5 while layer 4 is in flight"):
        calls.dispatch_send(ops, sizes, 0, 5, x, ids)


def batch_info_goes_back_unmodified(load: Loader) -> None:
    ops, sizes = load(), Sizes(attention=1, ffn=1)
    x, ids, weights = calls.inputs(sizes, 3, 1)
    calls.dispatch_send(ops, sizes, 0, 0, x, ids)
    rows, _, batch_info, _ = calls.dispatch_recv(ops, sizes, 0)
    for place in range(len(batch_info)):
        altered = batch_info.clone()
        altered[place] += 1
        with pytest.raises(RuntimeError, match="batch_info is not what dispatch receive returned"):
            calls.combine_send(ops, sizes, 0, rows, altered)
    calls.combine_send(ops, sizes, 0, rows, batch_info)
    calls.combine_recv(ops, sizes, 0, ids, weights)


def the_int8_receive_buffer_cannot_be_combined(load: Loader) -> None:
    ops, sizes = load(), Sizes(attention=1, ffn=1, quant=1)
    x, ids, _ = calls.inputs(sizes, 3, 1)
    calls.dispatch_send(ops, sizes, 0, 0, x, ids)
    rows, _, batch_info, _ = calls.dispatch_recv(ops, sizes, 0)
    with pytest.raises(RuntimeError, match="expand_x must be float16 or bfloat16, not int8"):
        calls.combine_send(ops, sizes, 0, rows, batch_info)


def ranks_agree_on_max_seq_len(load: Loader) -> None:
    ops, sizes = load(), Sizes(attention=1, ffn=1)
    x, ids, _ = calls.inputs(sizes, 3, 1)
    calls.dispatch_send(ops, sizes, 0, 0, x, ids)
    with pytest.raises(RuntimeError, match="this rank has max_seq_len 64, the group was made with 32"):
        calls.dispatch_recv(ops, sizes.but(max_seq_len=64), 0)


def the_bindings_checks_are_made(load: Loader) -> None:
    ops, sizes = load(), Sizes(attention=1, ffn=1)
    x, ids, _ = calls.inputs(sizes, 3, 1)
    with pytest.raises(RuntimeError, match="tp_size 2 does not divide attn_rank_num 1"):
        calls.dispatch_send(ops, sizes.but(tp=2), 0, 0, x, ids)
    with pytest.raises(RuntimeError, match="inference only"):
        calls.dispatch_send(ops, sizes, 0, 0, x.requires_grad_(), ids)


def a_group_is_delivered_whole(load: Loader) -> None:
    ops, sizes = load(), Sizes(ffn=1, tp=2)
    x, ids, _ = calls.inputs(sizes, 3, 1)
    calls.dispatch_send(ops, sizes, 0, 0, x, ids)
    waiting = Background(lambda: calls.dispatch_recv(ops, sizes, 0))
    assert not waiting.ended(0.3)
    calls.dispatch_send(ops, sizes, 1, 0, x, ids)
    assert int(waiting.result()[3].sum()) == 12


def each_receive_is_followed_by_its_combine(load: Loader) -> None:
    ops, sizes = load(), Sizes(ffn=1)
    x, ids, _ = calls.inputs(sizes, 3, 1)
    for rank in range(2):
        calls.dispatch_send(ops, sizes, rank, 0, x, ids)
    calls.dispatch_recv(ops, sizes, 0)
    with pytest.raises(RuntimeError, match="receives again before it has sent the combine"):
        calls.dispatch_recv(ops, sizes, 0)


def it_never_stands_beside_the_real_operators(load: Loader) -> None:
    process = CONTEXT.Process(target=load_beside_real_operators, args=(load,))
    process.start()
    process.join(30)
    refusal = load.directory / "refusal"
    assert refusal.exists()
    assert "the CPU twin never stands beside the real operators" in refusal.read_text()


def a_combine_is_received_for_what_was_dispatched(load: Loader) -> None:
    ops, sizes = load(), Sizes(attention=1, ffn=1)
    x, ids, weights = calls.inputs(sizes, 3, 1)
    calls.dispatch_send(ops, sizes, 0, 0, x, ids)
    rows, _, batch_info, _ = calls.dispatch_recv(ops, sizes, 0)
    calls.combine_send(ops, sizes, 0, rows, batch_info)
    with pytest.raises(RuntimeError, match="other expert ids than the dispatch in flight"):
        calls.combine_recv(ops, sizes, 0, ids.flip(0), weights)
    with pytest.raises(RuntimeError, match="other expert ids than the dispatch in flight"):
        calls.combine_recv(ops, sizes, 0, ids[:2], weights[:2])


def a_rank_is_one_process(load: Loader) -> None:
    ops, sizes = load(), Sizes(attention=1, ffn=1)
    x, ids, _ = calls.inputs(sizes, 3, 1)
    other = CONTEXT.Process(target=claim, args=(load.directory, sizes))
    other.start()
    other.join(30)
    assert other.exitcode == 0
    with pytest.raises(RuntimeError, match=f"rank 0 of this group is process {other.pid}"):
        calls.dispatch_send(ops, sizes, 0, 1, x, ids)


def the_second_matmul_spoils_its_input(load: Loader) -> None:
    ops, sizes = load(), Sizes(attention=1, ffn=1, quant=1)
    rows = torch.randint(-9, 9, (6, sizes.hidden), dtype=torch.int8)
    middle, _, _ = matmuls(ops, rows, torch.ones(6), torch.tensor([3, 2, 1]), sizes)
    assert (middle == 127).all()


def matmuls(
    ops: OpModule, rows: torch.Tensor, scales: torch.Tensor, counts: torch.Tensor, sizes: Sizes
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Both layered operators in a row, on random int4 weights; middle as it is after the second."""
    experts = Int4(System(sizes, layers=1), ops, 0)
    layer = torch.zeros(1, dtype=torch.int64)
    middle, middle_scales = ops.gmm_swiglu_quant_v2_layered(
        rows, experts.w13, experts.scale13, experts.bias13, scales, counts, layer, 0, 0, 1, None
    )
    (result,) = ops.grouped_matmul_layered(
        [middle], experts.w2, experts.bias2, experts.scale2, layer, counts, middle_scales, 1, 3, None
    )
    return middle, middle_scales, result


def delivered(ops: OpModule, seed: int) -> list[tuple[int, int]]:
    """(DP group, layer) of each chunk of 12 layers, both groups ready whenever F receives; two chunks a group."""
    sizes = Sizes(ffn=1, top_k=3, group=f"order {seed} {next(UNIQUE)}")
    order = []
    for layer in range(12):
        batch = [calls.inputs(sizes, 32, 7 + rank) for rank in range(2)]
        for rank, (x, ids, _) in enumerate(batch):
            calls.dispatch_send(ops, sizes, rank, layer, x, ids)
        open_groups = 2
        while open_groups:
            rows, _, batch_info, _ = calls.dispatch_recv(ops, sizes, 0)
            order.append((int(batch_info[1]), layer))
            calls.combine_send(ops, sizes, 0, rows, batch_info)
            open_groups -= int(batch_info[4]) == sizes.experts - 1
        for rank, (_, ids, weights) in enumerate(batch):
            calls.combine_recv(ops, sizes, rank, ids, weights)
    return order


def between_chunks(order: list[tuple[int, int]]) -> bool:
    """Whether some group's chunks of one layer had another group's between them."""
    triples = zip(order, order[1:], order[2:], strict=False)
    return any(a == c and a != b and a[1] == b[1] for a, b, c in triples)


def load_beside_real_operators(load: Loader) -> None:
    """For a process of its own, in which another extension has registered one of the operators."""
    twin.library()
    if hasattr(torch.ops.afd_ascend, "afd_async_dispatch_send"):
        return  # loading the library alone must register nothing
    real = torch.library.Library("afd_ascend", "FRAGMENT")
    real.define("grouped_matmul_layered(Tensor x) -> Tensor")
    try:
        load()
    except UsageError as error:
        (load.directory / "refusal").write_text(str(error))


def claim(directory: Path, sizes: Sizes) -> None:
    x, ids, _ = calls.inputs(sizes, 3, 1)
    calls.dispatch_send(twin.load(directory), sizes, 0, 0, x, ids)
