"""One remote layer over the M2N windows: dispatch, experts, combine and the round trip, against the two ceilings."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ffn_faas.bench import report
from ffn_faas.bench.gpu_rig import Batch, LayerShape, Rig, Weights, replay_times
from ffn_faas.bench.gpu_rivals import EAGER, rival
from ffn_faas.connectors import m2n_library as parts
from ffn_faas.errors import ResourceError

if TYPE_CHECKING:
    import torch

log = logging.getLogger(__name__)
SHAPES = {
    2048: LayerShape(2048, 768, 128, 8, 8),
    4096: LayerShape(4096, 1536, 128, 8, 2),
    7168: LayerShape(7168, 2048, 256, 8, 1),
}
"""By hidden size: Qwen3-30B-A3B, Qwen3-235B-A22B, DeepSeek-V3. bf16."""
TOKENS = (1, 8, 32, 64, 128, 256, 512, 1024, 4096, 8192)
ORACLE_ROWS = 256
LONG_ROWS = 512
"""Above it a kernel alone fills a replay, as the product that gives the matrix peak does."""
ROUNDS = 8
"""Least round trips in a replay up to LONG_ROWS: launching a graph costs some microseconds, which they share."""
COLUMNS = {
    "hidden": "hidden",
    "tokens": "tokens",
    "experts_hit": "hit",
    "round_trip_us": "round trip",
    "round_trip_p99_us": "p99",
    "windows_us": "windows only",
    "dispatch_us": "dispatch",
    "experts_us": "experts",
    "experts_p99_us": "p99",
    "combine_us": "combine",
    "of_byte_floor": "% byte floor",
    "of_matrix_peak": "% matrix peak",
    "l2_error": "error",
}


@dataclass(frozen=True)
class Options:
    """``f`` and ``a``: indices of the GPUs; equal for one GPU: both halves in one stream, in turns."""

    f: int
    a: int
    tokens: Sequence[int] = TOKENS
    hidden: Sequence[int] = tuple(SHAPES)
    rivals: Sequence[str] = ()
    replays: int = 50


def run(options: Options) -> dict[str, Any]:
    """Measure; blocks for about ten seconds a hidden size. Times in microseconds. Raises ResourceError."""
    import torch

    library = parts.load()
    devices = library.devices()
    if max(options.f, options.a) >= len(devices):
        raise ResourceError(f"GPU {max(options.f, options.a)} is not among the {len(devices)} visible ones")
    torch.cuda.set_device(options.f)
    ceilings = _ceilings(library, torch.cuda.Stream(options.f))
    log.info("ceilings: %s", ceilings)
    rows: list[dict[str, Any]] = []
    for hidden in options.hidden:
        shape = SHAPES[hidden]
        weights = Weights(library, shape, options.f)
        for tokens in options.tokens:
            rows.append(_one_size(library, shape, weights, tokens, options, ceilings))
            log.info("%s", rows[-1])
        del weights
        torch.cuda.empty_cache()
    names = [devices[options.f].name] + ([devices[options.a].name] if options.a != options.f else [])
    return {"devices": names, "torch": torch.__version__, **ceilings, "rows": rows}


def print_table(result: dict[str, Any], rivals: Sequence[str]) -> str:
    """The table of docs/performance.md."""
    columns = COLUMNS | {key: head for name in rivals for key, head in _rival_columns(name).items()}
    ceilings = f"read {result['read_TBps']:.2f} TB/s, bf16 {result['matrix_TFLOPs']:.0f} TFLOP/s"
    return f"{' + '.join(result['devices'])}: {ceilings}\n{report.table(result['rows'], columns)}"


def _rival_columns(name: str) -> dict[str, str]:
    return {f"{name}_us": name, f"{name}_l2_error": "its error", f"vs_{name}": f"ours / {name}"}


def _ceilings(library: parts.Library, stream: torch.cuda.Stream) -> dict[str, float]:
    import torch

    data = torch.randint(0, 255, (4 << 30,), dtype=torch.uint8, device="cuda")
    sink = torch.zeros(4, dtype=torch.int32, device="cuda")
    arguments = data.data_ptr(), data.numel(), sink.data_ptr(), stream.cuda_stream
    read = report.quantiles(replay_times(lambda: library.call("read_all", *arguments), stream, 1, 10))[0]
    a, b = (torch.randn(8192, 8192, device="cuda").bfloat16() for _ in range(2))
    product = torch.empty_like(a)
    matrix = report.quantiles(replay_times(lambda: torch.mm(a, b, out=product), stream, 1, 20))[0]
    return {"read_TBps": data.numel() / read / 1e6, "matrix_TFLOPs": 2 * 8192**3 / matrix / 1e6}


def _one_size(
    library: parts.Library,
    shape: LayerShape,
    weights: Weights,
    tokens: int,
    options: Options,
    ceilings: dict[str, float],
) -> dict[str, Any]:
    import torch

    rig = Rig(library, shape, weights, tokens, options.f, options.a)
    batches = [rig.batch(tokens, 100 + layer) for layer in range(shape.layers)]
    hit = sum(len(batch.ids.unique()) for batch in batches) / len(batches)
    stream = torch.cuda.Stream(options.a)
    row: dict[str, Any] = {"hidden": shape.hidden, "tokens": tokens, "experts_hit": round(hit, 1)}
    times = _round_trips(rig, batches, stream, parts.STEP, options.replays)
    row["round_trip_us"], row["round_trip_p99_us"] = report.quantiles(times)
    if tokens <= ORACLE_ROWS:
        row["l2_error"] = _l2_error(batches[0].out, shape, weights, batches[0])
    without = parts.WAIT_SORT | parts.COMBINE | parts.OVERLAP
    row["windows_us"] = report.quantiles(_round_trips(rig, batches, stream, without, options.replays))[0]
    row |= _verbs(rig, batches[0], stream, options)
    floor = hit * shape.expert_bytes / ceilings["read_TBps"] / 1e6
    flops = 6 * tokens * shape.top_k * shape.hidden * shape.inter
    row["of_byte_floor"] = 100 * floor / row["experts_us"]
    row["of_matrix_peak"] = 100 * flops / row["experts_us"] / 1e6 / ceilings["matrix_TFLOPs"]
    rig.close()
    for name in options.rivals:
        try:
            row |= _rival_times(name, shape, weights, batches, options)
        except (ImportError, RuntimeError) as error:
            log.warning("%s could not be measured at %d tokens: %s", name, tokens, error)
            continue
        row[f"vs_{name}"] = row["round_trip_us"] / row[f"{name}_us"]
    return row


def _round_trips(rig: Rig, batches: list[Batch], stream: torch.cuda.Stream, kernels: int, replays: int) -> list[float]:
    """A's graph of round trips to all layers in turn. On one GPU F's kernels stand in the same graph."""
    import torch

    torch.cuda.set_device(rig.a)
    one_gpu = rig.f == rig.a
    rounds = len(batches) if batches[0].x.shape[0] > LONG_ROWS else max(ROUNDS, len(batches))

    def record() -> None:
        for turn in range(rounds):
            layer = turn % len(batches)
            batch = batches[layer]
            rig.dispatch(layer, batch, stream.cuda_stream)
            if one_gpu:
                rig.service.enqueue(kernels, stream.cuda_stream)
            rig.receive(batch, stream.cuda_stream)

    if one_gpu:
        return replay_times(record, stream, rounds, replays)
    rig.library.call("use_device", rig.f)
    rig.service.capture(kernels)
    rig.library.call("use_device", rig.a)
    with rig.serving():
        times = replay_times(record, stream, rounds, replays)
    if rig.attention.status(0) != "fine":
        raise ResourceError(f"a wait {rig.attention.status(0)}")
    return times


def _verbs(rig: Rig, batch: Batch, stream: torch.cuda.Stream, options: Options) -> dict[str, float]:
    """Each kernel alone, ten in a graph for small batches: all may run again on the same post."""
    import torch

    rig.dispatch(0, batch, stream.cuda_stream)
    torch.cuda.synchronize(rig.a)
    torch.cuda.set_device(rig.f)
    ours = torch.cuda.Stream(rig.f)
    rig.service.enqueue(parts.STEP, ours.cuda_stream)
    ours.synchronize()

    repeats = 1 if batch.x.shape[0] > LONG_ROWS else 10

    def kernel(which: int) -> tuple[float, float]:
        def record() -> None:
            for _ in range(repeats):
                rig.service.enqueue(which, ours.cuda_stream)

        return report.quantiles(replay_times(record, ours, repeats, options.replays))

    def send() -> None:
        for _ in range(repeats):
            rig.dispatch(0, batch, stream.cuda_stream)

    experts, experts_p99 = kernel(parts.EXPERTS)
    combine, combine_p99 = kernel(parts.COMBINE)
    torch.cuda.set_device(rig.a)
    dispatch, dispatch_p99 = report.quantiles(replay_times(send, stream, repeats, options.replays))
    nbytes = batch.x.numel() * 2
    return {
        "experts_us": experts,
        "experts_p99_us": experts_p99,
        "combine_us": combine,
        "combine_p99_us": combine_p99,
        "dispatch_us": dispatch,
        "dispatch_p99_us": dispatch_p99,
        "dispatch_GBps": nbytes / dispatch / 1e3,
        "combine_GBps": nbytes / combine / 1e3,
    }


def _rival_times(
    name: str, shape: LayerShape, weights: Weights, batches: list[Batch], options: Options
) -> dict[str, float]:
    import torch

    torch.cuda.set_device(options.f)
    here = [Batch(*(part.to(f"cuda:{options.f}") for part in vars(batch).values())) for batch in batches]
    layer = rival(name, shape, weights)
    stream = torch.cuda.Stream(options.f)
    results: list[torch.Tensor] = []

    def record() -> None:
        results[:] = [layer(index, batch) for index, batch in enumerate(here)]

    times = replay_times(record, stream, len(here), options.replays, eager=name in EAGER)
    median, p99 = report.quantiles(times)
    row = {f"{name}_us": median, f"{name}_p99_us": p99}
    if here[0].x.shape[0] <= ORACLE_ROWS:
        row[f"{name}_l2_error"] = _l2_error(results[0], shape, weights, here[0])
    return row


def _l2_error(result: torch.Tensor, shape: LayerShape, weights: Weights, batch: Batch) -> float:
    """Of layer 0 against float64, |result - reference| / |reference|."""
    import torch

    where = weights.w13.device
    x, ids, scales = batch.x.to(where).double(), batch.ids.to(where), batch.weights.to(where).double()
    reference = torch.zeros_like(x)
    for expert in range(shape.experts):
        token, k = (ids == expert).nonzero(as_tuple=True)
        if token.numel():
            gate, up = (x[token] @ weights.w13[expert].double().t()).chunk(2, -1)
            partial = (torch.nn.functional.silu(gate) * up) @ weights.w2[expert].double().t()
            reference.index_add_(0, token, partial * scales[token, k].unsqueeze(1))
    return float((result.to(where).double() - reference).norm() / reference.norm())
