"""FFNBackend: the lifecycle of the compute half of F (not a tensor API)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ffn_faas.connectors.base import FFNConnector
    from ffn_faas.experts.spec import MoESpec
    from ffn_faas.protocol.messages import Attach, CamTerms

ProgressReport = Callable[[int, int], None]
"""Called with (bytes done, bytes in all) while weights load."""


@dataclass(frozen=True)
class Meeting:
    """Where a backend that pairs finds the others."""

    host: str
    """Of F rank 0."""
    port: int
    interrupt: Callable[[], None]
    """Called while waiting; raises when a stop is requested."""


class FFNBackend(ABC):
    """prepare -> load -> connect (-> pair) -> capture -> execute_step ... -> drain -> release, each once, in order.

    All but ``cancel_receive`` are called from one thread. A backend module imports no accelerator package when it
    is imported; third parties register theirs under the entry point group ``ffn_faas.backends``.
    """

    name: str
    transport: str = "shm"
    """What A has to speak (protocol.messages.Attach)."""
    can_record = False
    """Whether its connector keeps times of single steps (FFNConnector.can_record); where not, --profile is refused."""
    times_elsewhere = "remove it; /metrics has the totals"
    """The remedy that such a refusal names."""
    kernel_name: str
    """Which expert kernel computes, for logs and /status; set when the backend is made."""
    quantizations: frozenset[str] = frozenset({"none"})
    """MoESpec.quantization of the models it serves."""
    operators: str = ""
    """For logs and /status, where a stand-in may take the place of what the name promises: ``cpu-twin``."""
    pairs: bool = False
    """Whether it serves one Attention that it starts together with: ``pair`` then comes before ``capture``."""
    rendezvous_port: int = 0
    """On F rank 0 of a backend that pairs: port of its store, from the moment the backend is made."""

    @abstractmethod
    def prepare(self) -> None:
        """Check that this machine can run the backend; takes no device memory. Raises FfnError with the remedy."""

    @abstractmethod
    def load(self, progress: ProgressReport) -> int:
        """Read this rank's experts into their resident layout; returns the bytes that stay resident."""

    @abstractmethod
    def connect(self) -> FFNConnector:
        """Make the connector on which sessions open their windows."""

    def merge_bytes(self, spec: MoESpec) -> int:  # noqa: ARG002
        """Memory that posts of several sessions share, beyond windows; counted against --window-memory. Pure."""
        return 0

    def untried(self) -> str:
        """After ``load``: what of it has never been run on hardware like this; "" when all has."""
        return ""

    def terms(self) -> CamTerms | None:
        """What Attention must have equal beyond the model; None when there is no more."""
        return None

    def admit(self, attach: Attach) -> str | None:  # noqa: ARG002
        """Why this Attention cannot be taken, in words; None when it can. Any thread; never blocks."""
        return None

    def pair(self, meeting: Meeting) -> None:  # noqa: ARG002
        """Wait for Attention and start together with it. Blocks without a limit until all A ranks are there."""
        return

    @property
    def retained(self) -> bool:
        """After ``release``: whether something had to be kept that other code of the exit must not touch.

        The process then ends without any teardown.
        """
        return False

    @abstractmethod
    def capture(self) -> None:
        """Record graphs, warm kernels up. Nothing to do on backends without graphs."""

    @abstractmethod
    def execute_step(self) -> bool:
        """Wait for one item, compute and combine it. True = go on, also after an empty wait; False = asked to stop.

        Blocks for a bounded time (about 0.1 s) when there is nothing to do.
        """

    @abstractmethod
    def cancel_receive(self) -> None:
        """From another thread or a signal handler: the pending wait ends and ``execute_step`` returns False."""

    @abstractmethod
    def drain(self, deadline_s: float) -> None:
        """Finish posts in flight, for at most ``deadline_s`` seconds."""

    @abstractmethod
    def release(self) -> None:
        """Free graphs, windows, communicators and weights, in that order. Idempotent."""
