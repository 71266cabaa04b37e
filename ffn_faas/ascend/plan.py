"""One recorded plan, receive to send, that serves every layer: a graph on devices, a list of operators on CPUs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

from ffn_faas.ascend import host_reads

Step = Callable[[], Any]


class Plan(ABC):
    """capture -> replay ...; nothing of the step runs while it is captured, and what it made stays alive."""

    @abstractmethod
    def capture(self, step: Step) -> None:
        """Record ``step``; raises HostRead when it needs a value on the host. No transaction runs."""

    def mark(self, call: Callable[[], None]) -> None:  # noqa: B027
        """``call`` belongs here, between the operators captured before and after; only where hosts run replays."""

    @abstractmethod
    def replay(self) -> None:
        """Run it once more, over the same buffers. Blocks, or its device does, until a chunk is there."""

    @property
    @abstractmethod
    def kept(self) -> Any:
        """What the step returned when it was captured: buffers that every replay writes again."""

    @abstractmethod
    def release(self) -> None:
        """Free the buffers; nothing may be in flight."""


def create(device: Any) -> Plan:
    """The plan of ``device`` (torch.device)."""
    return NpuPlan() if device.type == "npu" else RecordedPlan()


class NpuPlan(Plan):
    """``torch.npu.NPUGraph``. Never run on a device."""

    def __init__(self) -> None:
        self._graph: Any = None
        self._kept: Any = None

    def capture(self, step: Step) -> None:
        import torch

        graph = torch.npu.NPUGraph()
        with host_reads.refused(), torch.npu.graph(graph):
            self._kept = step()
        self._graph = graph

    def replay(self) -> None:
        self._graph.replay()

    @property
    def kept(self) -> Any:
        return self._kept

    def release(self) -> None:
        self._graph = self._kept = None


class RecordedPlan(Plan):
    """The operators in order, each with its inputs and the buffers of its results, whose addresses never change.

    Recording asks only Meta kernels for shapes; views are made at once, since they move nothing.
    """

    def __init__(self) -> None:
        self._calls: list[tuple[Any, Any, Any, list[Any]]] = []
        self._marks: dict[int, list[Callable[[], None]]] = {}
        """By how many operators come before."""
        self._kept: Any = None

    @property
    def operators(self) -> list[str]:
        """Names in the order of replay."""
        return [func.name() for func, *_ in self._calls]

    @property
    def addresses(self) -> list[int]:
        """Of every result's buffer."""
        return [out.data_ptr() for *_, outs in self._calls for out in outs]

    def capture(self, step: Step) -> None:
        import torch
        from torch.utils._python_dispatch import TorchDispatchMode
        from torch.utils._pytree import tree_flatten, tree_map_only

        calls = self._calls

        class Recorder(TorchDispatchMode):
            def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                kwargs = kwargs or {}
                host_reads.require_on_device(func, args, kwargs)
                written = _written(func, args)
                if written is not None:
                    calls.append((func, args, kwargs, []))
                    return written
                if any(result.alias_info is not None for result in func._schema.returns):  # noqa: SLF001
                    return func(*args, **kwargs)
                metas = tree_map_only(torch.Tensor, lambda tensor: tensor.to("meta"), (args, kwargs))
                try:
                    shapes = func(*metas[0], **metas[1])
                except NotImplementedError as error:
                    raise host_reads.HostRead(
                        f"{func.name()}: the size of its result is known only from values: {error}"
                    ) from None
                out = tree_map_only(torch.Tensor, lambda meta: torch.empty_like(meta, device="cpu"), shapes)
                calls.append((func, args, kwargs, tree_flatten(out)[0]))
                return out

        with host_reads.refused(operators=False), Recorder():
            self._kept = step()

    def mark(self, call: Callable[[], None]) -> None:
        self._marks.setdefault(len(self._calls), []).append(call)

    def replay(self) -> None:
        from torch.utils._pytree import tree_flatten

        for number, (func, args, kwargs, outs) in enumerate(self._calls, 1):
            for out, result in zip(outs, tree_flatten(func(*args, **kwargs))[0], strict=False):
                out.copy_(result)
            for call in self._marks.get(number, ()):
                call()

    @property
    def kept(self) -> Any:
        return self._kept

    def release(self) -> None:
        self._calls.clear()
        self._marks.clear()
        self._kept = None


def _written(func: Any, args: Any) -> Any:
    """The argument that ``func`` writes in place and returns; None when there is none."""
    for place, argument in enumerate(func._schema.arguments):  # noqa: SLF001 - torch has no other way to ask
        if argument.alias_info is not None and argument.alias_info.is_write and place < len(args):
            return args[place]
    return None
