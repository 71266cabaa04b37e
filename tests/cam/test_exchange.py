"""A and F ranks in threads of one process over the twin: every output bit-equal to the oracle, whatever arrives how."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

pytest.importorskip("torch")

import torch
from torch.distributed import HashStore

from ffn_faas import native
from ffn_faas.ascend import plan
from ffn_faas.ascend.checkpoint import load
from ffn_faas.ascend.coordinator import AttentionStartup, FfnStartup, Timing
from ffn_faas.ascend.device import cpu
from ffn_faas.ascend.experts import Arithmetic, LayeredExperts
from ffn_faas.ascend.group import Member
from ffn_faas.ascend.host_reads import HostRead
from ffn_faas.ascend.op_module import twin_module
from ffn_faas.ascend.push import PushAttention, PushFfn
from ffn_faas.ascend.receiver import Farewells, Receiver
from ffn_faas.ascend.shape import MAX_SEQUENCE, CamShape
from ffn_faas.ascend.step import PushStep, farewell_layer, layer_numbers, slot_table
from ffn_faas.ascend.times import StepTimes
from ffn_faas.connectors.cam_client import CamClient
from ffn_faas.errors import SessionLost
from ffn_faas.experts.checkpoint import Checkpoint
from ffn_faas.experts.spec import MoESpec
from ffn_faas.protocol.topology import expert_range
from tests.cam.model import Reference, TinyModel

pytestmark = pytest.mark.skipif(native.optional_library("cam_twin") is None, reason="built without the twin")
MODEL = TinyModel()
TOKENS = 20
QUICK = Timing(wait=20.0, poll=0.002, receiver=5.0)


@pytest.fixture(scope="module", params=["W4A8_DYNAMIC", "W8A8_DYNAMIC"])
def checkpoint(request, tmp_path_factory) -> Path:
    return MODEL.write(tmp_path_factory.mktemp("cam"), request.param)


def shape_of(spec: MoESpec, **changes) -> CamShape:
    fields = {
        "attention_ranks": 4,
        "ffn_ranks": 2,
        "num_experts": spec.num_experts,
        "top_k": spec.top_k,
        "hidden_size": spec.hidden_size,
        "max_num_batched_tokens": TOKENS,
        "tensor_parallel": 2,
    }
    return CamShape(**fields | changes)


class System:
    """A x F over the twin in ``directory``; F ranks in threads that live until the farewell."""

    def __init__(self, checkpoint: Path, directory: Path, *, eager: bool, seed: int = 0, **changes) -> None:
        self.spec = MoESpec.from_model_dir(checkpoint)
        self.shape = shape_of(self.spec, **changes)
        self.shape.check()
        self.eager = eager
        self.ops = twin_module(directory, seed)
        self.numbers = layer_numbers(self.spec.layers)
        self.store = HashStore()
        self.receivers: list[Receiver] = []
        self.plans: list[plan.Plan] = []
        self.steps: list[PushStep] = []
        self.times: list[StepTimes] = []
        self.errors: list[BaseException] = []
        self._files = Checkpoint.open(checkpoint)
        ranks = [threading.Thread(target=self._ffn, args=(rank,), daemon=True) for rank in range(self.shape.ffn_ranks)]
        for thread in ranks:
            thread.start()
        self.clients = [self._client(rank) for rank in range(self.shape.attention_ranks)]
        self.each_attention(lambda client: client.pair())
        for thread in ranks:
            thread.join(20)
        assert self.errors == []

    def _ffn(self, rank: int) -> None:
        try:
            shape, spec = self.shape, self.spec
            experts = expert_range(spec.num_experts, shape.ffn_ranks, rank)
            weights = load(spec, self._files, experts, "cpu", lambda done, total: None)
            world_rank = shape.ffn_world_rank(rank)
            startup = FfnStartup(self.store, shape, world_rank, timing=QUICK)
            startup.agree(None if self.eager else self.numbers[0])
            member = Member.create(self.ops, shape, world_rank, startup.nonce, cpu().torch_device, spec.dtype)
            layered = LayeredExperts(self.ops, weights, Arithmetic(spec.dtype))
            times = StepTimes(self.numbers)
            step = PushStep(PushFfn(member), layered, slot_table(self.numbers, "cpu"), times)
            recorded = plan.RecordedPlan()
            if not self.eager:
                startup.warm_up(lambda: [step.eager() for _ in range(shape.groups)])

            def replay():
                recorded.replay()
                return recorded.kept

            receiver = Receiver(
                step.eager if self.eager else replay,
                lambda kept: kept[1],
                Farewells(shape, farewell_layer(self.numbers)),
                cpu(),
                startup.publish_failure,
                times,
            )
            captured = lambda: step.on_device(recorded.mark)  # noqa: E731
            startup.complete(lambda: None if self.eager else recorded.capture(captured), receiver.start)
            self.receivers.append(receiver)
            self.plans.append(recorded)
            self.steps.append(step)
            self.times.append(times)
        except BaseException as error:  # noqa: BLE001 - the main thread raises it
            self.errors.append(error)

    def _client(self, rank: int) -> Client:
        return Client(self, rank)

    def each_attention(self, what) -> None:
        """Run ``what(client)`` of every A rank at once; raises what one raises."""
        failures: list[BaseException] = []

        def run(client) -> None:
            try:
                what(client)
            except BaseException as error:  # noqa: BLE001
                failures.append(error)

        threads = [threading.Thread(target=run, args=(client,), daemon=True) for client in self.clients]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
            assert not thread.is_alive()
        for failure in failures:
            raise failure

    def end(self) -> None:
        for receiver in self.receivers:
            receiver.request_stop()
        self.each_attention(lambda client: client.made.farewell())
        for receiver in self.receivers:
            assert receiver.join(20)
            assert receiver.drained
            assert receiver.error is None


class Client:
    """One A rank with its own random batches, and the oracle's answers."""

    def __init__(self, system: System, rank: int) -> None:
        self.system, self.rank = system, rank
        self.group = rank // system.shape.tensor_parallel
        settings = type("Settings", (), {"ops": "cpu-twin", "hccl_buffer_mib": None})()
        self.made = CamClient(
            system.ops, cpu(), settings, system.shape, system.numbers, rank, system.spec.dtype, stages=2
        )
        self.made.set_layers(list(range(len(system.numbers))))

    def pair(self) -> None:
        startup = AttentionStartup(self.system.store, self.system.shape, self.rank, timing=QUICK)
        startup.open()
        spec = self.system.spec
        member = Member.create(
            self.system.ops, self.system.shape, self.rank, startup.nonce, cpu().torch_device, spec.dtype
        )
        self.made._push = PushAttention(member, 2)
        startup.run(self.made._one_row)

    def batch(self, seed: int, skew: int | None = None):
        """``skew``: every token chooses experts from there on, so that other F ranks get none."""
        spec, shape = self.system.spec, self.system.shape
        generator = torch.Generator().manual_seed(1000 * seed + self.rank)
        count = int(torch.randint(1, shape.rows_per_rank + 1, (1,), generator=generator))
        x = torch.randn(count, spec.hidden_size, generator=generator).to(getattr(torch, spec.dtype))
        if skew is None:
            scores = torch.rand(count, spec.num_experts, generator=generator)
            ids = scores.topk(spec.top_k, -1).indices.to(torch.int32)
        else:
            ids = torch.arange(skew, skew + spec.top_k, dtype=torch.int32).repeat(count, 1)
        weights = torch.rand(count, spec.top_k, generator=generator)
        return x, ids, weights


def check_steps(system: System, reference: Reference, rounds: int = 2) -> None:
    """Two stages that alternate through all layers, groups at their own pace; each answer as the oracle's."""

    def run(client: Client) -> None:
        pending = None
        for step in range(rounds * len(system.numbers) * 2):
            stage, layer = step % 2, step // 2 % len(system.numbers)
            if pending is not None:
                answer(client, *pending)
            skew = (None, 0, 3, None, 1)[(step + client.group) % 5]
            batch = client.batch(step, skew)
            client.made.dispatch(layer, *batch, stage=stage)
            pending = (stage, layer, batch)
        answer(client, *pending)

    def answer(client: Client, stage: int, layer: int, batch) -> None:
        got = client.made.combine(stage)
        want = reference.layer(*batch, system.numbers[layer])
        assert torch.equal(got, want), (client.rank, stage, layer, (got.float() - want.float()).abs().max())

    system.each_attention(run)


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


def test_a_plan_that_reads_on_the_host_cannot_be_recorded():
    table = torch.arange(4)
    reads = {
        "item": table[1].item,
        "tolist": table.tolist,
        "cpu": table.cpu,
        "numpy": table.numpy,
        "bool": lambda: bool(table[1] > 0),
        "int": lambda: int(table[2]),
        "index": lambda: [1, 2, 3][table[1]],
        "nonzero": table.nonzero,
        "mask": lambda: table[table > 1],
        "equal": lambda: torch.equal(table, table),
        "other device": lambda: table.to("meta"),
    }
    for name, read in reads.items():
        assert _refused(read), name
    fine = plan.RecordedPlan()
    fine.capture(lambda: table[1:2].clone().add_(1).to(torch.float32))


def _refused(read) -> bool:
    try:
        plan.RecordedPlan().capture(read)
    except HostRead:
        return True
    return False


def test_a_recorded_plan_runs_nothing_while_it_is_recorded_and_replays_over_the_same_buffers():
    source, ran = torch.ones(4), []
    recorded = plan.RecordedPlan()

    def step():
        doubled = source * 2
        doubled.add_(1)
        return doubled[1:3] + 0.5

    recorded.capture(step)
    before = recorded.addresses
    assert ran == []
    for value in (1.0, 5.0):
        source.fill_(value)
        recorded.replay()
        assert torch.equal(recorded.kept, torch.full((2,), 2 * value + 1.5))
    assert recorded.addresses == before
    assert [name.split("::")[1] for name in recorded.operators] == ["mul.Tensor", "add_.Tensor", "add.Tensor"]


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
