"""Attention and F processes over the twin: every output bit-equal to the oracle, which never saw the metadata."""

from __future__ import annotations

import time

import pytest
import torch

from ffn_faas.ascend import twin
from tests.cam.twin.calls import Sizes
from tests.cam.twin.system import STUCK, System, errors

TWO_AND_TWO = Sizes(quant=1)
SYSTEMS = {
    "bf16": System(Sizes()),
    "fp16, rows quantized": System(Sizes(dtype=torch.float16, quant=1), seed=2),
    "tp2": System(Sizes(tp=2), seed=3),
    "two groups of tp2, many chunks": System(Sizes(attention=4, tp=2, quant=1), rows=33, seed=4),
    "one expert a chunk": System(Sizes(dtype=torch.float16), rows=32, seed=5),
    "an F rank without rows": System(Sizes(attention=2), sparse=True, seed=6),
    "three F ranks, top-4": System(Sizes(ffn=3, top_k=4, hidden=32), seed=7),
    "int4": System(Sizes(quant=1, tp=2), experts="int4", seed=8),
    "int4, chunks, an F rank without rows": System(Sizes(quant=1), experts="int4", rows=32, sparse=True, seed=9),
    "int8": System(Sizes(quant=1), experts="int8", rows=40, seed=10),
}


LARGE = System(
    Sizes(attention=12, ffn=4, tp=2, experts=4, top_k=4, quant=1), layers=6, experts="int4", rows=64, seed=11
)
"""12 A ranks and 4 F ranks: the shape that deployments document."""


@pytest.mark.parametrize("system", SYSTEMS.values(), ids=SYSTEMS.keys())
def test_every_output_equals_the_oracle(system, tmp_path):
    check(system, tmp_path)


@pytest.mark.slow
def test_every_output_of_sixteen_processes_equals_the_oracle(tmp_path):
    check(LARGE, tmp_path)


def check(system, tmp_path):
    for rank, outputs in enumerate(system.run(tmp_path)):
        for layer, (output, expected) in enumerate(zip(outputs, system.expected(rank), strict=True)):
            assert output.dtype == system.sizes.dtype
            assert torch.equal(output, expected), (rank, layer)


def test_a_slow_rank_changes_nothing(tmp_path):
    system = System(Sizes(attention=4, tp=2), rows=40)
    outputs = system.run(tmp_path, twin.Faults(slow_rank=1, slow_ms=20))
    assert all(torch.equal(a, b) for a, b in zip(outputs[3], system.expected(3), strict=True))


def test_with_death_noticed_the_others_fail_and_name_the_dead_rank(tmp_path):
    system = System(Sizes(), layers=10000)
    processes = system.start(tmp_path, twin.Faults(notice_peer_death=True))
    wait_until_dispatched(system, tmp_path)
    processes[3].kill()
    for process in processes:
        process.join(30)
    assert all(process.exitcode == 1 for process in processes[:3])
    reasons = errors(tmp_path).values()
    assert len(reasons) == 3
    assert any(f"rank 3 (process {processes[3].pid}) is gone" in reason for reason in reasons)


def test_without_it_a_death_is_a_wait_without_end_which_the_watchdog_of_each_rank_bounds(tmp_path):
    processes = System(Sizes(), layers=3, limit_s=3).start(tmp_path)
    processes[3].kill()
    for process in processes:
        process.join(30)
    assert [process.exitcode for process in processes[:3]] == [STUCK] * 3


def test_a_stuck_receive_takes_its_attention_along_and_ends_at_the_limit(tmp_path):
    processes = System(Sizes(), layers=3, limit_s=3).start(tmp_path, twin.Faults(stuck_rank=2))
    for process in processes:
        process.join(30)
    assert [process.exitcode for process in processes] == [STUCK] * 4
    assert errors(tmp_path) == {}


def wait_until_dispatched(system: System, directory) -> None:
    deadline = time.monotonic() + 30
    while not list(directory.glob("cam-*")):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    time.sleep(0.5)  # all four take part by now, or are still on their way: both must end alike
