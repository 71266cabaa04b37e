"""The composition root of one F rank: parse, agree, load, capture, ready, loop, stop."""

from __future__ import annotations

import logging
import os
import platform
import socket
import time
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, version

from ffn_faas import __version__
from ffn_faas.backends import create_backend
from ffn_faas.backends.base import FFNBackend, Meeting, ProgressReport
from ffn_faas.config import ServeConfig
from ffn_faas.connectors.host_identity import host_identity
from ffn_faas.errors import FfnError, ModelRefused, Stuck, UsageError
from ffn_faas.experts.checkpoint import Checkpoint
from ffn_faas.experts.fingerprint import fingerprint
from ffn_faas.experts.model_path import resolve_model
from ffn_faas.experts.spec import MoESpec
from ffn_faas.http.app import create_app
from ffn_faas.http.server import HttpServer, TlsFiles, bind
from ffn_faas.protocol.handshake import Offer
from ffn_faas.protocol.topology import expert_range
from ffn_faas.service.last_words import TEARDOWN_S, LastWords
from ffn_faas.service.lifecycle import Lifecycle, Phase
from ffn_faas.service.parent import stop_with_parent
from ffn_faas.service.profiler import first_steps_kept
from ffn_faas.service.sessions import Cause, Limits, SessionRegistry
from ffn_faas.service.signals import stop_on_signals
from ffn_faas.service.state import ServiceState
from ffn_faas.service.step_loop import drain, run_steps
from ffn_faas.service.stop import Stopped, StopRequest
from ffn_faas.service.world import WorldHub, WorldView
from ffn_faas.service.world_member import WorldMember
from ffn_faas.telemetry.log import configure

log = logging.getLogger(__name__)
TORCHRUN_KILLS_AFTER_S = 30.0


def serve(config: ServeConfig, ignored_flags: Sequence[str] = ()) -> int:
    """Run one F rank until it is stopped or fails; returns the exit code (docs/operations.md has the table)."""
    configure(config.world, as_json=config.log_json)
    log.info(
        "ffn_faas %s, process %d, Python %s, torch %s, %s; backend %s, kernel %s, model %s",
        __version__,
        os.getpid(),
        platform.python_version(),
        _torch_version(),
        platform.machine(),
        config.backend,
        config.moe_kernel,
        config.model,
    )
    if ignored_flags:
        log.info("vLLM flags without effect on F: %s", ", ".join(ignored_flags))
    if config.launched and config.drain_timeout_s + TEARDOWN_S >= TORCHRUN_KILLS_AFTER_S:
        log.warning(
            "--drain-timeout %.0f: torchrun kills workers %.0f s after SIGTERM; only POST /stop leaves that much time",
            config.drain_timeout_s,
            TORCHRUN_KILLS_AFTER_S,
        )
    stop = StopRequest()
    try:
        words = LastWords(config, stop)
    except FfnError as error:
        log.error("%s", error)
        return error.exit_code
    with stop_on_signals(stop, words.bound_signals):
        if config.launched:
            stop_with_parent(stop)
        code, reason = _outcome(config, stop)
        if stop.retained:
            code = code or Stuck.exit_code
            log.error("exit %d without teardown: the backend keeps what a pending receive may still use", code)
        words.ended(code, reason)
        if stop.retained:
            logging.shutdown()
            os._exit(code)
    return code


def _torch_version() -> str:
    """Without importing it."""
    try:
        return version("torch")
    except PackageNotFoundError:
        return "absent"


def _outcome(config: ServeConfig, stop: StopRequest) -> tuple[int, str]:
    """Serve; how that ended, as exit code and reason."""
    try:
        _serve(config, stop)
    except Stopped as stopped:
        log.info("stopped before READY: %s", stopped.message)
    except FfnError as error:
        stop.request(str(error), error)
        log.error("%s", error)
        return error.exit_code, str(error)
    return (stop.error.exit_code if stop.error else 0), stop.reason


def _serve(config: ServeConfig, stop: StopRequest) -> None:
    lifecycle = Lifecycle()
    tls = TlsFiles(config.ssl_certfile, config.ssl_keyfile) if config.ssl_certfile else None
    if tls is not None:
        tls.check()
    with bind(config.host, config.listen_port) as listener:
        state, backend = _parse(config, lifecycle, stop)
        http = HttpServer(create_app(state), listener, tls)
        http.start()
        try:
            _run(state, backend)
        finally:
            for step in (backend.release, state.world.close, http.shutdown):
                _end(step)
            stop.retained = backend.retained


def _end(step: Callable[[], None]) -> None:
    try:
        step()
    except Exception:  # how the rank ended is known by now, and nothing that fails here may hide it
        log.exception("while ending")


def _parse(config: ServeConfig, lifecycle: Lifecycle, stop: StopRequest) -> tuple[ServiceState, FFNBackend]:
    """Everything that can be refused without reading a weight byte."""
    directory = resolve_model(config.model, config.revision)
    spec = MoESpec.from_model_dir(directory, dtype=config.dtype)
    if spec.num_experts < config.world.size:
        raise ModelRefused(
            f"{config.world.size} F ranks for {spec.num_experts} experts: some rank would own none",
            remedy=f"start at most {spec.num_experts} ranks",
        )
    checkpoint = None if config.load_format == "dummy" else Checkpoint.open(directory)
    backend = create_backend(config, spec)
    if spec.quantization not in backend.quantizations:
        raise ModelRefused(
            f"{directory}: experts of quantization {spec.quantization} are not served by --backend {config.backend}",
            remedy=f"it serves {', '.join(sorted(backend.quantizations))}",
        )
    if config.profile_dir is not None and not backend.can_record:
        raise UsageError(
            f"--profile: backend {config.backend} keeps no times of single steps", remedy=backend.times_elsewhere
        )
    if backend.operators:
        log.warning("--backend %s: ops=%s", config.backend, backend.operators)
    offer = Offer(
        fingerprint=fingerprint(spec, checkpoint),
        host=host_identity(),
        num_ffn_ranks=config.world.size,
        max_capacity=config.max_num_batched_tokens,
        transport=config.connector if backend.transport == "shm" else backend.transport,
        cam=backend.terms(),
    )
    world = _world(config, lifecycle, stop)
    world.rendezvous_port = backend.rendezvous_port
    owned = expert_range(spec.num_experts, config.world.size, config.world.rank)
    log.info(
        "%s: %d MoE layers, %d experts each, this rank owns %d..%d; management on %s:%d",
        spec.architecture,
        len(spec.layers),
        spec.num_experts,
        owned.start,
        owned.stop - 1,
        config.host,
        config.listen_port,
    )
    limits = Limits(config.max_sessions, config.window_memory)
    sessions = SessionRegistry(limits, backend.merge_bytes(spec))
    state = ServiceState(
        config,
        lifecycle,
        stop,
        world,
        spec,
        offer,
        sessions,
        admit=backend.admit,
        operators=backend.operators,
        moe_kernel=backend.kernel_name,
    )
    return state, backend


def _world(config: ServeConfig, lifecycle: Lifecycle, stop: StopRequest) -> WorldView:
    own_host = config.advertise_address or (socket.gethostname() if config.binds_all_addresses else config.host)
    own_address = f"[{own_host}]:{config.listen_port}" if ":" in own_host else f"{own_host}:{config.listen_port}"
    kind = WorldMember if config.world.rank else WorldHub
    return kind(config, lifecycle, stop, own_address)


def _run(state: ServiceState, backend: FFNBackend) -> None:
    lifecycle, stop = state.lifecycle, state.stop
    try:
        backend.prepare()
        state.world.form()
        lifecycle.advance(Phase.LOADING)
        state.weight_bytes = backend.load(_progress(lifecycle, stop))
        if untried := backend.untried():
            log.warning("never run on such hardware so far: %s", untried)
        state.connector = backend.connect()
        if backend.pairs:
            lifecycle.advance(Phase.PAIRING)
            log.info("loaded; waiting for Attention to pair with")
            host, port = state.config.rank_zero_host, state.world.rendezvous_port
            backend.pair(Meeting(host, port, stop.raise_if_requested))
        lifecycle.advance(Phase.CAPTURING)
        backend.capture()
        stop.raise_if_requested()
        lifecycle.advance(Phase.READY)
        stop.on_request(lambda: None if stop.error else lifecycle.drain(stop.reason))
        log.info("READY after %.1f s", lifecycle.snapshot().time_to_ready_s or 0.0)
        with first_steps_kept(state):
            run_steps(backend, state.connector, state.sessions, stop)
        if not stop:
            stop.request("Attention has detached")
        stop.raise_unless_asked_for()
        _stop(state, backend)
    except Stopped:
        lifecycle.advance(Phase.DRAINING, stop.reason)
        lifecycle.advance(Phase.STOPPED, stop.reason)
        raise
    except FfnError as error:
        _failed(state, error)
        raise
    except Exception as error:
        log.exception("an error that nobody foresaw")
        failure = FfnError(f"{type(error).__name__}: {error}", remedy="the traceback is in this rank's log")
        _failed(state, failure)
        raise failure from error


def _failed(state: ServiceState, error: FfnError) -> None:
    state.stop.request(str(error), error)
    state.lifecycle.fail(str(error))
    # What has paired cannot wait for the next F.
    state.sessions.end_all(Cause.F_FAILED, f"F failed: {error}", final=state.offer.cam is not None)


def _stop(state: ServiceState, backend: FFNBackend) -> None:
    reason, began, timeout_s = state.stop.reason, time.monotonic(), state.config.drain_timeout_s
    if state.stop.limit_s is not None:
        timeout_s = min(timeout_s, state.stop.limit_s / 2)
    log.info("stopping: %s", reason)
    state.lifecycle.drain(reason)  # whoever asked for the stop does so too, and may not have come to it yet
    drain(backend, state.world, state.sessions, state.stop, timeout_s)
    state.world.await_others(max(1.0, began + timeout_s - time.monotonic()))
    state.stop.raise_unless_asked_for()
    state.lifecycle.advance(Phase.STOPPED, reason)
    log.info("stopped: %s", reason)


def _progress(lifecycle: Lifecycle, stop: StopRequest) -> ProgressReport:
    def report(done: int, total: int) -> None:
        stop.raise_if_requested()
        lifecycle.report(done, total)

    return report
