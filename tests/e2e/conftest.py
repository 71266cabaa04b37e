"""Whole demos as child processes, each checked to leave nothing behind."""

from __future__ import annotations

from pathlib import Path

import pytest

from .demo_process import Demos, adopt_orphans


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Everything here starts stock vLLM."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.vllm)
            item.add_marker(pytest.mark.slow)
            item.add_marker(pytest.mark.timeout(900))


@pytest.fixture(scope="session")
def demos(tmp_path_factory: pytest.TempPathFactory) -> Demos:
    """One work directory for the session: the checkpoint, vLLM's compile cache and stock's answers are made once."""
    pytest.importorskip("torch")
    if not Demos.vllm_is_here():
        pytest.skip("vllm is not installed")
    adopt_orphans()
    return Demos(tmp_path_factory.mktemp("demos"))
