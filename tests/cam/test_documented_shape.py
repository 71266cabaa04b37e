"""The documented shape, 12 A and 4 F ranks, as real processes on the F side. Not in the default run: minutes of CPU."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

from ffn_faas import native
from tests.cam.model import Reference, TinyModel
from tests.cam.world import ARank, f_world, together

pytestmark = [
    pytest.mark.large,
    pytest.mark.skipif(native.optional_library("cam_twin") is None, reason="built without the twin"),
]
MODEL = TinyModel(experts=16, top_k=6)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("kind", ["W4A8_DYNAMIC", "W8A8_DYNAMIC"])
def test_twelve_by_four(tmp_path, kind):
    model = MODEL.write(tmp_path / "model", kind)
    (tmp_path / "twin").mkdir()
    with f_world(model, tmp_path / "twin", 4, 12, attn_ranks_per_dp=4) as world:
        ranks = [ARank(world, rank, tensor_parallel=4) for rank in range(12)]
        together(ranks, ARank.join, 300)
        reference = Reference(model)
        together(ranks, lambda rank: rank.check(MODEL, reference), 300)
        together(ranks, lambda rank: rank.session.close())
        for daemon in world.daemons:
            code, output = daemon.finish(60)
            assert code == 0, output[-3000:]
