from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ffn_faas.demo.checkpoint import make_checkpoint

from .vllm_process import answers, environment, vllm


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("torch")
    directory = tmp_path_factory.mktemp("attention") / "tiny"
    make_checkpoint(directory)
    return directory


@pytest.fixture(scope="session")
def stock_answers(model: Path) -> list[Any]:
    with vllm(model, environment(VLLM_PLUGINS="")) as process:
        return answers(process)
