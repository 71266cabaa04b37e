"""The one place that says how a host waits for its device: on Ascend, or on the CPU, which is never behind."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ffn_faas.errors import LaunchDisagreement, ResourceError


@dataclass(frozen=True)
class Device:
    """``mark()``: an object whose ``synchronize()`` waits for what was issued before it, or None.

    ``bind()``: a thread calls it before its first operator, since which device is current is a thread's own matter.
    """

    torch_device: Any
    synchronize: Callable[[], None]
    mark: Callable[[], Any]
    bind: Callable[[], None]


def cpu() -> Device:
    """Where the twin runs."""
    import torch

    return Device(torch.device("cpu"), lambda: None, lambda: None, lambda: None)


def npu(index: int) -> Device:
    """Binds NPU ``index`` of those that ASCEND_RT_VISIBLE_DEVICES leaves. Never run on a device."""
    import torch
    import torch_npu  # noqa: F401 - registers the device

    def bind() -> None:
        torch.npu.set_device(index)

    def mark() -> Any:
        event = torch.npu.Event()
        event.record()
        return event

    bind()
    return Device(torch.device("npu", index), torch.npu.synchronize, mark, bind)


def npu_index(local_rank: int, visible: int, device_ids: Sequence[int] = ()) -> int:
    """Which NPU a rank takes: that of --device-ids, else its own of several, else the one that is left. Pure."""
    if visible < 1:
        raise ResourceError("no NPU is visible", remedy="check npu-smi info and ASCEND_RT_VISIBLE_DEVICES")
    if device_ids and local_rank >= len(device_ids):
        raise LaunchDisagreement(f"--device-ids names {len(device_ids)} NPUs, local rank {local_rank} has none")
    chosen = device_ids[local_rank] if device_ids else local_rank
    if visible == 1:
        return 0
    if chosen >= visible:
        raise ResourceError(f"local rank {local_rank} takes NPU {chosen}, {visible} are visible")
    return chosen
