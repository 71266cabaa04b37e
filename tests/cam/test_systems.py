"""Whole A + F systems: real F processes from checkpoint to exit code, over the twin."""

from __future__ import annotations

import signal

import pytest

pytest.importorskip("torch")

from ffn_faas import native
from tests.cam.model import Reference, TinyModel
from tests.cam.world import ARank, f_world, together

pytestmark = pytest.mark.skipif(native.optional_library("cam_twin") is None, reason="built without the twin")
MODEL = TinyModel()


@pytest.mark.parametrize(("kind", "flags"), [("W4A8_DYNAMIC", ()), ("W8A8_DYNAMIC", ("--enforce-eager",))])
def test_two_by_two_from_files_to_a_clean_end(tmp_path, kind, flags):
    model = MODEL.write(tmp_path / "model", kind)
    (tmp_path / "twin").mkdir()
    with f_world(model, tmp_path / "twin", 2, 2, *flags, attn_ranks_per_dp=2) as world:
        ranks = [ARank(world, rank, tensor_parallel=2) for rank in range(2)]
        together(ranks, ARank.join)
        status = world.get("/status").json()
        assert (status["phase"], status["ops"]) == ("ready", "cpu-twin")
        assert status["phase_seconds"]["pairing"] > 0
        reference = Reference(model)
        together(ranks, lambda rank: rank.check(MODEL, reference))
        assert world.get("/status", 1).json()["steps"]["steps"] > 2 * len(MODEL.numbers)
        together(ranks, lambda rank: rank.session.close())
        for daemon in world.daemons:
            code, output = daemon.finish(60)
            assert code == 0, output[-3000:]
            assert "ops=cpu-twin" in output
            assert "Attention has detached" in output


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
