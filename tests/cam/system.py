"""A and F ranks in threads of one process over the twin, and rounds of posts whose every answer is the oracle's."""

from __future__ import annotations

import threading
from pathlib import Path

import torch
from torch.distributed import HashStore

from ffn_faas.ascend import plan
from ffn_faas.ascend.checkpoint import load
from ffn_faas.ascend.coordinator import AttentionStartup, FfnStartup, Timing
from ffn_faas.ascend.device import cpu
from ffn_faas.ascend.experts import Arithmetic, LayeredExperts
from ffn_faas.ascend.group import Member
from ffn_faas.ascend.op_module import twin_module
from ffn_faas.ascend.push import PushAttention, PushFfn
from ffn_faas.ascend.receiver import Farewells, Receiver
from ffn_faas.ascend.shape import CamShape
from ffn_faas.ascend.step import PushStep, farewell_layer, layer_numbers, slot_table
from ffn_faas.ascend.times import StepTimes
from ffn_faas.connectors.cam_client import CamClient
from ffn_faas.experts.checkpoint import Checkpoint
from ffn_faas.experts.spec import MoESpec
from ffn_faas.protocol.topology import expert_range
from tests.cam.model import Reference

TOKENS = 20
QUICK = Timing(wait=20.0, poll=0.002, receiver=5.0)


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

            def capture():
                if not self.eager:
                    recorded.capture(lambda: step.on_device(recorded.mark))

            startup.complete(capture, receiver.start)
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
