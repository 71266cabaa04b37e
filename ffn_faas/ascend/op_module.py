"""The injected operator module: six callables behind one table, from the installed extension or from the CPU twin.

Nothing else in the package names ``torch.ops.afd_ascend``. Each callable takes exactly the positional arguments of
its schema (``schemas.json``). Which module a process uses is said where it starts: neither function falls back to
the other.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ffn_faas.ascend import schemas
from ffn_faas.errors import NativeMissing

Operator = Callable[..., Any]

TABLE = {
    "dispatch_send": "afd_async_dispatch_send",
    "dispatch_recv": "afd_async_dispatch_recv",
    "combine_send": "afd_async_combine_send",
    "combine_recv": "afd_async_combine_recv",
    "gmm_swiglu_quant_v2_layered": "gmm_swiglu_quant_v2_layered",
    "grouped_matmul_layered": "grouped_matmul_layered",
}
"""What the package calls an operator -> its name in the namespace ``afd_ascend`` (protocol compact_v2)."""

LOADER = "afd_plugin.compat.npu:ensure_afd_ascend_ops_loaded"
"""What registers the real operators, as ``module:function``: afd-plugin, built with its Ascend operators."""

REMEDY = "build afd-plugin's Ascend operators for this machine's SOC and CANN; docs/ascend.md says how"


@dataclass(frozen=True)
class OpModule:
    """The operators of one kind. ``name`` goes to logs and ``/status`` as ``ops=``: "afd_ascend" or "cpu-twin"."""

    name: str
    dispatch_send: Operator
    dispatch_recv: Operator
    combine_send: Operator
    combine_recv: Operator
    gmm_swiglu_quant_v2_layered: Operator
    grouped_matmul_layered: Operator


def real_module(loader: str = LOADER) -> OpModule:
    """The operators of the installed extension. Imports torch_npu. NativeMissing when it, or one of them, is absent."""
    module, _, function = loader.partition(":")
    try:
        importlib.import_module("torch_npu")
        getattr(importlib.import_module(module), function)()
    except ImportError as error:
        raise NativeMissing(f"the Ascend operators cannot be loaded: {error}", remedy=REMEDY) from error
    missing = [name for name in TABLE.values() if not is_registered(name)]
    if missing:
        raise NativeMissing(f"the installed extension has no operator {schemas.NAMESPACE}::{missing[0]}", remedy=REMEDY)
    return table("afd_ascend")


def twin_module(directory: Path, seed: int = 0) -> OpModule:
    """The CPU twin: groups meet as files in ``directory``; ``seed`` is the adversary's. See ``twin.py``."""
    from ffn_faas.ascend import twin

    return twin.load(directory, seed)


def table(name: str) -> OpModule:
    """The registered operators as a module called ``name``. Imports torch."""
    import torch

    namespace = getattr(torch.ops, schemas.NAMESPACE)
    return OpModule(name, **{ours: getattr(namespace, theirs).default for ours, theirs in TABLE.items()})


def is_registered(operator: str) -> bool:
    """Whether this process has ``afd_ascend::operator``, whoever registered it. Imports torch."""
    import torch

    return hasattr(getattr(torch.ops, schemas.NAMESPACE), operator)
