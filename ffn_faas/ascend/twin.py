"""The CPU twin of the Ascend operators (``native/cam_twin/``): the same schemas and checks, over shared memory.

It shows that the package keeps the operators' contract; it shows nothing about a device. What the contract leaves
open it makes hostile: rows beyond the valid ones are NaN (127 where int8), DP groups arrive in an order drawn from
``seed``, a dispatch receive blocks and cannot be cancelled. What would be silent damage on a device it refuses: a
second dispatch before the combine, an altered batch_info, ranks that disagree.

Processes with the same directory and group name meet in the file ``cam-<group>`` there, which stays until the
directory is removed. A run needs a directory of its own: a rank cannot join a group twice.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ffn_faas import native
from ffn_faas.ascend import schemas
from ffn_faas.ascend.op_module import TABLE, OpModule, is_registered, table
from ffn_faas.errors import NativeMissing, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable

NAME = "cpu-twin"
EXCHANGE = frozenset(schema.name for schema in schemas.load() if schema.version == "compact_v2")
"""Operators of a group; its name is their last argument."""

MUTATIONS = (
    "no-poison",
    "in-order",
    "cancellable-receive",
    "overwrite-window",
    "any-batch-info",
    "int8-combine",
    "mixed-max-seq-len",
    "no-checks",
    "partial-group",
    "receive-before-send",
    "any-namespace",
    "any-ids",
    "shared-rank",
    "keep-input",
)
"""Honesty rules that the mutation check switches off one by one; bit numbers as in ``native/cam_twin/settings.hpp``."""


@dataclass(frozen=True)
class Faults:
    """What goes wrong on purpose in this process; ranks are global. Nothing does by default."""

    notice_peer_death: bool = False
    """A waiting operator fails, naming the rank, when a peer's process has ended. Without it the wait has no end."""
    stuck_rank: int | None = None
    """The F rank whose dispatch receive never returns, whatever arrives."""
    slow_rank: int | None = None
    slow_ms: int = 0
    """How long the slow rank sleeps before each operator."""


@dataclass(frozen=True)
class Settings:
    """How a process's twin behaves. ``mutations`` is for the mutation check alone."""

    directory: Path
    seed: int = 0
    faults: Faults = field(default_factory=Faults)
    swiglu_limit: float | None = None
    """The clamp of the layered SwiGLU, which its public schema does not carry; None as published."""
    mutations: tuple[str, ...] = ()


_library: ctypes.CDLL | None = None


def load(directory: Path, seed: int = 0, faults: Faults | None = None, **others: Any) -> OpModule:
    """The twin as an operator module; ``others`` as in Settings. Calling it is the asking: nothing else loads the twin.

    Each call makes a twin of its own settings; of the layered operators, which know no group, the last call's hold.
    UsageError where the real operators are
    registered, or the directory is none; NativeMissing where the twin was not built. Imports torch.
    """
    settings = replace(Settings(directory, seed, faults or Faults()), **others)
    if not settings.directory.is_dir():
        raise UsageError(f"the twin's directory {settings.directory} does not exist")
    library = _registered("any-namespace" in settings.mutations)
    number = library.cam_twin_configure(
        str(settings.directory.resolve()).encode(),
        settings.seed,
        sum(1 << MUTATIONS.index(name) for name in settings.mutations),
        int(settings.faults.notice_peer_death),
        -1 if settings.faults.stuck_rank is None else settings.faults.stuck_rank,
        -1 if settings.faults.slow_rank is None else settings.faults.slow_rank,
        settings.faults.slow_ms,
        settings.swiglu_limit or 0.0,
    )
    registered, checked = table(NAME), "no-checks" not in settings.mutations
    return OpModule(
        NAME,
        **{
            name: _bound(getattr(registered, name), f"\x1f{number}" if TABLE[name] in EXCHANGE else "", checked)
            for name in TABLE
        },
    )


def leave() -> None:
    """Forget every group of this process. No operator may be running."""
    if _library is not None:
        _library.cam_twin_leave_all()


def library() -> ctypes.CDLL:
    """The shared object with its C border declared; loading it registers nothing. NativeMissing when not built."""
    path = native.optional_library("cam_twin")
    if path is None:
        raise NativeMissing("this installation of ffn-faas was built without the CPU twin", remedy=native.OPS_REMEDY)
    import torch  # noqa: F401 - the library finds torch's symbols by soname

    loaded = ctypes.CDLL(str(path))
    loaded.cam_twin_register.argtypes = [ctypes.c_char_p, ctypes.c_char_p, ctypes.c_size_t]
    integer, real = ctypes.c_int64, ctypes.c_double
    loaded.cam_twin_configure.argtypes = [
        ctypes.c_char_p, ctypes.c_uint64, ctypes.c_uint64, ctypes.c_int32, integer, integer, integer, real
    ]  # fmt: skip
    loaded.cam_twin_configure.restype = integer
    loaded.cam_twin_leave_all.restype = None
    return loaded


def _registered(any_namespace: bool) -> ctypes.CDLL:
    global _library  # noqa: PLW0603 - operators are registered once per process
    if _library is not None:
        return _library
    definitions = schemas.load()
    taken = [schema.operator for schema in definitions if is_registered(schema.name)]
    if taken and not any_namespace:
        raise UsageError(
            f"{taken[0]} is registered in this process: the CPU twin never stands beside the real operators",
            remedy="start without the Ascend extension, or without the twin",
        )
    loaded = library()
    text = "".join(f"{schema.name}{schema.arguments}\n" for schema in definitions if schema.operator not in taken)
    reason = ctypes.create_string_buffer(2048)
    if loaded.cam_twin_register(text.encode(), reason, len(reason)) != 0:
        raise NativeMissing(f"the CPU twin cannot be registered: {reason.value.decode()}")
    _library = loaded
    return loaded


def _bound(operator: Callable[..., Any], behind_group: str, checked: bool) -> Callable[..., Any]:
    """The operator of one twin, which its group's name tells; refuses tensors that require grad.

    The stable ABI cannot ask a tensor for that.
    """

    def call(*arguments: Any, **named: Any) -> Any:
        if checked and any(getattr(argument, "requires_grad", False) for argument in (*arguments, *named.values())):
            raise RuntimeError("the operator is inference only: an input requires grad")
        if behind_group and "group_name" in named:
            named["group_name"] += behind_group
        elif behind_group:
            arguments = (*arguments[:-1], arguments[-1] + behind_group)
        return operator(*arguments, **named)

    return call
