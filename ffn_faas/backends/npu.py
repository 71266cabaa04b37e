"""The ``npu-async-cam`` backend: rows by the Async CAM operators, experts by the layered ones. Never run on an NPU.

With --cam-ops cpu-twin the same code runs on CPUs over a stand-in for the operators, for tests.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ffn_faas.ascend import group, plan
from ffn_faas.ascend.coordinator import FfnStartup
from ffn_faas.ascend.device import Device, cpu, npu, npu_index
from ffn_faas.ascend.pull import UNAVAILABLE
from ffn_faas.ascend.push import PushFfn
from ffn_faas.ascend.receiver import Farewells, Receiver
from ffn_faas.ascend.settings import BACKEND, TWIN
from ffn_faas.ascend.shape import DEFAULT_HCCL_BUFFER_MIB
from ffn_faas.ascend.step import PushStep, farewell_layer, layer_numbers, slot_table
from ffn_faas.ascend.times import StepTimes
from ffn_faas.ascend.watched import run_watched
from ffn_faas.backends.base import FFNBackend, Meeting, ProgressReport
from ffn_faas.config import ServeConfig
from ffn_faas.connectors.cam import TIMES_ELSEWHERE, CamConnector
from ffn_faas.errors import FfnError, ModelRefused, ResourceError, Stuck, UsageError
from ffn_faas.experts.checkpoint import Checkpoint
from ffn_faas.experts.model_path import resolve_model
from ffn_faas.experts.spec import MoESpec
from ffn_faas.protocol.messages import Attach, CamTerms
from ffn_faas.protocol.topology import expert_range

if TYPE_CHECKING:
    from ffn_faas.ascend.op_module import OpModule
    from ffn_faas.ascend.resident import ResidentExperts

log = logging.getLogger(__name__)
JOIN_S = {"eager": 5.0, "graph": 30.0}
"""For the thread that receives to leave once a stop is requested."""
_retained: list[Any] = []
"""What a receive that may be pending still uses, when the process has to end: never freed."""


class NpuBackend(FFNBackend):
    """The main thread only watches the thread that receives. One Attention, for the life of the process."""

    name = BACKEND
    transport = "cam"
    pairs = True
    times_elsewhere = TIMES_ELSEWHERE
    quantizations = frozenset({"w4a8", "w8a8"})

    def __init__(self, config: ServeConfig, spec: MoESpec) -> None:
        if config.cam is None:
            raise UsageError(f"--backend {BACKEND} needs its settings", remedy="see docs/ascend.md")
        world = config.world
        self._config, self._spec, self._settings = config, spec, config.cam
        self._shape = config.cam.checked_shape(spec, world.size, config.max_num_batched_tokens, "ffn")
        self._experts = expert_range(spec.num_experts, world.size, world.rank)
        self._numbers = layer_numbers(spec.layers)
        self.kernel_name = f"layered {spec.quantization}"
        self.operators = TWIN if config.cam.ops == TWIN else ""
        self._stopping = threading.Event()
        self._listener = _listen(config) if world.rank == 0 else None
        self.rendezvous_port = self._listener.getsockname()[1] if self._listener is not None else 0
        self._ops: OpModule | None = None
        self._device: Device | None = None
        self._store: Any = None
        self._hccl: group.HcclGroup | None = None
        self._weights: ResidentExperts | None = None
        self._times = StepTimes(self._numbers) if config.cam.ops == TWIN else None
        self.can_record = self._times is not None
        self._connector = CamConnector(self._shape.attention_ranks, times=self._times)
        self._startup: FfnStartup | None = None
        self._step: PushStep | None = None
        self._plan: plan.Plan | None = None
        self._receiver: Receiver | None = None
        self._met = False
        self._kept = False

    def terms(self) -> CamTerms:
        return self._settings.terms(self._config.max_num_batched_tokens)

    def admit(self, attach: Attach) -> str | None:
        if attach.attempt or self._connector.paired:
            return (
                f"{BACKEND} pairs with one Attention when both start: it takes no other one and no re-attach; "
                "restart F and Attention together"
            )
        return None

    def prepare(self) -> None:
        settings, world = self._settings, self._config.world
        if settings.mega:
            raise UsageError(UNAVAILABLE, remedy="leave ffn_mega_moe out on both sides")
        if self._config.load_format == "dummy":
            raise ModelRefused(f"--backend {BACKEND} has no dummy weights", remedy="make a small quantized checkpoint")
        if self._spec.quantization == "w8a8" and self._spec.swiglu_limit is not None:
            raise ModelRefused(
                f"--backend {BACKEND}: the operators for w8a8 experts know no SwiGLU limit, this model has "
                f"{self._spec.swiglu_limit:g}",
                remedy="serve w4a8 experts",
            )
        self._ops, self._device = operators(settings.ops, settings.twin_directory, world, self._config.device_ids)
        log.info("ops=%s on %s", self._ops.name, self._device.torch_device)
        if self._listener is not None:
            address, port = self._listener.getsockname()[:2]
            self._store = group.open_store(address, port, self._listener.detach())

    def load(self, progress: ProgressReport) -> int:
        from ffn_faas.ascend.checkpoint import load

        checkpoint = Checkpoint.open(resolve_model(self._config.model, self._config.revision))
        self._weights = load(self._spec, checkpoint, self._experts, self._on().torch_device, progress)
        return self._weights.nbytes

    def untried(self) -> str:
        return "" if self._settings.ops == TWIN else "this backend, on any NPU"

    def connect(self) -> CamConnector:
        return self._connector

    def pair(self, meeting: Meeting) -> None:
        """Wait for all A ranks, make the group, agree on the mode, run the paired warm-up."""
        connector, rank = self._connector, self._shape.ffn_world_rank(self._config.world.rank)
        connector.wait_loaded(meeting.interrupt)

        def interrupt() -> None:
            meeting.interrupt()
            if connector.error is not None:
                raise connector.error

        if self._store is None:
            self._store = group.open_store(meeting.host, meeting.port)
        self._met = True
        settings, eager = self._settings, self._config.enforce_eager
        if settings.ops != TWIN:
            buffer_mib = settings.hccl_buffer_mib or DEFAULT_HCCL_BUFFER_MIB["ffn"]
            self._hccl = group.HcclGroup(self._store, self._shape, rank, buffer_mib)
        self._startup = startup = FfnStartup(self._store, self._shape, rank, interrupt)
        startup.open()
        name = self._hccl.name if self._hccl is not None else group.twin_group_name(startup.nonce)
        self._step = step = self._made_step(rank, name)
        startup.agree(None if eager else self._numbers[0])
        if not eager:
            device = self._on()
            self._plan = plan.create(device.torch_device)
            startup.warm_up(lambda: run_watched(lambda: self._transactions(step), device, startup, interrupt))

    def capture(self) -> None:
        """Record the plan, start to receive, say so. Hook for CPU affinity: ``after_warm_up``."""
        startup, step, recorded = self._startup, self._step, self._plan
        if startup is None or step is None:
            raise ResourceError("pair() comes before capture()")
        self.after_warm_up()
        run = self._replay(recorded) if recorded is not None else step.eager
        device = self._on()
        self._receiver = receiver = Receiver(
            run,
            _chunk_of,
            Farewells(self._shape, farewell_layer(self._numbers)),
            device,
            startup.publish_failure,
            self._times,
        )
        self._connector.watch(receiver, step)
        startup.complete(
            lambda: recorded.capture(lambda: step.on_device(recorded.mark)) if recorded is not None else None,
            receiver.start,
        )

    def after_warm_up(self) -> None:
        """A deployment that pins threads to cores does it here: kernels have made theirs. Nothing by default."""

    def execute_step(self) -> bool:
        receiver = self._receiver
        if receiver is None:
            raise ResourceError("capture() comes before execute_step()")
        time.sleep(0.05)
        if receiver.error is not None:
            raise _as_ffn_error(receiver.error)
        if self._connector.error is not None and not self._stopping.is_set():
            if self._startup is not None:
                self._startup.publish_failure(self._connector.error)
            raise self._connector.error
        return not (self._stopping.is_set() or self._connector.all_detached)

    def cancel_receive(self) -> None:
        """A pending receive goes on; the loop leaves after Attention's farewell."""
        self._stopping.set()
        if self._receiver is not None:
            self._receiver.request_stop()

    def drain(self, deadline_s: float) -> None:
        """Wait for the thread that receives. Raises Stuck when a receive stays pending: everything is kept then."""
        self.cancel_receive()
        if self._receiver is None:
            return
        limit = min(deadline_s, JOIN_S["eager" if self._config.enforce_eager else "graph"])
        if not self._receiver.join(limit):
            raise Stuck(
                f"a receive is still pending after {limit:g} s and cannot be cancelled: this F rank keeps its weights, "
                "graph and communicator, and ends as it is",
                remedy="stop Attention first, or end both sides together",
            )
        if self._receiver.error is not None:
            raise _as_ffn_error(self._receiver.error)

    def release(self) -> None:
        if self._kept or self._device is None:
            return
        if self._startup is not None:
            self._startup.close()
        if self._met and not (self._receiver is not None and self._receiver.exited and self._receiver.drained):
            self._kept = True
            _retained.append(self)
            log.error("a receive may be pending: weights, graph and communicator are kept until the process is gone")
            return
        if self._plan is not None:
            self._plan.release()
        self._plan = self._receiver = self._step = self._weights = self._hccl = self._store = None
        if self._listener is not None:
            self._listener.close()

    @property
    def retained(self) -> bool:
        return self._kept

    def _on(self) -> Device:
        if self._device is None:
            raise ResourceError("prepare() comes first")
        return self._device

    def _made_step(self, rank: int, name: str) -> PushStep:
        from ffn_faas.ascend.experts import Arithmetic, LayeredExperts

        if self._ops is None or self._weights is None:
            raise ResourceError("load() comes before pair()")
        device = self._on().torch_device
        member = group.Member.create(self._ops, self._shape, rank, name, device, self._spec.dtype)
        experts = LayeredExperts(self._ops, self._weights, Arithmetic(self._spec.dtype, self._spec.swiglu_limit))
        return PushStep(PushFfn(member), experts, slot_table(self._numbers, device), self._times)

    def _transactions(self, step: PushStep) -> None:
        """One exchange of every group, by the very operators and shapes that are recorded afterwards."""
        groups = 0
        while groups < self._shape.groups:
            kept = step.on_device()
            self._on().synchronize()
            last_expert = int(_chunk_of(kept).batch_info[4])
            groups += last_expert == self._shape.experts_per_rank - 1

    def _replay(self, recorded: plan.Plan) -> Callable[[], Any]:
        def replay() -> Any:
            recorded.replay()
            return recorded.kept

        return replay


def operators(ops: str, twin_directory: str | None, world: Any, device_ids: tuple[int, ...]) -> tuple[OpModule, Device]:
    """The operators that were asked for and the device they run on; neither stands in for the other."""
    from ffn_faas.ascend.op_module import real_module, twin_module

    if ops == TWIN:
        return twin_module(Path(str(twin_directory))), cpu()
    module = real_module()
    import torch

    return module, npu(npu_index(world.local_rank, torch.npu.device_count(), device_ids))


def _listen(config: ServeConfig) -> socket.socket:
    """Bound before any other rank is told the port; the store takes it over later."""
    host = config.host or "0.0.0.0"  # noqa: S104 - "" is what the user may give for all addresses
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, config.data_port), family=family, backlog=1024)
    except OSError as error:
        raise ResourceError(
            f"no rendezvous on {host}:{config.data_port}: {error}", remedy="give another --data-port"
        ) from error


def _chunk_of(kept: Any) -> Any:
    """The chunk among what a step returns."""
    return kept[1]


def _as_ffn_error(error: BaseException) -> FfnError:
    if isinstance(error, FfnError):
        return error
    return ResourceError(f"the thread that receives failed: {type(error).__name__}: {error}", remedy="see the log")
