"""GPU tests: one documented command, ``python -m tests.gpu``, on a machine with Hopper GPUs.

With ``-n 2`` (pytest-xdist) one worker runs the tests of vLLM and those that want quiet GPUs, another all others.
"""

import gc
import os
import sys

import pytest

from ffn_faas import native
from tests.gpu.turns import turn

# On one GPU sixteen lanes and F have a stream each; those that share one of the eight queues there are otherwise would
# wait for each other. Read when the first context is made.
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
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


def pytest_configure(config):
    config.addinivalue_line("markers", "gpu: needs NVIDIA Hopper GPUs and the compiled GPU backend")
    config.addinivalue_line("markers", "sanitized: small enough for compute-sanitizer")
    config.addinivalue_line("markers", "quiet: nothing else may run on the GPUs meanwhile")
    config.addinivalue_line("markers", "timeout: a plugin's, where it is installed")
    config.addinivalue_line("markers", "xdist_group: a plugin's, where it is installed")


def _group(item):
    if not item.get_closest_marker("gpu"):
        return None
    vllm = item.path.name == "test_vllm.py"
    if item.get_closest_marker("quiet"):
        return 2 if vllm else 1
    return 0 if vllm else 3


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Without a Hopper GPU, or without the compiled part, these are skipped by name. What takes longest goes first."""
    here = [(at, item) for at, item in enumerate(items) if _group(item) is not None]
    for (at, _), (_, item) in zip(here, sorted(here, key=lambda one: _group(one[1])), strict=True):
        items[at] = item
    for item in items:
        if _group(item) is not None:
            item.add_marker(pytest.mark.xdist_group("others" if _group(item) == 3 else "vllm and quiet"))
        if item.get_closest_marker("gpu") and not any(device.capability[0] == 9 for device in DEVICES):
            item.add_marker(pytest.mark.skip(reason="no Hopper GPU, or built without nvcc"))


@pytest.fixture(autouse=True)
def _turn(request):
    with turn(alone=request.node.get_closest_marker("quiet") is not None):
        yield


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
