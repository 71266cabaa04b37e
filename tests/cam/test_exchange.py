"""Every output over the twin is bit-equal to the oracle, whatever arrives how; what comes out of turn is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch")

import torch

from ffn_faas import native
from ffn_faas.ascend.device import cpu
from ffn_faas.ascend.group import Member
from ffn_faas.ascend.op_module import twin_module
from ffn_faas.ascend.push import PushAttention, PushFfn
from ffn_faas.ascend.shape import MAX_SEQUENCE
from ffn_faas.errors import SessionLost
from ffn_faas.experts.spec import MoESpec
from tests.cam.model import Reference, TinyModel
from tests.cam.system import TOKENS, Client, System, check_steps, shape_of

pytestmark = pytest.mark.skipif(native.optional_library("cam_twin") is None, reason="built without the twin")
MODEL = TinyModel()


@pytest.fixture(scope="module", params=["W4A8_DYNAMIC", "W8A8_DYNAMIC"])
def checkpoint(request, tmp_path_factory) -> Path:
    return MODEL.write(tmp_path_factory.mktemp("cam"), request.param)


@pytest.mark.parametrize("eager", [True, False], ids=["eager", "full"])
def test_every_answer_is_that_of_the_oracle_with_several_chunks_a_layer(checkpoint, tmp_path, monkeypatch, eager):
    monkeypatch.setenv("BATCH_SIZE_FACTOR", str((TOKENS + 4) / MAX_SEQUENCE))
    system = System(checkpoint, tmp_path, eager=eager, seed=7)
    check_steps(system, Reference(checkpoint))
    chunks = sum(receiver.steps for receiver in system.receivers)
    layers = 2 * len(system.numbers) * 2 * system.shape.groups * system.shape.ffn_ranks
    assert chunks > layers, "some layers took several chunks"
    if not eager:
        assert all(len(plan.operators) < 40 for plan in system.plans)
        names = [name.split("::")[1].partition(".")[0] for name in system.plans[0].operators]
        order = [name for name in names if name.startswith(("afd_", "gmm_", "grouped_"))]
        assert order == [
            "afd_async_dispatch_recv",
            "gmm_swiglu_quant_v2_layered",
            "grouped_matmul_layered",
            "afd_async_combine_send",
        ]
    system.end()


def test_rows_that_travel_unquantized_are_quantized_on_f(checkpoint, tmp_path, monkeypatch):
    monkeypatch.setenv("BATCH_SIZE_FACTOR", str(64 / MAX_SEQUENCE))
    system = System(checkpoint, tmp_path, eager=False, dynamic_quant=False, tensor_parallel=1)
    reference = Reference(checkpoint)

    def run(client: Client) -> None:
        for layer in range(len(system.numbers)):
            batch = client.batch(layer)
            client.made.dispatch(layer, *batch)
            got, want = client.made.combine(), reference.layer(*batch, system.numbers[layer])
            # Both quantize to the same step; which of two neighbours a value becomes depends on the form.
            assert torch.allclose(got.float(), want.float(), rtol=0.04, atol=0.05)

    system.each_attention(run)
    system.end()


def test_padding_rows_and_empty_batches_cost_an_exchange_and_give_zeros(checkpoint, tmp_path, monkeypatch):
    monkeypatch.setenv("BATCH_SIZE_FACTOR", str(64 / MAX_SEQUENCE))
    system = System(checkpoint, tmp_path, eager=True)
    reference = Reference(checkpoint)

    def run(client: Client) -> None:
        x, ids, weights = client.batch(3)
        client.made.dispatch(1, x[:0], ids[:0], weights[:0])
        assert torch.equal(client.made.combine(), torch.zeros(1, MODEL.hidden, dtype=x.dtype))
        padded = torch.cat([x, x.new_zeros(1, MODEL.hidden), x.new_full((1, MODEL.hidden), float("nan"))])[:10]
        more_ids = torch.cat([ids, ids[:1], torch.full_like(ids[:1], -1)])[:10]
        more_weights = torch.cat([weights, weights[:1], weights[:1]])[:10]
        client.made.dispatch(2, padded, more_ids, more_weights)
        got = client.made.combine()
        count = min(len(x), 10)
        assert torch.equal(got[:count], reference.layer(x[:count], ids[:count], weights[:count], system.numbers[2]))
        assert torch.equal(got[count:], torch.zeros_like(got[count:]))

    system.each_attention(run)
    system.end()


def test_a_second_exchange_while_one_is_in_flight_is_refused(checkpoint, tmp_path, monkeypatch):
    monkeypatch.setenv("BATCH_SIZE_FACTOR", str(64 / MAX_SEQUENCE))
    system = System(checkpoint, tmp_path, eager=True, attention_ranks=1, tensor_parallel=1)
    client = system.clients[0]
    batch = client.batch(0)
    client.made.dispatch(0, *batch)
    with pytest.raises(SessionLost, match="stage 1 dispatches layer 0 while another exchange is in flight"):
        client.made.dispatch(0, *batch, stage=1)
    push = client.made._push
    with pytest.raises(SessionLost, match="its window would be overwritten"):
        push.dispatch(1, 4, *batch)
    with pytest.raises(SessionLost, match="stage 1 combines without a dispatch"):
        push.combine(1)
    assert push.in_flight(0) == 1
    client.made.combine()
    assert push.in_flight(0) == 0
    system.end()


def test_a_failed_dispatch_leaves_nothing_and_a_failed_combine_keeps_its_routing(checkpoint, tmp_path):
    system_ops = twin_module(tmp_path)
    spec = MoESpec.from_model_dir(checkpoint)
    shape = shape_of(spec, attention_ranks=1, tensor_parallel=1)
    member = Member.create(system_ops, shape, 0, "alone", cpu().torch_device, spec.dtype)
    push = PushAttention(member)
    x = torch.ones(2, spec.hidden_size, dtype=torch.bfloat16)
    ids, weights = torch.zeros(2, spec.top_k, dtype=torch.int32), torch.ones(2, spec.top_k)
    with pytest.raises(RuntimeError, match="expert_ids must be int32"):
        push.dispatch(0, 1, x, ids.long(), weights)
    assert push.in_flight(0) == 0
    push.dispatch(0, 1, x, ids, weights.double())
    with pytest.raises(RuntimeError, match="expert_scales must be float32"):
        push.combine(0)
    assert push.in_flight(0) == 1


def test_receive_and_send_alternate(checkpoint, tmp_path):
    spec = MoESpec.from_model_dir(checkpoint)
    shape = shape_of(spec)
    member = Member.create(twin_module(tmp_path), shape, 4, "g", cpu().torch_device, spec.dtype)
    session = PushFfn(member)
    with pytest.raises(SessionLost, match="nothing was received"):
        session.send(torch.zeros(1, spec.hidden_size, dtype=torch.bfloat16))
    session._received = object()
    with pytest.raises(SessionLost, match="nothing sent for it"):
        session.receive()
