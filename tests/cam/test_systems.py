"""Whole A + F systems: real F processes from checkpoint to exit code, over the twin."""

from __future__ import annotations

import json
import signal
from concurrent.futures import ThreadPoolExecutor

import pytest

pytest.importorskip("torch")

from ffn_faas import native
from ffn_faas.cli import main
from tests import traces
from tests.cam.model import Reference, TinyModel
from tests.cam.world import ARank, f_world, together
from tests.waiting import wait_until

pytestmark = pytest.mark.skipif(native.optional_library("cam_twin") is None, reason="built without the twin")
MODEL = TinyModel()
STEPS = 16


@pytest.mark.parametrize(("kind", "flags"), [("W4A8_DYNAMIC", ()), ("W8A8_DYNAMIC", ("--enforce-eager",))])
def test_two_by_two_from_files_to_a_clean_end(tmp_path, kind, flags):
    model = MODEL.write(tmp_path / "model", kind)
    (tmp_path / "twin").mkdir()
    more = "--profile", str(tmp_path / "first"), "--profile-steps", "5"
    with f_world(model, tmp_path / "twin", 2, 2, *flags, *more, attn_ranks_per_dp=2) as world:
        ranks = [ARank(world, rank, tensor_parallel=2) for rank in range(2)]
        together(ranks, ARank.join)
        status = world.get("/status").json()
        assert (status["phase"], status["ops"]) == ("ready", "cpu-twin")
        assert status["phase_seconds"]["pairing"] > 0
        reference = Reference(model)

        def work():
            together(ranks, lambda rank: rank.check(MODEL, reference))

        work()
        _check_first_steps(tmp_path / "first")
        _check_profile(_profile(world.port, tmp_path / "trace.json", work))
        assert world.get("/status", 1).json()["steps"]["steps"] > 2 * len(MODEL.numbers)
        together(ranks, lambda rank: rank.session.close())
        for daemon in world.daemons:
            code, output = daemon.finish(60)
            assert code == 0, output[-3000:]
            assert "ops=cpu-twin" in output
            assert "Attention has detached" in output


def _profile(port, target, work):
    """What the ``profile`` command writes while ``work`` is called again and again."""
    order = "profile", f"127.0.0.1:{port}", "--steps", str(STEPS), "--output", str(target)
    with ThreadPoolExecutor(1) as executor:
        told = executor.submit(main, order)
        while not told.done():
            work()
        assert told.result() == 0
    return json.loads(target.read_text())


def _check_first_steps(directory):
    """What ``--profile`` writes once there were so many steps, on each rank."""
    for rank in range(2):
        file = directory / f"ffn-rank-{rank}.trace.json"
        wait_until(lambda file=file: file.exists() and file.read_text().endswith("}"), 30, file.name)
        captured = json.loads(file.read_text())
        traces.check(captured)
        assert len(traces.spans(captured, rank + 1, "step")) == 5


def _check_profile(captured):
    """F works on a layer while both A ranks have a post of it in flight."""
    traces.check(captured)
    pids = traces.processes(captured)
    posts = [traces.spans(captured, pid, "post") for name, pid in pids.items() if name.startswith("Attention")]
    assert len(posts) == 2
    assert all(STEPS // 4 <= len(sent) <= STEPS for sent in posts), "a layer may take F several steps"
    begin = max(sent[0]["ts"] for sent in posts)
    end = min(sent[-1]["ts"] + sent[-1]["dur"] for sent in posts)
    seen = 0
    for rank in range(2):
        pid = pids[f"F rank {rank} of 2"]
        steps = traces.spans(captured, pid, "step")
        assert {step["args"]["layer"] for step in steps} == set(range(len(MODEL.numbers)))
        assert sum(step["args"]["rows"] for step in steps) > STEPS
        experts = [part for part in traces.spans(captured, pid, "step part") if part["name"] == "experts"]
        assert len(experts) == len(steps) == STEPS
        for step, part in zip(steps, experts, strict=True):
            if not begin <= part["ts"] <= part["ts"] + part["dur"] <= end:
                continue
            seen += 1
            for sent in posts:
                (post,) = (one for one in sent if one["ts"] <= part["ts"] < one["ts"] + one["dur"])
                assert part["ts"] + part["dur"] <= post["ts"] + post["dur"] + traces.ROUNDING_US
                assert post["args"]["layer"] == step["args"]["layer"]
    assert seen > STEPS // 2


def test_a_stop_of_f_ends_in_order_by_the_farewell_of_an_idle_attention(tmp_path):
    model = MODEL.write(tmp_path / "model", "W4A8_DYNAMIC")
    (tmp_path / "twin").mkdir()
    with f_world(model, tmp_path / "twin", 1, 1, "--enforce-eager") as world:
        ranks = [ARank(world, 0)]
        together(ranks, ARank.join)
        world.daemons[0].signal(signal.SIGTERM)
        code, output = world.daemons[0].finish(60)
        assert code == 0, output[-3000:]
        with pytest.raises(Exception, match="F stopped: SIGTERM"):
            ranks[0].client.dispatch(0, *_row())
        ranks[0].session.close()


def _row():
    import torch

    return (
        torch.ones(1, MODEL.hidden, dtype=torch.bfloat16),
        torch.zeros(1, MODEL.top_k, dtype=torch.int32),
        torch.ones(1, MODEL.top_k),
    )
