"""Which backend serves: our own by name, third parties by the entry point group ``ffn_faas.backends``."""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import entry_points
from typing import TYPE_CHECKING

from ffn_faas.errors import UsageError

if TYPE_CHECKING:
    from ffn_faas.backends.base import FFNBackend
    from ffn_faas.config import ServeConfig
    from ffn_faas.experts.spec import MoESpec

BUILT_IN = {
    "cpu": ("ffn_faas.backends.cpu", "CpuBackend"),
    "gpu-deepep-m2n": ("ffn_faas.backends.gpu", "GpuBackend"),
    "npu-async-cam": ("ffn_faas.backends.npu", "NpuBackend"),
}


def create_backend(config: ServeConfig, spec: MoESpec) -> FFNBackend:
    """The backend named by ``config.backend``; its module is imported here. Raises UsageError for an unknown name."""
    name = config.backend
    if name in BUILT_IN:
        module, attribute = BUILT_IN[name]
        backend_class = getattr(import_module(module), attribute)
    else:
        backend_class = _third_party(name)
    backend: FFNBackend = backend_class(config, spec)
    return backend


def _third_party(name: str) -> type[FFNBackend]:
    found = {entry.name: entry for entry in entry_points(group="ffn_faas.backends")}
    if name in found:
        loaded: type[FFNBackend] = found[name].load()
        return loaded
    known = ", ".join(sorted(BUILT_IN.keys() | found.keys()))
    raise UsageError(f"--backend {name} is not known", remedy=f"one of {known}")
