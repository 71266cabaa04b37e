"""Stock vLLM with the plugin as Attention over the twin: each layer's output in it is held against the oracle."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("torch")

from ffn_faas import native
from ffn_faas.demo.checkpoint import make_checkpoint
from ffn_faas.demo.quantized import convert
from tests.attention.vllm_process import environment, log_of, vllm
from tests.cam.world import f_world

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.skipif(native.optional_library("cam_twin") is None, reason="built without the twin"),
]
CHECKED = """
import json, sys
import torch
from pathlib import Path
from ffn_faas.attention import cam_ops
from tests.attention import vllm_process
from tests.cam.model import Reference

class Checked(cam_ops.CamOps):
    reference, client, rows = None, None, 0

    def combine(self, x, weights, ids, layer, part, parts):
        out = super().combine(x, weights, ids, layer, part, parts)
        real = (x != 0).any(-1)
        want = Checked.reference.layer(x[real], ids[real], weights[real].float(), self._client.layers[layer])
        assert torch.equal(out[real], want), (layer, (out[real].float() - want.float()).abs().max())
        Checked.rows += int(real.sum())
        Checked.client = str(self._client)
        return out

cam_ops.CamOps = Checked
if __name__ == "__main__":
    Checked.reference = Reference(Path(json.loads(sys.argv[1])["model"]))
    exec(vllm_process.GENERATE.replace("import json, sys", "", 1))
    print("CHECKED", Checked.client, Checked.rows, flush=True)
"""


def test_every_layer_of_a_real_run_is_bit_equal_to_the_oracle(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "plain")
    convert(tmp_path / "plain", tmp_path / "model", "W4A8_DYNAMIC")
    (tmp_path / "twin").mkdir()
    settings = {"max_num_batched_tokens": 64, "max_model_len": 64}
    with f_world(tmp_path / "model", tmp_path / "twin", 2, 1, tokens=64) as world:
        block = {
            "role": "attention",
            "connector": "CAMAsyncAFDConnector",
            "port": world.port,
            "connector_extra_config": {
                "cam_ops": "cpu-twin",
                "cam_twin_directory": str(tmp_path / "twin"),
                "attach_timeout_s": 60,
            },
        }
        env = environment(PYTHONPATH=str(Path(__file__).parents[2]), OMP_NUM_THREADS="1")
        settings |= {"load_format": "ffn_faas", "additional_config": {"afd": block}}
        with vllm(tmp_path / "model", env, tokens=4, program=("-c", CHECKED), **settings) as process:
            output, _ = process.communicate(timeout=240)
            assert process.returncode == 0, log_of(process)[-6000:]
        answers = [json.loads(line[7:]) for line in output.splitlines() if line.startswith("ANSWER ")]
        assert [len(tokens) for tokens, _ in answers] == [4, 4, 4]
        checked = output.rpartition("CHECKED ")[2].split()
        assert checked[0] == "ops=cpu-twin,"
        assert int(checked[-1]) > 3 * 4 * 4
        for daemon in world.daemons:
            code, log = daemon.finish(60)
            assert code == 0, log[-3000:]
