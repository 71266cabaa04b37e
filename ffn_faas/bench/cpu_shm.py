"""One remote layer over shared memory: dispatch, wait, experts, combine and the round trip; the same layer computed
locally by our kernel and by others; and the machine's ceilings. All in rounds, so that all see the same machine."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ffn_faas.bench import cpu_rivals, report
from ffn_faas.bench.cpu_layer import LayerShape, make_kernel
from ffn_faas.bench.cpu_machine import Ceiling, CopyFloor, Probe, machine
from ffn_faas.bench.cpu_service import Service
from ffn_faas.bench.fake_attention import Round, random_rows
from ffn_faas.bench.routing import Router
from ffn_faas.connectors.shm import SPIN_US
from ffn_faas.errors import ResourceError

if TYPE_CHECKING:
    import torch

    from ffn_faas.experts.kernels.base import ExpertKernel

log = logging.getLogger(__name__)
TOKENS = (1, 8, 32, 128, 512, 2048)
BURST_US = 60_000
"""A round measures about so much of round trips, and as many as this allows of each local kernel up to LOCAL."""
LOCAL = 4
REST_S = 0.003
"""Between kernels: threads of a rival may spin for a while after its call, and would slow down what comes next."""


@dataclass(frozen=True)
class Options:
    """``rivals``: names of cpu_rivals. ``kernel`` as --moe-kernel; "zero" computes nothing: the windows alone."""

    shape: LayerShape = field(default_factory=LayerShape)
    tokens: Sequence[int] = TOKENS
    sessions: Sequence[int] = (1,)
    stages: int = 1
    routing: str = "uniform"
    kernel: str = "auto"
    rivals: Sequence[str] = ()
    rounds: int = 9
    spin_us: int = SPIN_US


def run(options: Options) -> dict[str, Any]:
    """Measure; blocks for some seconds a size. Raises UsageError, ModelRefused, ResourceError."""
    router = Router(options.routing, options.shape.experts, options.shape.top_k)
    kernels = {"ours": make_kernel(options.kernel, options.shape)}
    missing: dict[str, str] = {}
    for name in options.rivals:
        try:
            kernels[name] = cpu_rivals.rival(name, options.shape)
        except ResourceError as error:
            missing[name] = str(error)
            log.warning("%s is left out: %s", name, error)
    probe = Probe(options.shape.dtype)
    rows = []
    for sessions in options.sessions:
        capacity = max(1, min(4096, max(options.tokens)))
        with Service(
            kernels["ours"],
            options.shape,
            sessions=sessions,
            stages=options.stages,
            capacity=capacity,
            routing=options.routing,
            spin_us=options.spin_us,
        ) as service:
            for tokens in options.tokens:
                size = _Size(options, tokens, sessions, kernels, router)
                for number in range(options.rounds):
                    size.one_round(number, service, probe)
                rows.append(size.row())
                log.info("%s", report.line(rows[-1], COLUMNS))
    return {
        "machine": machine(),
        "kernel": kernels["ours"].name,
        "routing": options.routing,
        "missing": missing,
        "ceilings": {
            "read_GBps": report.median([row["read_GBps"] for row in rows]),
            "peak_GFLOPs": report.median([row["peak_GFLOPs"] for row in rows]),
        },
        "rows": rows,
    }


class _Size:
    """Samples of one number of tokens and sessions."""

    def __init__(
        self, options: Options, tokens: int, sessions: int, kernels: dict[str, ExpertKernel], router: Router
    ) -> None:
        self._options, self._tokens, self._sessions = options, tokens, sessions
        self._kernels, self._router = kernels, router
        self._ceilings: list[Ceiling] = []
        self._floors: list[float] = []
        self._hits: list[int] = []
        self._trips: list[tuple[float, float, float, float]] = []
        self._steps: list[tuple[float, float]] = []
        self._steps_per_round: list[float] = []
        self._local: dict[str, list[float]] = {name: [] for name in kernels}
        self._copies: list[float] = []
        self._copy_floor = CopyFloor(tokens, options.shape.hidden, options.shape.dtype)
        self._one_row = _Batch(options.shape, router, 1, seed=0)
        self._repeats = 1

    def one_round(self, number: int, service: Service, probe: Probe) -> None:
        seed = 1000 * (1 + number) + self._tokens
        self._ceilings.append(probe.ceiling())
        self._copies.append(self._copy_floor.microseconds())
        if number == 0:
            # Warms up both sides, and tells how many fit.
            trip = min(sample[3] for sample in service.run(Round(self._tokens, seed, 3)))
            self._repeats = int(max(1, min(400, BURST_US / trip)))
        service.take_steps()
        self._trips += service.run(Round(self._tokens, seed, self._repeats))
        self._keep_steps(service.take_steps())
        if self._options.kernel == "zero":
            return
        order = list(self._kernels.items())
        for repeat in range(min(LOCAL, self._repeats)):
            batch = _Batch(self._options.shape, self._router, self._tokens, seed + repeat)
            self._hits.append(batch.experts_hit)
            self._floors.append(self._floor(batch.experts_hit))
            for name, kernel in order if number % 2 else reversed(order):
                time.sleep(REST_S)
                layer = number + repeat
                # As in a running model, where the layer before has just been computed: threads are awake.
                self._one_row.microseconds(kernel, (layer + 1) % self._options.shape.layers)
                self._local[name].append(batch.microseconds(kernel, layer % self._options.shape.layers))

    def _keep_steps(self, steps: list[tuple[float, float]]) -> None:
        """Of one round each, where a round took one step; else the mean of a burst."""
        self._steps_per_round.append(len(steps) / self._repeats)
        if len(steps) == self._repeats:
            self._steps += steps
        else:
            self._steps.append((sum(s[0] for s in steps) / self._repeats, sum(s[1] for s in steps) / self._repeats))

    def _floor(self, experts_hit: int) -> float:
        shape, ceiling = self._options.shape, self._ceilings[-1]
        nbytes = experts_hit * shape.spec().expert_bytes
        return max(nbytes / ceiling.read / 1e3, shape.flops(self._tokens) / ceiling.peak / 1e3)

    def row(self) -> dict[str, Any]:
        """Times in microseconds, medians; see docs/performance.md for what each one is."""
        shape = self._options.shape
        dispatch, wait, added, trip = (list(samples) for samples in zip(*self._trips, strict=True))
        experts, handed = (list(samples) for samples in zip(*self._steps, strict=True))
        read = report.median([ceiling.read for ceiling in self._ceilings])
        peak = report.median([ceiling.peak for ceiling in self._ceilings])
        row: dict[str, Any] = {"tokens": self._tokens, "hidden": shape.hidden, "sessions": self._sessions}
        row |= {"stages": self._options.stages, "experts_hit": round(report.median(self._hits), 1) if self._hits else 0}
        for name, samples in (("dispatch", dispatch), ("wait", wait), ("experts", experts), ("round_trip", trip)):
            row |= {f"{name}_us": report.quantile(samples, 0.5), f"{name}_p90_us": report.quantile(samples, 0.9)}
            row[f"{name}_p99_us"] = report.quantile(samples, 0.99)
        row["combine_us"] = report.median(added) + report.median(handed)
        row["p99_us"] = row["round_trip_p99_us"]
        row["steps"] = report.median(self._steps_per_round)
        row |= {"read_GBps": read, "peak_GFLOPs": peak, "copy_us": report.median(self._copies)}
        row["floor_us"] = report.median(self._floors) if self._floors else row["copy_us"]
        row["vs"] = {}
        if self._hits:
            row |= self._computed(read, peak)
        return row

    def _computed(self, read: float, peak: float) -> dict[str, Any]:
        shape, local = self._options.shape, report.median(self._local["ours"])
        gbps = report.median(self._hits) * shape.spec().expert_bytes / local / 1e3
        gflops = shape.flops(self._tokens) / local / 1e3
        times = {name: report.median(samples) for name, samples in self._local.items()}
        return {
            "local_us": local,
            "GBps": gbps,
            "GFLOPs": gflops,
            "of_read": 100 * gbps / read,
            "of_peak": 100 * gflops / peak,
            "of_floor": local / report.median(self._floors),
            "rivals_us": {name: value for name, value in times.items() if name != "ours"},
            "vs": {name: value / local for name, value in times.items() if name != "ours"},
        }


class _Batch:
    """One batch in F's own memory."""

    def __init__(self, shape: LayerShape, router: Router, tokens: int, seed: int) -> None:
        import torch

        ids, weights = router.draw(tokens, seed)
        self._ids, self._weights = torch.from_numpy(ids), torch.from_numpy(weights)
        kind = getattr(torch, shape.dtype)
        self._x = torch.from_numpy(random_rows(tokens, shape, seed)).view(kind)
        self._out: torch.Tensor = torch.empty(tokens, shape.hidden)
        self.experts_hit = len(set(ids[ids >= 0].tolist()))

    def microseconds(self, kernel: ExpertKernel, layer: int) -> float:
        begin = time.perf_counter_ns()
        kernel.compute(layer, self._x, self._ids, self._weights, self._out)
        return (time.perf_counter_ns() - begin) / 1e3


COLUMNS = {
    "tokens": "tokens",
    "sessions": "sessions",
    "experts_hit": "hit",
    "dispatch_us": "dispatch",
    "wait_us": "wait",
    "experts_us": "experts",
    "combine_us": "combine",
    "round_trip_us": "round trip",
    "round_trip_p90_us": "p90",
    "p99_us": "p99",
    "floor_us": "floor",
    "local_us": "local",
    "of_floor": "local/floor",
    "GBps": "GB/s",
    "of_read": "% read",
    "GFLOPs": "GFLOP/s",
    "of_peak": "% peak",
}


def print_table(result: dict[str, Any]) -> str:
    """The table of docs/performance.md: times in microseconds, "vs NAME" = its time / ours, local both."""
    rivals = sorted({name for row in result["rows"] for name in row["vs"]})
    columns = COLUMNS | {f"vs {name}": f"vs {name}" for name in rivals}
    rows = [row | {f"vs {name}": value for name, value in row["vs"].items()} for row in result["rows"]]
    ceilings = result["ceilings"]
    head = f"{result['machine']['cpu']}, {result['machine']['threads']} threads, kernel {result['kernel']}"
    head += f", routing {result['routing']}: read {ceilings['read_GBps']:.1f} GB/s"
    return f"{head}, {ceilings['peak_GFLOPs']:.0f} GFLOP/s\n{report.table(rows, columns)}"
