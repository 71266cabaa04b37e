"""The two torch ops on a GPU: they launch kernels in the current stream and return; any CUDA graph may hold them.

Their schemas and what they compute stand in ``ops.py``. No host code runs in a replay: a batch above the windows'
capacity is a chain of posts in the graph, and a loss of F is seen by the waiting kernel itself.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from ffn_faas.errors import SessionLost

if TYPE_CHECKING:
    import torch

    from ffn_faas.connectors.m2n_client import M2nClient

SCHEMAS = (
    "dispatch(Tensor x, Tensor topk_weights, Tensor topk_ids, int layer, int part=0, int parts=1) -> Tensor",
    (
        "combine(Tensor ticket, Tensor x, Tensor topk_weights, Tensor topk_ids, int layer, int part=0, int parts=1)"
        " -> Tensor"
    ),
)
POSTS_BETWEEN_MARKS = 16
MARKS_AHEAD = 2
"""How far launches run ahead of the device: a launch into a full queue blocks and holds the GIL, and with it the
thread that attaches again when F is lost."""

_libraries: dict[str, torch.library.Library] = {}
"""By dispatch key: an op lives as long as the object that registered it."""
_bound: Ops | None = None


class Ops(Protocol):
    """What stands behind the two ops: DeviceOps, or those of another transport."""

    def dispatch(
        self, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, layer: int, part: int, parts: int
    ) -> torch.Tensor: ...

    def combine(
        self, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, layer: int, part: int, parts: int
    ) -> torch.Tensor: ...


def bind(client: M2nClient | None) -> None:
    """From now on the ops use ``client``, which is kept alive; None unbinds. Makes the ops exist."""
    load()
    bind_ops(None if client is None else DeviceOps(client))


def bind_ops(ops: Ops | None) -> None:
    """From now on the ops are ``ops``."""
    global _bound  # noqa: PLW0603 - torch ops are global, and so is what they call
    _bound = ops


def load(keys: tuple[str, ...] = ("CUDA",)) -> None:
    """Make the ops exist for tensors of ``keys``. Imports torch; needs nothing compiled for it. Idempotent."""
    missing = [key for key in keys if key not in _libraries]
    if not missing:
        return
    import torch

    from ffn_faas.attention import ops

    library = torch.library.Library("ffn_faas", "FRAGMENT")
    if not hasattr(torch.ops.ffn_faas, "dispatch"):
        for schema in SCHEMAS:
            library.define(schema)
        ops.register_fakes()
    for key in missing:
        library.impl("dispatch", _dispatch, key)
        library.impl("combine", _combine, key)
        _libraries[key] = library


def _dispatch(
    x: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor, layer: int, part: int = 0, parts: int = 1
) -> torch.Tensor:
    return _ops().dispatch(x, topk_weights, topk_ids, layer, part, parts)


def _combine(
    ticket: torch.Tensor,  # noqa: ARG001 - orders the two ops
    x: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    layer: int,
    part: int = 0,
    parts: int = 1,
) -> torch.Tensor:
    return _ops().combine(x, topk_weights, topk_ids, layer, part, parts)


def _ops() -> Ops:
    if _bound is None:
        raise SessionLost("no F service is connected in this process")
    return _bound


@dataclass(frozen=True)
class Rows:
    """Contiguous inputs of one op: those rows that this rank sends."""

    x: torch.Tensor
    weights: torch.Tensor
    ids: torch.Tensor
    padded: int
    """Rows of the result; the last ranks may send fewer."""


class DeviceOps:
    """Posts of one stage, in the order of the calls; all of one process come from one stream."""

    def __init__(self, client: M2nClient) -> None:
        self._client = client
        self._posted: Rows | None = None
        self._posts = 0
        self._marks: deque[torch.cuda.Event] = deque()

    def dispatch(
        self, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, layer: int, part: int, parts: int
    ) -> torch.Tensor:
        """Send the first rows, as many as a window holds."""
        rows = self._rows(x, weights, ids, part, parts)
        # What was converted lives until the answer is there: it may have to be sent again.
        self._posted = rows
        self._post(rows, layer, 0)
        return x.new_empty((2,), dtype=_torch().int64)

    def combine(
        self, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, layer: int, part: int, parts: int
    ) -> torch.Tensor:
        """Wait for the first rows, send and wait for the rest."""
        rows = self._posted or self._rows(x, weights, ids, part, parts)
        self._posted = None
        out = x.new_empty((rows.padded, x.shape[1]))
        sent, capacity = rows.x.shape[0], self._client.geometry.capacity
        if rows.padded > sent:
            out[sent:].zero_()
        for begin in range(0, max(sent, 1), capacity):
            if begin:
                self._post(rows, layer, begin)
            answered = out[begin : min(begin + capacity, sent)]
            self._client.attention.receive(0, answered.data_ptr(), answered.shape[0], _stream())
            self._posts += 1
        self._keep_pace()
        return out

    def _rows(self, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, part: int, parts: int) -> Rows:
        torch = _torch()
        geometry = self._client.geometry
        if self._client.reason:
            raise SessionLost(self._client.reason)
        if x.dtype != torch.bfloat16:
            raise SessionLost(f"rows are {x.dtype}, GPU windows hold torch.bfloat16")
        if x.shape[1] != geometry.hidden_size or ids.shape[1] != geometry.top_k:
            raise SessionLost(
                f"rows are [{x.shape[1]}] with {ids.shape[1]} experts each, "
                f"the session has [{geometry.hidden_size}] with {geometry.top_k}"
            )
        padded = -(-x.shape[0] // parts)
        mine = slice(min(x.shape[0], part * padded), min(x.shape[0], (part + 1) * padded))
        return Rows(
            x[mine].contiguous(), weights[mine].float().contiguous(), ids[mine].to(torch.int32).contiguous(), padded
        )

    def _post(self, rows: Rows, layer: int, begin: int) -> None:
        part = slice(begin, begin + self._client.geometry.capacity)
        x, ids, weights = rows.x[part], rows.ids[part], rows.weights[part]
        where = x.data_ptr(), ids.data_ptr(), weights.data_ptr()
        self._client.attention.dispatch(0, self._client.layers[layer], *where, x.shape[0], _stream())

    def _keep_pace(self) -> None:
        cuda = _torch().cuda
        if self._posts < POSTS_BETWEEN_MARKS or cuda.is_current_stream_capturing():
            return
        self._posts = 0
        if len(self._marks) >= MARKS_AHEAD:
            self._marks.popleft().synchronize()
        mark = cuda.Event()
        mark.record()
        self._marks.append(mark)


def _stream() -> int:
    stream: int = _torch().cuda.current_stream().cuda_stream
    return stream


def _torch() -> Any:
    import torch

    return torch
