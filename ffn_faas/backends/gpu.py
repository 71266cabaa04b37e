"""The ``gpu-deepep-m2n`` backend: windows in GPU memory over NVLink, one graph for every layer, session and size."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from ffn_faas.backends.base import FFNBackend, ProgressReport
from ffn_faas.backends.gpu_claim import claim
from ffn_faas.backends.gpu_device import choose_device
from ffn_faas.config import ServeConfig
from ffn_faas.connectors import m2n_library
from ffn_faas.errors import ResourceError
from ffn_faas.experts.checkpoint import Checkpoint
from ffn_faas.experts.gpu_kernel import GpuExperts
from ffn_faas.experts.loader import load_experts
from ffn_faas.experts.model_path import resolve_model
from ffn_faas.experts.spec import MoESpec
from ffn_faas.protocol.topology import expert_range

if TYPE_CHECKING:
    import socket

    from ffn_faas.connectors.m2n import M2nConnector
    from ffn_faas.connectors.m2n_library import Device, Library
    from ffn_faas.connectors.m2n_service import M2nService

log = logging.getLogger(__name__)
READING_THREADS = 8


class GpuBackend(FFNBackend):
    """The host only keeps four steps queued: the device waits for posts, computes and answers by itself."""

    name = "gpu-deepep-m2n"
    transport = "m2n"
    can_record = True
    kernel_name = GpuExperts.name

    def __init__(self, config: ServeConfig, spec: MoESpec) -> None:
        self._config = config
        self._spec = spec
        self._experts = expert_range(spec.num_experts, config.world.size, config.world.rank)
        self._kernel = GpuExperts(spec)
        self._library: Library | None = None
        self._device: Device | None = None
        self._service: M2nService | None = None
        self._connector: M2nConnector | None = None
        self._claim: socket.socket | None = None
        self._cancelled = False

    def prepare(self) -> None:
        self._kernel.prepare()
        library = m2n_library.load()
        devices, world = library.devices(), self._config.world
        index = choose_device(
            world.local_rank,
            world.local_size,
            len(devices),
            self._config.device_ids,
            share=self._config.share_device,
        )
        device = devices[index]
        if device.capability[0] != 9:
            major, minor = device.capability
            raise ResourceError(
                f"GPU {device.name} has compute capability {major}.{minor}; the kernels need Hopper (9.0)"
            )
        self._claim = claim(device.uuid, share=self._config.share_device)
        library.call("use_device", index)
        self._kernel.bind(index)
        log.info("GPU %d of %d visible: %s, %s", index, len(devices), device.name, device.uuid)
        self._library, self._device = library, device

    def load(self, progress: ProgressReport) -> int:
        checkpoint = None
        if self._config.load_format != "dummy":
            checkpoint = Checkpoint.open(resolve_model(self._config.model, self._config.revision))
        account = load_experts(
            self._spec, checkpoint, self._experts, self._kernel, progress, seed=self._config.seed, threads=8
        )
        log.info("%s", account)
        return account.resident_bytes

    def connect(self) -> M2nConnector:
        from ffn_faas.connectors.m2n import M2nConnector
        from ffn_faas.connectors.m2n_service import M2nService, ServiceShape

        if self._library is None or self._device is None:
            raise ResourceError("prepare() comes before connect()")
        spec, count = self._spec, len(self._experts)
        shape = ServiceShape(
            hidden_size=spec.hidden_size,
            intermediate_size=spec.intermediate_size,
            top_k=spec.top_k,
            num_experts=count,
            layer_base=[layer * count for layer in range(spec.num_layers)],
            weight_rows=spec.num_layers * count,
            item_rows=self._config.max_num_batched_tokens,
        )
        self._service = M2nService(self._library, shape, self._kernel.w13, self._kernel.w2)
        share = self._config.share_device
        self._connector = M2nConnector(self._library, self._device, self._service, share_device=share)
        log.info("workspace for %d rows: %.2f GiB", shape.item_rows, self._service.nbytes / 2**30)
        return self._connector

    def capture(self) -> None:
        if self._service is not None and not self._config.enforce_eager:
            self._service.capture()

    def execute_step(self) -> bool:
        if self._connector is not None and not self._cancelled:
            self._connector.step(captured=not self._config.enforce_eager)
        return not self._cancelled

    def cancel_receive(self) -> None:
        self._cancelled = True
        if self._connector is not None:
            self._connector.cancel_receive()

    def drain(self, deadline_s: float) -> None:
        if self._connector is not None:
            self._connector.drain(deadline_s)

    def release(self) -> None:
        if self._connector is not None:
            self._connector.close()
        if self._service is not None:
            self._service.close()
        self._kernel.release()
        if self._claim is not None:
            self._claim.close()
