"""The two torch ops over Async CAM: as ``device_ops``, with rows in chunks of what one rank may dispatch at once."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ffn_faas.errors import SessionLost

if TYPE_CHECKING:
    import torch

    from ffn_faas.connectors.cam_client import CamClient

KEYS = ("CPU", "PrivateUse1")
"""Where the twin runs, and Ascend."""


class CamOps:
    """Posts of one stage. All ranks of a tensor parallel group send as many chunks, whatever rows each of them has."""

    def __init__(self, client: CamClient) -> None:
        self._client = client

    def dispatch(
        self, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, layer: int, part: int, parts: int
    ) -> torch.Tensor:
        """Send the first chunk."""
        import torch

        self._send(x, weights, ids, layer, part, parts, 0)
        return x.new_empty((2,), dtype=torch.int64)

    def combine(
        self, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, layer: int, part: int, parts: int
    ) -> torch.Tensor:
        """Wait for the first chunk, send and wait for the rest. [ceil(T / parts), H]; rows not sent are zeros."""
        most = self._client.shape.rows_per_rank
        padded = -(-x.shape[0] // parts)
        out = x.new_zeros((padded, x.shape[1]))
        for begin in range(0, max(padded, 1), most):
            if begin:
                self._send(x, weights, ids, layer, part, parts, begin)
            rows = self._rows(x, part, parts, begin)
            count = rows.stop - rows.start
            combined = self._client.combine()
            if count:
                out[begin : begin + count] = combined[:count]
        return out

    def _rows(self, x: torch.Tensor, part: int, parts: int, begin: int) -> slice:
        """Which rows of the input chunk ``begin`` of this part is."""
        total, padded, most = x.shape[0], -(-x.shape[0] // parts), self._client.shape.rows_per_rank
        start = part * padded + begin
        stop = min(total, (part + 1) * padded, start + most)
        return slice(min(start, stop), stop)

    def _send(
        self, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, layer: int, part: int, parts: int, begin: int
    ) -> None:
        import torch

        if self._client.reason:
            raise SessionLost(self._client.reason)
        rows = self._rows(x, part, parts, begin)
        self._client.dispatch(
            layer,
            x[rows].contiguous(),
            ids[rows].to(torch.int32).contiguous(),
            weights[rows].float().contiguous(),
        )


def bind(client: CamClient) -> None:
    """From now on ``torch.ops.ffn_faas`` uses ``client``, which is kept alive."""
    from ffn_faas.attention import device_ops

    device_ops.load(KEYS)
    device_ops.bind_ops(CamOps(client))


def load() -> None:
    """Make the ops exist for the tensors of this transport. Idempotent."""
    from ffn_faas.attention import device_ops

    device_ops.load(KEYS)
