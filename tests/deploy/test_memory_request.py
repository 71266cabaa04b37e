"""F's memory request, held against what the program says the example model takes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ffn_faas.cli import main
from ffn_faas.units import GIB
from tests.cli.test_check import QWEN3_30B

from .rendered import Overlay


def test_the_cpu_overlay_asks_for_what_its_model_takes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    overlay = Overlay("cpu")
    _, variables = overlay.started(overlay.side("ffn")[0], overlay.container("ffn"))
    assert Path(variables["MODEL"]).name == "Qwen3-30B-A3B"
    ranks = int(variables["RANKS_PER_POD"])
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_30B))
    assert main(["check", str(tmp_path), "--ffn-ranks", str(ranks), "--sessions", "2", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    needed = sum(rank["total_bytes"] for rank in plan["ranks"])
    request = overlay.container("ffn")["resources"]["requests"]["memory"]
    limit = overlay.container("ffn")["resources"]["limits"]["memory"]
    assert needed <= int(request.removesuffix("Gi")) * GIB <= int(limit.removesuffix("Gi")) * GIB
