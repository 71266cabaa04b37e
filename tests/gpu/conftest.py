"""GPU tests: one documented command, ``python -m tests.gpu``, on a machine with Hopper GPUs.

``--lanes`` runs five parts of it beside each other (``__main__.py``); ``turns.py`` keeps the GPUs quiet for some.
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
SHARED = ["--share-device"]
"""F may meet Attention on its GPU where there is only one, and daemons of other lanes; they take turns then."""


def pytest_configure(config):
    config.addinivalue_line("markers", "gpu: needs NVIDIA Hopper GPUs and the compiled GPU backend")
    config.addinivalue_line("markers", "sanitized: small enough for compute-sanitizer")
    config.addinivalue_line("markers", "quiet: nothing else may run on the GPUs meanwhile")
    config.addinivalue_line("markers", "timeout: a plugin's, where it is installed")
    config.addinivalue_line("markers", "vllm: starts stock vLLM")
    config.addinivalue_line("markers", "topologies: several vLLM in front of several F ranks")
    config.addinivalue_line("markers", "deaths: starts and kills processes for minutes")
    config.addinivalue_line("markers", "processes: a daemon and Attention processes without vLLM")


def _order(item):
    """What takes longest goes first, then what wants quiet GPUs: others wait only once."""
    vllm, quiet = item.get_closest_marker("vllm"), item.get_closest_marker("quiet")
    return (2 if vllm else 1) if quiet else (0 if vllm else 3)


def pytest_collection_modifyitems(items):
    """Without a Hopper GPU, or without the compiled part, these are skipped by name."""
    here = [at for at, item in enumerate(items) if item.get_closest_marker("gpu")]
    for at, item in zip(here, sorted((items[at] for at in here), key=_order), strict=True):
        items[at] = item
    for item in items:
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
