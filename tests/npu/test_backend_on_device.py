"""The backend itself on two NPUs: ``SOC_VERSION=910c python -m pytest -m npu tests/npu``. Never run on a device.

``tests/cam/twin`` with the same marker holds the operators to their contract; run that first. Every process ends itself
at its limit, so that a receive that is stuck cannot hang the run.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytest.importorskip("torch")

from tests.cam.model import TinyModel
from tests.cam.world import FWorld, f_world
from tests.npu.marks import ON_DEVICE

MODEL = TinyModel(hidden=256, inter=128)
LIMIT_S = 240
pytestmark = ON_DEVICE
ATTENTION = """
import sys
from pathlib import Path
from ffn_faas import native
from tests.cam.model import Reference
from tests.cam.world import ARank, FWorld
from tests.npu.test_backend_on_device import LIMIT_S, MODEL

class World:
    ops, extra, attention, directory, block = "afd_ascend", {}, 1, None, FWorld.block

native.load().arm_watchdog(LIMIT_S, 124, "the Attention rank took too long", [])
world = World()
world.port, world.model = int(sys.argv[1]), sys.argv[2]
rank = ARank(world, 0)
rank.join()
rank.check(MODEL, Reference(Path(world.model)), rtol=0.04, atol=0.05)
rank.session.close()
print("CHECKED", flush=True)
"""


class OnDevice(FWorld):
    """F takes NPU 0, Attention NPU 1."""

    def _environment(self, rank: int) -> dict[str, str]:
        return super()._environment(rank) | {"ASCEND_RT_VISIBLE_DEVICES": "0"}


@pytest.mark.parametrize("flags", [("--enforce-eager",), ()], ids=["eager", "full"])
@pytest.mark.parametrize("kind", ["W4A8_DYNAMIC", "W8A8_DYNAMIC"])
def test_one_by_one_from_files_to_a_clean_end(tmp_path, kind, flags):
    model = MODEL.write(tmp_path / "model", kind)
    with f_world(model, tmp_path, 1, 1, *flags, ops="afd_ascend", made=OnDevice) as world:
        attention = subprocess.run(
            [sys.executable, "-c", ATTENTION, str(world.port), str(model)],
            env=os.environ | {"ASCEND_RT_VISIBLE_DEVICES": "1"},
            capture_output=True,
            text=True,
            timeout=LIMIT_S + 30,
            check=False,
        )
        assert "CHECKED" in attention.stdout, attention.stderr[-4000:]
        code, output = world.daemons[0].finish(60)
        assert code == 0, output[-4000:]
        assert "ops=afd_ascend" in output
