"""What the parts of one F rank share. Filled by service.host in the order of its fields."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ffn_faas.config import ServeConfig
from ffn_faas.connectors.base import WindowGeometry
from ffn_faas.experts.spec import ELEMENT_SIZES
from ffn_faas.service.lifecycle import Lifecycle
from ffn_faas.service.sessions import SessionRegistry
from ffn_faas.service.stop import StopRequest
from ffn_faas.service.world import WorldView

if TYPE_CHECKING:
    from ffn_faas.connectors.base import FFNConnector
    from ffn_faas.experts.spec import MoESpec
    from ffn_faas.protocol.handshake import Offer
    from ffn_faas.protocol.messages import Attach


@dataclass
class ServiceState:
    """``spec`` and ``offer`` are set before HTTP is up; ``connector`` once the backend has connected."""

    config: ServeConfig
    lifecycle: Lifecycle
    stop: StopRequest
    world: WorldView
    spec: MoESpec
    offer: Offer
    sessions: SessionRegistry = field(default_factory=SessionRegistry)
    admit: Callable[[Attach], str | None] = lambda attach: None
    """Why the backend cannot take this Attention; None when it can."""
    operators: str = ""
    """Which operators stand behind the backend, where there is a choice."""
    connector: FFNConnector | None = None
    profiling: threading.Lock = field(default_factory=threading.Lock)
    """Held while times of single steps are captured (service.profiler)."""
    moe_kernel: str = ""
    weight_bytes: int = 0

    @property
    def experts_per_rank(self) -> list[int]:
        """Experts per layer of every F rank."""
        from ffn_faas.protocol.topology import expert_counts

        return expert_counts(self.spec.num_experts, self.config.world.size)

    def window_geometry(self, stages: int, capacity: int) -> WindowGeometry:
        """Shape of one (A rank, F rank) pair's windows."""
        spec = self.spec
        return WindowGeometry(stages, capacity, spec.hidden_size, spec.top_k, ELEMENT_SIZES[spec.dtype])

    @property
    def is_stuck(self) -> bool:
        """Whether an item was taken and not completed for longer than the stall limit. Waiting is never stuck."""
        return bool(self.stuck_reason)

    @property
    def stuck_reason(self) -> str:
        if self.connector is None:
            return ""
        age = self.connector.statistics()["item_s"]
        limit = self.config.stall_timeout_s
        return f"a step has been computing for {age:.0f} s (--stall-timeout {limit:.0f})" if age > limit else ""
