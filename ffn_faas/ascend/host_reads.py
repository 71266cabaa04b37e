"""Fails whatever would make the host wait for the device, or copy from it, while a plan is recorded."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

from ffn_faas.errors import FfnError

METHODS = frozenset(
    {"item", "tolist", "cpu", "numpy", "nonzero", "is_nonzero", "__bool__", "__int__", "__float__", "__index__",
     "__array__", "__contains__", "equal", "unique", "masked_select"}
)  # fmt: skip
"""Of tensors, and functions of torch: each needs a value, or a size that only values tell."""
OPERATORS = frozenset({"aten::_local_scalar_dense", "aten::equal", "aten::nonzero", "aten::masked_select"})
COPIES = frozenset({"aten::_to_copy", "aten::copy_", "aten::to"})


class HostRead(FfnError):
    """Something between receive and send reads a tensor on the host."""


@contextmanager
def refused(*, operators: bool = True) -> Iterator[None]:
    """Within the block HostRead is raised for them. A tensor on the CPU needs no operator to be read, hence both
    the functions that Python calls and the operators below them are watched; the latter not by this block where the
    caller does it (``require_on_device``).
    """
    from torch.overrides import TorchFunctionMode
    from torch.utils._python_dispatch import TorchDispatchMode

    class Functions(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            name = getattr(func, "__name__", "")
            if name in METHODS:
                raise HostRead(f"{name} reads a tensor on the host while the plan is recorded")
            return func(*args, **(kwargs or {}))

    class Operators(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            require_on_device(func, args, kwargs or {})
            return func(*args, **(kwargs or {}))

    with Functions(), Operators() if operators else nullcontext():
        yield


def require_on_device(func: Any, args: Any, kwargs: Any) -> None:
    """Raise HostRead when the operator ``func`` would read on the host, or move a tensor to another device."""
    name = func.name().partition(".")[0]
    if name in OPERATORS:
        raise HostRead(f"{name} reads a tensor on the host while the plan is recorded")
    if name not in COPIES:
        return
    devices = {value.device for value in (*args, *kwargs.values()) if hasattr(value, "device")}
    if kwargs.get("device") is not None:
        devices.add(kwargs["device"])
    if len({str(device) for device in devices}) > 1:
        raise HostRead(f"{name} copies between {' and '.join(sorted(map(str, devices)))} while the plan is recorded")
