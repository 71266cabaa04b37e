"""Which GPU an F rank binds. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from ffn_faas.errors import LaunchDisagreement, ResourceError


def choose_device(
    local_rank: int, local_size: int, visible: int, device_ids: Sequence[int] = (), *, share: bool
) -> int:
    """Index among the ``visible`` GPUs for ``local_rank`` of ``local_size`` ranks on this node.

    ``device_ids`` (--device-ids) names one GPU for each local rank. Without it rank r takes GPU r; a launcher that
    masks devices (CUDA_VISIBLE_DEVICES with one GPU for each rank) leaves one, and that is taken whatever the rank.
    Two ranks on one GPU are time-sliced, milliseconds a round trip: only with ``share``. Whether two masked ranks
    got the same GPU is told by its UUID (gpu_claim), not here.
    """
    if visible < 1:
        raise ResourceError(
            "no GPU is visible", remedy="check nvidia-smi and CUDA_VISIBLE_DEVICES, or use --backend cpu"
        )
    if device_ids:
        if local_rank >= len(device_ids):
            raise LaunchDisagreement(f"--device-ids names {len(device_ids)} GPUs, local rank {local_rank} has none")
        if len(set(device_ids)) < len(device_ids) and not share:
            raise LaunchDisagreement(f"--device-ids {_list(device_ids)} gives one GPU to two ranks: --share-device")
        chosen = device_ids[local_rank]
        if chosen < visible:
            return chosen
        # A masking launcher renumbers: the one visible GPU is the one that was meant.
        if visible == 1:
            return 0
        raise ResourceError(f"--device-ids {_list(device_ids)}: GPU {chosen} of {visible} visible ones is not there")
    if visible == 1:
        return 0
    if local_rank < visible:
        return local_rank
    if share:
        return local_rank % visible
    raise ResourceError(
        f"{local_size} F ranks on this node, {visible} GPUs are visible",
        remedy="start as many ranks as GPUs, or allow sharing with --share-device (functional tests only)",
    )


def _list(values: Sequence[int]) -> str:
    return ",".join(map(str, values))
