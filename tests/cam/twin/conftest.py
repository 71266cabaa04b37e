"""A twin in this process, its groups in a directory of the test."""

from __future__ import annotations

import pytest

from ffn_faas.ascend import twin
from tests.cam.twin.rules import Loader

ROWS = 64


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "npu: needs Ascend NPUs, torch_npu and the built Async CAM operators")


@pytest.fixture
def load(tmp_path, monkeypatch):
    """Loads the twin; receive buffers have ROWS rows."""
    monkeypatch.setenv("BATCH_SIZE_FACTOR", str(ROWS / 262144))
    yield Loader(tmp_path)
    twin.leave()


@pytest.fixture
def ops(load):
    return load()
