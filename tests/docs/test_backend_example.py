"""The backend of docs/backends.md: taken from the page, installed by entry point, filled, asked, attached to."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from ffn_faas.config import ServeConfig, World
from ffn_faas.experts.spec import MoESpec
from tests import oracle
from tests.data import TinyModel
from tests.service.daemon import Daemon, free_port, wait_ready

ROOT = Path(__file__).parents[2]
MODEL = TinyModel()


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return MODEL.write(tmp_path_factory.mktemp("example") / "tiny")


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """A folder on the path with the page's module and the metadata that pip would write."""
    page = (ROOT / "docs" / "backends.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    (metadata,) = re.findall(r'entry-points\."(ffn_faas\.backends)"\]\nloop', page)
    (entry,) = re.findall(r'loop = "([^"]+)"', page)
    (tmp_path / "loop_backend.py").write_text(code)
    information = tmp_path / "loop_backend-1.0.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: loop-backend\nVersion: 1.0\n")
    (information / "entry_points.txt").write_text(f"[{metadata}]\nloop = {entry}\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    sys.modules.pop("loop_backend", None)


def test_it_has_at_most_fifty_lines_after_its_imports_which_need_no_torch(installed):
    code = (installed / "loop_backend.py").read_text()
    lines = [line for line in code.splitlines() if line.strip() and not line.startswith("from ")]
    assert len(lines) <= 50
    script = "import sys, loop_backend; sys.exit('torch' in sys.modules)"
    path = os.pathsep.join([str(installed), str(ROOT)])
    environment = os.environ | {"PYTHONPATH": path}
    assert subprocess.run([sys.executable, "-c", script], check=False, env=environment).returncode == 0


def test_its_rows_are_those_of_the_definition(installed, model):
    from ffn_faas.backends import create_backend

    spec = MoESpec.from_config(MODEL.config(), MODEL.dtype)
    backend = create_backend(ServeConfig(model=str(model), world=World(rank=1, size=2), backend="loop"), spec)
    backend.prepare()
    assert backend.load(lambda done, total: None) == 2 * 4 * 3 * 64 * 32 * 2
    hidden = torch.randn(9, 64).bfloat16()
    ids = torch.randint(-1, 4, (9, 2)).int()
    weights = torch.rand(9, 2)
    out = torch.full((9, 64), float("nan"))
    backend.kernel.compute(1, hidden, ids, weights, out)
    w13, w2 = (whole[4:] for whole in MODEL.expert_weights(1))
    reference = oracle.moe(hidden, w13, w2, ids, weights)
    assert oracle.l2_error(out, reference) < 1e-5
    backend.release()


@pytest.mark.slow
def test_it_serves_an_attention(installed, model):
    port = free_port()
    arguments = {"model": str(model), "port": port, "rounds": 5}
    environment = {"PYTHONPATH": f"{installed}:{ROOT}"}
    with Daemon(model, "--backend", "loop", "--port", port, environment=environment):
        wait_ready(port)
        attention = subprocess.run(
            [sys.executable, "-m", "tests.attention.attention_process", json.dumps(arguments)],
            capture_output=True,
            text=True,
            cwd=ROOT,
            check=False,
            timeout=120,
        )
    assert attention.returncode == 0, attention.stderr
    assert len(attention.stdout.splitlines()) == 6
