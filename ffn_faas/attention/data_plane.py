"""Joins a session to the compiled client of its transport."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ffn_faas.attention.attempt import Client, DataPlane
from ffn_faas.connectors.base import TCP, WindowGeometry, WindowOffer
from ffn_faas.errors import HandshakeRefused
from ffn_faas.protocol.messages import Attach, Granted, Transport

if TYPE_CHECKING:
    from ffn_faas.afd_block import AfdBlock
    from ffn_faas.experts.spec import MoESpec


def shared_memory(spec: MoESpec) -> DataPlane:
    """Windows in memory of this host, joined to F over TCP where F is on another.

    Raises NativeMissing when the package was built without it.
    """
    from ffn_faas import native
    from ffn_faas.connectors.shm import native_geometry
    from ffn_faas.connectors.shm_client import fetch_windows
    from ffn_faas.connectors.tcp_client import connect_windows
    from ffn_faas.experts.spec import ELEMENT_SIZES

    module = native.load()

    def make_client(geometry: WindowGeometry, grants: list[Granted]) -> Client:
        client: Client = module.AttentionClient(native_geometry(geometry), grants[0].expert_counts)
        return client

    def fetch(offer: WindowOffer, geometry: WindowGeometry, epoch: int, timeout: float) -> Any:
        if offer.broker.startswith(TCP):
            return connect_windows(offer, geometry, epoch, timeout)
        return fetch_windows(offer, geometry, epoch, timeout)

    element_size = ELEMENT_SIZES[spec.dtype]
    return DataPlane(make_client, fetch, spec.hidden_size, spec.top_k, element_size, can_hold=True)


def device_memory(spec: MoESpec, device: int, *, lethal: bool) -> DataPlane:
    """Windows in GPU memory; ``device`` is the index of A's GPU among the visible ones, ``lethal`` as M2nClient has it.

    Raises NativeMissing when the package was built without it.
    """
    from ffn_faas.connectors import m2n_library
    from ffn_faas.connectors.m2n_client import M2nClient
    from ffn_faas.experts.spec import ELEMENT_SIZES

    library = m2n_library.load()
    found = library.devices()[device]
    clients: list[M2nClient] = []

    def make_client(geometry: WindowGeometry, grants: list[Granted]) -> Client:
        clients.append(M2nClient(library, found, geometry, grants[0].expert_counts, lethal=lethal))
        return clients[-1]

    def fetch(offer: WindowOffer, geometry: WindowGeometry, epoch: int, timeout: float) -> Any:
        return clients[-1].fetch(offer, geometry, epoch, timeout)

    return DataPlane(make_client, fetch, spec.hidden_size, spec.top_k, ELEMENT_SIZES[spec.dtype], can_hold=True)


def async_cam(spec: MoESpec, attach: Attach, block: AfdBlock, *, lethal: bool) -> DataPlane:
    """Exchanges by the Async CAM operators, or by their twin where the afd block asks for it."""
    from ffn_faas.ascend.settings import CamSettings
    from ffn_faas.ascend.step import layer_numbers
    from ffn_faas.backends.npu import operators
    from ffn_faas.config import World
    from ffn_faas.connectors.cam_client import CamClient
    from ffn_faas.experts.spec import ELEMENT_SIZES

    terms = attach.cam
    if terms is None:
        raise HandshakeRefused("transport cam without its settings")
    settings = CamSettings.of_block(
        block, attention_ranks=attach.num_attention_ranks, tensor_parallel=terms.attn_ranks_per_dp
    )
    ops, device = operators(settings.ops, settings.twin_directory, World(), ())

    def make_client(geometry: WindowGeometry, grants: list[Granted]) -> Client:
        shape = settings.checked_shape(spec, grants[0].num_ffn_ranks, terms.max_num_batched_tokens, "attention")
        numbers = layer_numbers(spec.layers)
        return CamClient(
            ops,
            device,
            settings,
            shape,
            numbers,
            attach.attention_rank,
            spec.dtype,
            stages=geometry.stages,
            lethal=lethal,
        )

    def fetch(offer: WindowOffer, geometry: WindowGeometry, epoch: int, timeout: float) -> None:
        """There is nothing to map."""

    return DataPlane(make_client, fetch, spec.hidden_size, spec.top_k, ELEMENT_SIZES[spec.dtype], pairs=True)


def for_platform(platform: str) -> tuple[Transport | None, Callable[[MoESpec], DataPlane]]:
    """(transport, maker of its data plane) of a vLLM that runs on ``platform`` (cpu, cuda, npu); None: the block's.

    That of transport cam needs the attach message as well: ``async_cam`` makes it.
    """
    if platform == "cuda":
        import torch

        device = torch.cuda.current_device()
        return "m2n", lambda spec: device_memory(spec, device, lethal=True)
    if platform == "npu":
        return "cam", shared_memory
    return None, shared_memory
