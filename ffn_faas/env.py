"""The only place where environment variables are read. docs/settings.md lists them."""

from __future__ import annotations

import logging
import os
import sys

from ffn_faas.errors import UsageError

log = logging.getLogger(__name__)
PREFIX = "FFN_FAAS_"
_VLLM_PROCESS = PREFIX + "VLLM_PROCESS"
LAUNCHER = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def _integer(name: str, default: int) -> int:
    text = os.environ.get(name, "")
    if not text:
        return default
    try:
        return int(text)
    except ValueError:
        raise UsageError(f"{name}={text!r} is not an integer", remedy=f"unset {name} or give it a number") from None


def setting(name: str) -> str | None:
    """Value of ``FFN_FAAS_<NAME>``, None when unset or empty; the default of the flag of the same name."""
    return os.environ.get(PREFIX + name.upper().replace("-", "_")) or None


def token() -> str | None:
    """FFN_FAAS_TOKEN: what requests that change something show; None when unset or empty."""
    return os.environ.get(PREFIX + "TOKEN") or None


def allow_untried_vllm() -> bool:
    """FFN_FAAS_ALLOW_UNTRIED_VLLM=1: run in a vLLM version that was never tried."""
    return os.environ.get(PREFIX + "ALLOW_UNTRIED_VLLM", "") in ("1", "true", "yes")


def vllm_process() -> str | None:
    """The first process of the vLLM that this one belongs to; None where ``set_vllm_process`` has named none."""
    return os.environ.get(_VLLM_PROCESS) or None


def set_vllm_process(identity: str) -> None:
    """Name a process to this one and those that it starts."""
    os.environ[_VLLM_PROCESS] = identity


def rank() -> int:
    """RANK as torchrun sets it; 0 without a launcher."""
    return _integer("RANK", 0)


def world_size() -> int | None:
    """WORLD_SIZE as torchrun sets it; None without a launcher."""
    return _integer("WORLD_SIZE", 1) if os.environ.get("WORLD_SIZE") else None


def local_rank() -> int:
    """LOCAL_RANK as torchrun sets it; 0 without a launcher."""
    return _integer("LOCAL_RANK", 0)


def local_world_size() -> int:
    """LOCAL_WORLD_SIZE as torchrun sets it; 1 without a launcher."""
    return _integer("LOCAL_WORLD_SIZE", 1)


def master_addr() -> str:
    """Host of F rank 0 as torchrun sets MASTER_ADDR; 127.0.0.1 without a launcher."""
    return os.environ.get("MASTER_ADDR") or "127.0.0.1"


def batch_size_factor() -> float:
    """BATCH_SIZE_FACTOR of the Async CAM operators, which take 1 for what is no number, with a warning."""
    text = os.environ.get("BATCH_SIZE_FACTOR", "")
    try:
        return float(text) if text else 1.0
    except ValueError:
        log.warning("BATCH_SIZE_FACTOR=%r is no number: the operators take 1", text)
        return 1.0


def kernel_window_mib() -> int | None:
    """LCCL_BUFFER_SIZE of the Async CAM operators, in MiB; None when unset."""
    return _integer("LCCL_BUFFER_SIZE", 0) or None


def no_color() -> bool:
    """NO_COLOR, by the custom of that name: set and not empty."""
    return bool(os.environ.get("NO_COLOR"))


def num_threads() -> int:
    """FFN_FAAS_NUM_THREADS, else OMP_NUM_THREADS, else this rank's share of the CPUs that it may run on; >= 1."""
    for name in (PREFIX + "NUM_THREADS", "OMP_NUM_THREADS"):
        if os.environ.get(name):
            count = _integer(name, 1)
            if count < 1:
                raise UsageError(f"{name}={count}, at least one thread is needed")
            return count
    return max(1, len(os.sched_getaffinity(0)) // local_world_size())


def calm_openmp() -> None:
    """An OpenMP library that is loaded from now on lets idle threads sleep after some 20 us.

    By itself it has them spin for milliseconds: between items Attention may need the cores. Nothing where the
    environment says how to wait.
    """
    if not any(os.environ.get(name) for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")):
        os.environ.update(GOMP_SPINCOUNT="1000", KMP_BLOCKTIME="0")


def child_environment(**changes: str) -> dict[str, str]:
    """This process's environment with ``changes``, for a process that it starts."""
    return {**os.environ, **changes}


def container_environment(**changes: str) -> dict[str, str]:
    """What a container of an image with this installation would see: ``changes`` over the inherited environment.

    Left out are FFN_FAAS_* and a launcher's settings; ``python`` is this one.
    """
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(PREFIX)}
    for name in LAUNCHER:
        inherited.pop(name, None)
    path = os.pathsep.join([os.path.dirname(sys.executable), inherited.get("PATH", os.defpath)])  # noqa: PTH120
    return {**inherited, "PATH": path, **changes}


def recipe_setting(name: str) -> str | None:
    """A key of a recipe, or DRY_RUN or NODE_RANK, given as an environment variable; None when unset or empty."""
    return os.environ.get(name) or None


def torchelastic_error_file() -> str | None:
    """Where torchrun's agent looks for the reason of a worker's failure."""
    return os.environ.get("TORCHELASTIC_ERROR_FILE") or None
