"""The recorded plan: nothing on the host while it is recorded, the same buffers and marks in every replay."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

import torch

from ffn_faas.ascend import plan
from ffn_faas.ascend.host_reads import HostRead


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
    source, runs = torch.ones(4), torch.zeros(1)
    recorded = plan.RecordedPlan()

    def step():
        runs.add_(1)
        doubled = source * 2
        doubled.add_(1)
        return doubled[1:3] + 0.5

    recorded.capture(step)
    before = recorded.addresses
    assert runs.item() == 0
    for value in (1.0, 5.0):
        source.fill_(value)
        recorded.replay()
        assert torch.equal(recorded.kept, torch.full((2,), 2 * value + 1.5))
    assert runs.item() == 2
    assert recorded.addresses == before
    names = [name.split("::")[1] for name in recorded.operators]
    assert names == ["add_.Tensor", "mul.Tensor", "add_.Tensor", "add.Tensor"]


def test_marks_of_a_plan_are_called_between_its_operators_in_every_replay():
    seen, out, table, recorded = [], [], torch.arange(4), plan.RecordedPlan()

    def step():
        first = table + 1
        recorded.mark(lambda: seen.append(out[0].tolist()))
        out.append(first)
        out.append(first * 2)
        recorded.mark(lambda: seen.append(out[1].tolist()))

    recorded.capture(step)
    assert seen == []
    recorded.replay()
    table += 10
    recorded.replay()
    assert seen == [[1, 2, 3, 4], [2, 4, 6, 8], [11, 12, 13, 14], [22, 24, 26, 28]]
