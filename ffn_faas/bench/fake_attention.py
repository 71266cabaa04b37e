"""Attention without a model: a process of its own that drives the real client over the real windows.

It holds one client for each session. A round dispatches a post for each session and stage, then combines them in the
same order, as so many Attention instances in step would.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from ffn_faas import native
from ffn_faas.bench.cpu_layer import LayerShape
from ffn_faas.bench.routing import Router
from ffn_faas.connectors.base import WindowGeometry, WindowOffer
from ffn_faas.connectors.shm import SPIN_US, native_geometry
from ffn_faas.connectors.shm_client import fetch_windows
from ffn_faas.errors import ResourceError

if TYPE_CHECKING:
    from typing_extensions import Self

    from ffn_faas import _native

Samples: TypeAlias = "list[tuple[float, float, float, float]]"
"""Of each round in microseconds: dispatch, wait, sum, round trip."""
EPOCH = 1
_ANSWER_S = 120.0


@dataclass(frozen=True)
class Setup:
    """What the process is started with: a session for each offer, ``geometry.stages`` posts of each in a round."""

    offers: Sequence[WindowOffer]
    geometry: WindowGeometry
    shape: LayerShape
    routing: str
    spin_us: int = SPIN_US


@dataclass(frozen=True)
class Round:
    """``repeats`` rounds in a row, each with the routing of the next seed and the next layer; all posts of a round
    share ``tokens`` rows as evenly as can be."""

    tokens: int
    seed: int
    repeats: int


class FakeAttention(AbstractContextManager["FakeAttention"]):
    """The handle in F's process; leaving the context ends the process."""

    def __init__(self, setup: Setup) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, setup), name="fake Attention", daemon=True)
        self._process.start()
        theirs.close()
        self._answer()

    def run(self, rounds: Round) -> Samples:
        """Blocks; F must be stepping meanwhile. Raises ResourceError when the process fails or hangs."""
        self._pipe.send(rounds)
        samples: Samples = self._answer()
        return samples

    def kill(self) -> None:
        """A pending ``run`` fails. Any thread."""
        self._process.kill()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._pipe.close()
        self._process.join(10)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()

    def _answer(self) -> Any:
        try:
            answer = self._pipe.recv() if self._pipe.poll(_ANSWER_S) else "it does not answer"
        except EOFError:
            answer = "it ended"
        if isinstance(answer, str):
            raise ResourceError(f"the fake Attention failed: {answer}")
        return answer


def _serve(pipe: Connection, setup: Setup) -> None:
    try:
        clients = [_client(offer, setup) for offer in setup.offers]
        router = Router(setup.routing, setup.shape.experts, setup.shape.top_k)
        pipe.send([])
        while True:
            rounds = pipe.recv()
            prepared = [_posts(rounds, number, setup, router) for number in range(rounds.repeats)]
            pipe.send([_one_round(clients, posts) for posts in prepared])
    except EOFError:
        return
    except (OSError, RuntimeError, ValueError) as error:
        pipe.send(f"{type(error).__name__}: {error}")


def _client(offer: WindowOffer, setup: Setup) -> _native.AttentionClient:
    module = native.load()
    client: _native.AttentionClient = module.AttentionClient(
        native_geometry(setup.geometry), [setup.shape.experts], spin_us=setup.spin_us
    )
    client.set_layers(list(range(setup.shape.layers)))
    client.set_link(0, fetch_windows(offer, setup.geometry, EPOCH, 30))
    return client


@dataclass(frozen=True)
class _Post:
    session: int
    call: _native.Call
    out: np.ndarray[Any, Any]
    inputs: tuple[np.ndarray[Any, Any], ...]
    """Kept alive: the call knows their addresses only."""


def _posts(rounds: Round, number: int, setup: Setup, router: Router) -> list[_Post]:
    lanes = [(session, stage) for session in range(len(setup.offers)) for stage in range(setup.geometry.stages)]
    parts = np.array_split(np.arange(rounds.tokens), len(lanes))
    seed = rounds.seed + number
    ids, weights = router.draw(rounds.tokens, seed)
    x = random_rows(rounds.tokens, setup.shape, seed)
    layer = number % setup.shape.layers
    return [
        _post(session, stage, layer, tuple(np.ascontiguousarray(array[part]) for array in (x, ids, weights)), setup)
        for (session, stage), part in zip(lanes, parts, strict=True)
    ]


def _post(session: int, stage: int, layer: int, inputs: tuple[np.ndarray[Any, Any], ...], setup: Setup) -> _Post:
    module = native.load()
    x, ids, weights = inputs
    call = module.Call(
        stage=stage,
        handle=layer,
        rows=len(x),
        hidden_size=setup.shape.hidden,
        top_k=setup.shape.top_k,
        dtype={"float32": module.F32, "float16": module.F16}.get(setup.shape.dtype, module.BF16),
        x=x.ctypes.data,
        ids=ids.ctypes.data,
        ids_are_int64=False,
        weights=weights.ctypes.data,
    )
    out = np.empty_like(x)
    out.fill(0)  # its pages are there, as those of an engine's allocator are after the first steps
    return _Post(session, call, out, inputs)


def random_rows(tokens: int, shape: LayerShape, seed: int) -> np.ndarray[Any, Any]:
    """[tokens, hidden], unit normal, in the layer's type; bfloat16 as its 16 bits."""
    values = np.random.default_rng(seed).standard_normal((tokens, shape.hidden), np.float32)
    if shape.dtype == "bfloat16":
        values = values.view(np.uint32) >> 16
    kind = "uint16" if shape.dtype == "bfloat16" else shape.dtype
    rows: np.ndarray[Any, Any] = values.astype(kind)
    return rows


def _one_round(clients: Sequence[_native.AttentionClient], posts: Sequence[_Post]) -> tuple[float, float, float, float]:
    waited = sum(client.counters()["wait_ns"] for client in clients)
    begin = time.perf_counter_ns()
    for post in posts:
        clients[post.session].dispatch(post.call)
    dispatched = time.perf_counter_ns()
    for post in posts:
        clients[post.session].combine(post.call, post.out.ctypes.data)
    end = time.perf_counter_ns()
    wait = sum(client.counters()["wait_ns"] for client in clients) - waited
    return (dispatched - begin) / 1e3, wait / 1e3, (end - dispatched - wait) / 1e3, (end - begin) / 1e3
