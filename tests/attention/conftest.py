from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ffn_faas.demo.checkpoint import make_checkpoint

from .vllm_nursery import Nursery
from .vllm_process import answers_of


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("torch")
    directory = tmp_path_factory.mktemp("attention") / "tiny"
    make_checkpoint(directory)
    return directory


@pytest.fixture(scope="session")
def stock_answers(vllms: Nursery, model: Path) -> list[Any]:
    """Tokens and their log-probabilities, of each of PROMPTS."""
    return answers_of(vllms, model, env={"VLLM_PLUGINS": ""})
