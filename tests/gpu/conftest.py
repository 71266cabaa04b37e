"""GPU tests: one documented command, ``python -m tests.gpu``, on a machine with Hopper GPUs."""

import gc
import os
import sys

import pytest

from ffn_faas import native

PATIENCE = float(os.environ.get("GPU_TEST_PATIENCE", "1"))
"""Upper bounds of times are multiplied by this: under racecheck a kernel takes many times as long."""


def _devices():
    if native.optional_library("m2n") is None:
        return []
    from ffn_faas.connectors import m2n_library
    from ffn_faas.errors import ResourceError

    try:
        return m2n_library.load().devices()
    except ResourceError:
        return []


DEVICES = _devices()
A_GPU = "1" if len(DEVICES) > 1 else "0"
"""Of Attention processes; F is on GPU 0."""
SHARING = [] if len(DEVICES) > 1 else ["--share-device"]
"""What F needs to be told where both are on one GPU: processes take turns there, milliseconds a round trip."""


def pytest_collection_modifyitems(items):
    """Without a Hopper GPU, or without the compiled part, these are skipped by name."""
    for item in items:
        if item.get_closest_marker("gpu") and not any(device.capability[0] == 9 for device in DEVICES):
            item.add_marker(pytest.mark.skip(reason="no Hopper GPU, or built without nvcc"))


@pytest.fixture(autouse=True)
def _memory_of_the_next_test():
    """What torch keeps would be missing where a vLLM process takes nine tenths of a GPU."""
    yield
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        gc.collect()
        torch.cuda.empty_cache()


@pytest.fixture
def library():
    from ffn_faas.connectors import m2n_library

    return m2n_library.load()


@pytest.fixture
def pair():
    """(F, A): two GPUs where there are two."""
    return 0, int(A_GPU)
