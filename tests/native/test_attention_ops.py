"""The two torch ops: eager, compiled, and how their errors read."""

import threading
import time

import numpy as np
import pytest
import torch

from ffn_faas.attention import ops
from tests.native.world import World, batch, oracle

TORCH = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


@pytest.fixture
def world(request: pytest.FixtureRequest):
    with World([2, 3], top_k=2, capacity=8, dtype=getattr(request, "param", "float32"), stages=2) as made:
        ops.bind(made.client)
        yield made
        ops.bind(None)


def layer(x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, index: int = 1) -> torch.Tensor:
    """Shaped like a MoE layer: something local runs between the two ops."""
    ticket = torch.ops.ffn_faas.dispatch(x, weights, ids, index)
    shared = torch.relu(x) + 1
    return torch.ops.ffn_faas.combine(ticket, x, weights, ids, index) + shared


def expected(x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    routed = torch.from_numpy(oracle(1, x.float().numpy(), ids.numpy(), weights.float().numpy()))
    return routed.to(x.dtype) + (torch.relu(x) + 1)


def inputs(world: World, rows: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    x, ids, weights = batch(np.random.default_rng(seed), rows, world)
    return torch.from_numpy(x).to(TORCH[world.dtype]), torch.from_numpy(weights), torch.from_numpy(ids)


@pytest.mark.parametrize("world", TORCH, indirect=True)
@pytest.mark.parametrize("rows", [0, 1, 8, 21])
def test_the_ops_give_what_the_experts_give(world: World, rows: int) -> None:
    arguments = inputs(world, rows)
    out = layer(*arguments)
    assert out.dtype == arguments[0].dtype
    assert torch.equal(out, expected(*arguments))


def test_inputs_of_any_layout_and_number_type_are_taken(world: World) -> None:
    x, weights, ids = inputs(world, 6)
    strided = torch.stack([x, x], dim=2)[:, :, 0]
    assert not strided.is_contiguous()
    assert torch.equal(layer(strided, weights.bfloat16(), ids.long().t().contiguous().t()), expected(x, weights, ids))


@pytest.mark.parametrize("world", ["bfloat16"], indirect=True)
def test_the_ops_are_opaque_nodes_in_order_in_a_compiled_graph_of_any_size(world: World) -> None:
    graphs: list[list[str]] = []

    def note(graph: torch.fx.GraphModule, example: list[torch.Tensor]):
        graphs.append([str(node.target) for node in graph.graph.nodes if "ffn_faas" in str(node.target)])
        return graph

    def two_layers(x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        return layer(layer(x, weights, ids), weights, ids)

    traced = torch.compile(two_layers, backend=note, fullgraph=True, dynamic=True)
    traced(*inputs(world, 5))
    assert graphs == [["ffn_faas.dispatch", "ffn_faas.combine"] * 2]

    compiled = torch.compile(layer, fullgraph=True, dynamic=True)
    for rows in (5, 1, 8, 40, 2):
        arguments = inputs(world, rows, seed=rows)
        assert torch.equal(compiled(*arguments), expected(*arguments))


@pytest.mark.parametrize("world", ["bfloat16"], indirect=True)
@pytest.mark.parametrize("parts", [2, 3])
@pytest.mark.parametrize("rows", [0, 1, 2, 5, 8, 21, 50])
def test_parts_of_the_rows_give_bit_for_bit_what_all_rows_give(world: World, rows: int, parts: int) -> None:
    arguments = inputs(world, rows)
    whole = torch.ops.ffn_faas.combine(torch.ops.ffn_faas.dispatch(*arguments, 1), *arguments, 1)
    answers = []
    for part in range(parts):
        ticket = torch.ops.ffn_faas.dispatch(*arguments, 1, part, parts)
        answers.append(torch.ops.ffn_faas.combine(ticket, *arguments, 1, part, parts))
    assert {len(answer) for answer in answers} == {-(-rows // parts)}
    gathered = torch.cat(answers)
    assert torch.equal(gathered[:rows].view(torch.int16), whole.view(torch.int16))
    assert not gathered[rows:].any()


def test_a_part_without_rows_is_a_post_too(world: World) -> None:
    arguments = inputs(world, 1)
    ticket = torch.ops.ffn_faas.dispatch(*arguments, 1, 1, 2)
    out = torch.ops.ffn_faas.combine(ticket, *arguments, 1, 1, 2)
    assert world.client.counters()["posts"] == 1
    assert [len(rank.seen.rows[0]) for rank in world.ranks] == [0, 0]
    assert torch.equal(out, torch.zeros(1, 24))


def test_a_part_that_does_not_exist_is_refused(world: World) -> None:
    with pytest.raises(RuntimeError, match="no part 2 of 2 parts"):
        torch.ops.ffn_faas.dispatch(*inputs(world, 3), 1, 2, 2)


@pytest.mark.parametrize("world", ["bfloat16"], indirect=True)
def test_a_part_is_taken_in_a_compiled_graph_of_any_size(world: World) -> None:
    def last_half(x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        ticket = torch.ops.ffn_faas.dispatch(x, weights, ids, 1, 1, 2)
        return torch.ops.ffn_faas.combine(ticket, x, weights, ids, 1, 1, 2) * 2

    compiled = torch.compile(last_half, fullgraph=True, dynamic=True)
    for rows in (5, 1, 8, 41, 2):
        arguments = inputs(world, rows, seed=rows)
        assert torch.equal(compiled(*arguments), last_half(*arguments))


@pytest.mark.parametrize("parts", [(), (0, 2), (1, 2)])
def test_the_fake_kernels_agree_with_the_real_ones(world: World, parts: tuple[int, ...]) -> None:
    arguments = inputs(world, 3)
    ticket = torch.ops.ffn_faas.dispatch(*arguments, 1, *parts)
    out = torch.ops.ffn_faas.combine(ticket, *arguments, 1, *parts)
    with torch._subclasses.FakeTensorMode() as mode:
        fakes = [mode.from_tensor(tensor) for tensor in arguments]
        fake_ticket = torch.ops.ffn_faas.dispatch(*fakes, 1, *parts)
        fake_out = torch.ops.ffn_faas.combine(fake_ticket, *fakes, 1, *parts)
    for real, fake in ((ticket, fake_ticket), (out, fake_out)):
        assert (real.shape, real.dtype, real.stride(), real.device) == (
            fake.shape,
            fake.dtype,
            fake.stride(),
            fake.device,
        )


def test_stages_are_chosen_per_thread_and_travel_in_the_ticket(world: World) -> None:
    first, second = inputs(world, 3, seed=1), inputs(world, 5, seed=2)
    ticket = torch.ops.ffn_faas.dispatch(*first, 1)
    ops.set_stage(1)
    other = torch.ops.ffn_faas.dispatch(*second, 1)
    ops.set_stage(0)
    assert (ticket.tolist(), other.tolist()) == ([0, 3], [1, 5])
    for arguments, its_ticket in ((second, other), (first, ticket)):
        out = torch.ops.ffn_faas.combine(its_ticket, *arguments, 1)
        assert torch.equal(out + (torch.relu(arguments[0]) + 1), expected(*arguments))


def test_a_failed_session_ends_a_waiting_op_with_its_reason_while_other_threads_run(world: World) -> None:
    for rank in world.ranks:
        rank.close()
    arguments = inputs(world, 3)
    ticket = torch.ops.ffn_faas.dispatch(*arguments, 1)

    def fail() -> None:
        time.sleep(0.1)
        world.client.fail("F rank 1 is lost: its connection closed")

    thread = threading.Thread(target=fail)
    thread.start()
    with pytest.raises(RuntimeError, match=r"^F rank 1 is lost: its connection closed$"):
        torch.ops.ffn_faas.combine(ticket, *arguments, 1)
    thread.join()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda x, w, i: (x.double(), w, i), "neither bfloat16, float16 nor float32"),
        (lambda x, w, i: (x.bfloat16(), w, i), "elements of 2 bytes, agreed were 4"),
        (lambda x, w, i: (x[:, :5], w, i), "5 elements and 2 experts, agreed were 24 and 2"),
        (lambda x, w, i: (x, w, i[:2]), "differ in number"),
        (lambda x, w, i: (x, w, i.short()), "neither int32 nor int64"),
        (lambda x, w, i: (x, w, i + 5), "names expert"),
        (lambda x, w, i: (x[0], w, i), "two dimensions"),
    ],
)
def test_inputs_that_cannot_be_sent_are_refused_by_name(world: World, change, reason: str) -> None:
    with pytest.raises(RuntimeError, match=reason):
        torch.ops.ffn_faas.dispatch(*change(*inputs(world, 3)), 1)
    assert torch.equal(layer(*inputs(world, 3)), expected(*inputs(world, 3)))


def test_without_a_client_the_ops_say_so() -> None:
    ops.bind(None)
    with pytest.raises(RuntimeError, match=r"no F service is connected"):
        torch.ops.ffn_faas.dispatch(torch.zeros(1, 2), torch.zeros(1, 1), torch.zeros(1, 1, dtype=torch.int32), 0)
