"""Times of chunks on F and of posts on A over the twin: in order, as many as asked for, the farewell left out."""

from __future__ import annotations

from itertools import pairwise

import pytest

pytest.importorskip("torch")

from ffn_faas import native
from ffn_faas.ascend.settings import CamSettings
from ffn_faas.ascend.shape import MAX_SEQUENCE
from ffn_faas.config import ServeConfig, World
from ffn_faas.connectors.cam import CamConnector
from ffn_faas.errors import UsageError
from ffn_faas.service import host
from ffn_faas.service.lifecycle import Lifecycle
from ffn_faas.service.stop import StopRequest
from ffn_faas.telemetry.spans import MOST
from tests.cam.model import Reference, TinyModel
from tests.cam.system import System, check_steps

pytestmark = pytest.mark.skipif(native.optional_library("cam_twin") is None, reason="built without the twin")
MODEL = TinyModel()


@pytest.mark.parametrize("eager", [True, False], ids=["eager", "full"])
def test_steps_and_posts_are_seen_and_every_answer_stays_that_of_the_oracle(tmp_path, monkeypatch, eager):
    monkeypatch.setenv("BATCH_SIZE_FACTOR", str(64 / MAX_SEQUENCE))
    checkpoint = MODEL.write(tmp_path / "model", "W4A8_DYNAMIC")
    (tmp_path / "twin").mkdir()
    system = System(checkpoint, tmp_path / "twin", eager=eager, attention_ranks=1, tensor_parallel=1, ffn_ranks=1)
    check_steps(system, Reference(checkpoint), rounds=1)
    connector, (client,) = CamConnector(1, times=system.times[0]), system.clients
    assert connector.can_record
    assert connector.take_spans() == client.made.take_spans() == []
    connector.record(MOST)
    client.made.record(5)
    check_steps(system, Reference(checkpoint), rounds=1)
    system.end()
    steps, posts = connector.take_spans(), client.made.take_spans()
    numbers = [layer for layer in range(len(system.numbers)) for _ in range(2)]
    assert [step.layer for step in steps] == numbers, "F's own numbers, without gaps; no farewell"
    assert [(post[5], post[6]) for post in posts] == [(turn % 2, turn // 2) for turn in range(5)]
    for step, post in zip(steps, posts, strict=False):
        assert step.began <= step.taken == step.gathered <= step.computed <= step.sent
        assert (step.sorted, step.parts) == (0, 1)
        dispatching, dispatched, waiting, answered, summed, _, _, rows = post
        assert dispatching <= dispatched <= waiting <= answered == summed
        assert dispatching <= step.taken <= step.computed <= answered, "F works while the post is in flight"
        assert step.rows == rows * MODEL.top_k, "one F rank computes every expert of every row"
    for before, step in pairwise(steps):
        assert step.began == before.sent


def test_a_device_whose_host_only_enqueues_names_the_tools_that_tell(tmp_path):
    checkpoint = MODEL.write(tmp_path, "W4A8_DYNAMIC")
    config = ServeConfig(
        model=str(checkpoint),
        world=World(rank=1, size=2, local_rank=1, local_size=2),
        backend="npu-async-cam",
        max_num_batched_tokens=16,
        cam=CamSettings(attention_ranks=1),
        profile_dir="here",
    )
    with pytest.raises(UsageError, match=r"keeps no times of single steps \(use msprof or torch_npu\.profiler"):
        host._parse(config, Lifecycle(), StopRequest())
    assert not CamConnector(1).can_record
