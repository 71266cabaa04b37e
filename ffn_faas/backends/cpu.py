"""The ``cpu`` backend: windows over shared memory, experts on this host's cores. Runs anywhere, and in CI."""

from __future__ import annotations

import logging
import platform
import time
from typing import TYPE_CHECKING

from ffn_faas import native
from ffn_faas.backends.base import FFNBackend, ProgressReport
from ffn_faas.config import ServeConfig
from ffn_faas.connectors.base import WindowGeometry
from ffn_faas.experts.checkpoint import Checkpoint
from ffn_faas.experts.kernels import create_kernel
from ffn_faas.experts.kernels.base import ExpertKernel
from ffn_faas.experts.loader import load_experts
from ffn_faas.experts.model_path import resolve_model
from ffn_faas.experts.spec import ELEMENT_SIZES, MoESpec
from ffn_faas.protocol.topology import expert_range
from ffn_faas.protocol.window import merge_bytes

if TYPE_CHECKING:
    from ffn_faas.connectors.shm import ShmConnector

log = logging.getLogger(__name__)
WAIT_S = 0.1


class CpuBackend(FFNBackend):
    """One item at a time in the calling thread; the kernel uses torch's threads."""

    name = "cpu"
    can_record = True

    def __init__(self, config: ServeConfig, spec: MoESpec) -> None:
        self._config = config
        self._spec = spec
        self._experts = expert_range(spec.num_experts, config.world.size, config.world.rank)
        self._kernel: ExpertKernel = create_kernel(config.moe_kernel, spec)
        self.kernel_name = self._kernel.name
        self._connector: ShmConnector | None = None
        self._cancelled = False

    def prepare(self) -> None:
        native.load()
        self._kernel.prepare()

    def load(self, progress: ProgressReport) -> int:
        checkpoint = None
        if self._config.load_format != "dummy":
            checkpoint = Checkpoint.open(resolve_model(self._config.model, self._config.revision))
        account = load_experts(self._spec, checkpoint, self._experts, self._kernel, progress, seed=self._config.seed)
        log.info("kernel %s; %s", self._kernel.description, account)
        return account.resident_bytes

    def connect(self) -> ShmConnector:
        from ffn_faas.connectors.shm import ShmConnector

        config = self._config
        self._connector = ShmConnector(
            item_limit=config.item_limit,
            data_host=config.host,
            data_port=config.data_port + config.world.local_rank if config.data_port else 0,
        )
        if config.connector == "tcp" or (config.connector == "auto" and not config.binds_loopback):
            self._connector.listen()
        return self._connector

    def untried(self) -> str:
        machine = platform.machine()
        if machine.lower() not in ("x86_64", "amd64"):
            return f"the CPU backend on {machine}"
        return ""

    def merge_bytes(self, spec: MoESpec) -> int:
        rows = self._config.item_limit
        return merge_bytes(WindowGeometry(1, rows, spec.hidden_size, spec.top_k, ELEMENT_SIZES[spec.dtype]), rows)

    def capture(self) -> None:
        """No graphs on this backend: one small item warms the kernel up, so that the first post is not slow."""
        self._kernel.warm_up()

    def execute_step(self) -> bool:
        if self._connector is not None:
            self._connector.step(self._kernel, WAIT_S)
        return not self._cancelled

    def cancel_receive(self) -> None:
        self._cancelled = True
        if self._connector is not None:
            self._connector.cancel_receive()

    def drain(self, deadline_s: float) -> None:
        deadline = time.monotonic() + deadline_s
        while self._connector is not None and time.monotonic() < deadline:
            if not self._connector.step(self._kernel, 0.0):
                return

    def release(self) -> None:
        if self._connector is not None:
            self._connector.close()
        self._kernel.release()
