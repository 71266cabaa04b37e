"""How A ranks and F ranks of a CAM system start together, over a torch ``Store`` and without any collective.

Communication buffers of A and F differ in size, which breaks HCCL's own broadcasts, so keys of a store carry all of it.
World rank 0 names the start by 16 random bytes; everything else is said below that name, so one start needs a store
that no other start has used. ``W`` is a world rank:

    ffn/mode/W           F: "eager" or "graph:LAYER", equal on all
    attn/prepared/W      A: may be warmed up                          graph only
    ffn/warmup/start/W   F: every A is prepared                       graph only
    attn/done/W          A: its dispatch and combine came back        graph only
    ffn/warmup/done/W    F: its transactions of all groups are done   graph only
    ffn/W                F: "ready", once it receives; or "failed:WHY"
    attn/failure/W       A: why it failed

A failure stays: every wait looks for one, and so does Attention after it has seen all of F ready.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ffn_faas.errors import LaunchDisagreement, SessionLost, Stuck

if TYPE_CHECKING:
    from ffn_faas.ascend.shape import CamShape

BOOTSTRAP = "ffn_faas/afd_async_cam"
NONCE = "nonce"
STARTUP = "afd_async_cam/startup"
EAGER, GRAPH, READY, FAILED = "eager", "graph:", "ready", "failed:"


@dataclass(frozen=True)
class Timing:
    """Seconds."""

    wait: float = 300.0
    """For each thing that others have to do."""
    poll: float = 0.25
    receiver: float = 30.0
    """For the thread that receives to say that it runs."""


TIMING = Timing()


class Coordinator:
    """What both sides share. A step that raises is the end: its reason is published, later steps are refused.

    Steps block, each of their waits for ``timing.wait`` seconds at most; ``interrupt`` is called in every poll and may
    raise. One thread makes all calls but ``publish_failure``, which any may.
    """

    def __init__(
        self,
        store: Any,
        shape: CamShape,
        world_rank: int,
        interrupt: Callable[[], None] = lambda: None,
        timing: Timing = TIMING,
    ) -> None:
        self._bootstrap = store
        self._store: Any = None
        self._interrupt = interrupt
        self._timing = timing
        self._world_rank = world_rank
        self._attention = range(shape.attention_ranks)
        self._ffn = range(shape.attention_ranks, shape.world_size)
        self._failure: BaseException | None = None
        self._started = False
        self._closed = False
        self.nonce = ""

    @property
    def started(self) -> bool:
        return self._started

    @property
    def poll_s(self) -> float:
        return self._timing.poll

    def open(self) -> None:
        """Agree on the name of this start; nothing is published before. Idempotent."""
        with self._step():
            if self._store is not None:
                return
            from torch.distributed import PrefixStore

            bootstrap = PrefixStore(BOOTSTRAP, self._bootstrap)
            if self._world_rank == 0:
                bootstrap.set(NONCE, secrets.token_hex(16))
            self._poll(lambda: bootstrap.check([NONCE]), "A rank 0 to name this start")
            self.nonce = bootstrap.get(NONCE).decode()
            self._store = PrefixStore(f"{STARTUP}/{self.nonce}", self._bootstrap)

    def close(self) -> None:
        """No step may begin any more."""
        self._closed = True

    def publish_failure(self, error: BaseException) -> None:
        """Tell all others, now and in all their later looks. Without a name of this start nobody could hear it."""
        if self._store is not None:
            with suppress(RuntimeError):  # the store is gone, and with it whoever would read
                self._store.set(*self._failure_entry(f"{type(error).__name__}: {error}"))

    def raise_if_failed(self) -> None:
        """Raise SessionLost when any rank has published a failure."""
        for rank in self._attention:
            if why := self._read(f"attn/failure/{rank}"):
                raise SessionLost(f"A rank {rank} failed while it paired with F: {why}", remedy="see that rank's log")
        for rank in self._ffn:
            said = self._read(f"ffn/{rank}")
            if said.startswith(FAILED):
                number = rank - len(self._attention)
                raise SessionLost(
                    f"F rank {number} failed while it paired with Attention: {said.removeprefix(FAILED)}",
                    remedy="see that rank's log",
                )

    def _failure_entry(self, why: str) -> tuple[str, str]:
        raise NotImplementedError

    @contextmanager
    def _step(self) -> Iterator[None]:
        if self._failure is not None:
            raise SessionLost(f"pairing has failed before: {self._failure}", remedy="start A and F again")
        if self._closed:
            raise SessionLost("pairing is over: this side has been closed", remedy="start A and F again")
        try:
            yield
        except BaseException as error:
            self._failure = error
            self.publish_failure(error)
            if isinstance(error, RuntimeError):
                from torch.distributed import DistError

                what = "the store of the rendezvous" if isinstance(error, DistError) else "pairing"
                raise SessionLost(f"{what} failed: {error}", remedy="see the logs; start A and F again") from error
            raise

    def _say(self, key: str, value: str = "1") -> None:
        self._store.set(key, value)

    def _read(self, key: str) -> str:
        return str(self._store.get(key).decode()) if self._store.check([key]) else ""

    def _await(self, prefix: str, ranks: Sequence[int], what: str) -> list[str]:
        """The values of one key of every rank, once all are there."""
        keys = [f"{prefix}{rank}" for rank in ranks]

        def missing() -> str:
            return ", ".join(key for key in keys if not self._store.check([key]))

        self._poll(lambda: self._store.check(keys), what, missing)
        return [self._read(key) for key in keys]

    def _poll(self, done: Callable[[], bool], what: str, missing: Callable[[], str] = lambda: "") -> None:
        deadline = time.monotonic() + self._timing.wait
        while not done():
            self._look_around()
            if time.monotonic() > deadline:
                keys = f" ({missing()})" if missing() else ""
                raise SessionLost(
                    f"world rank {self._world_rank} waited {self._timing.wait:g} s for {what}{keys}",
                    remedy="see the log of who is waited for; start A and F again",
                )
            time.sleep(self._timing.poll)
        self._look_around()

    def _look_around(self) -> None:
        self._interrupt()
        if self._store is not None:
            self.raise_if_failed()

    def _agreed_mode(self) -> str:
        modes = self._await("ffn/mode/", self._ffn, "every F rank to say whether it runs eager or in one graph")
        if len(set(modes)) > 1:
            told = ", ".join(f"F rank {number}: {mode}" for number, mode in enumerate(modes))
            raise LaunchDisagreement(
                f"F ranks run in different modes: {told}", remedy="give all of them --enforce-eager, or none"
            )
        return modes[0]


class AttentionStartup(Coordinator):
    """One A rank's part."""

    def run(self, warm_up: Callable[[int], None]) -> None:
        """Return once every F rank is ready. ``warm_up(layer)``: one dispatch and combine on that layer; may block.

        Idempotent once it has succeeded.
        """
        if self._started and not self._closed and self._failure is None:
            return
        self.open()
        with self._step():
            mode = self._agreed_mode()
            if mode.startswith(GRAPH):
                self._say(f"attn/prepared/{self._world_rank}")
                self._await("ffn/warmup/start/", self._ffn, "every F rank to begin the warm-up")
                warm_up(int(mode.removeprefix(GRAPH)))
                self._say(f"attn/done/{self._world_rank}")
                self._await("ffn/warmup/done/", self._ffn, "every F rank to end the warm-up")
            self._await("ffn/", self._ffn, "every F rank to be ready")
            self.raise_if_failed()
            self._started = True

    def _failure_entry(self, why: str) -> tuple[str, str]:
        return f"attn/failure/{self._world_rank}", why


class FfnStartup(Coordinator):
    """One F rank's part: agree -> warm_up -> complete; each is idempotent once ``complete`` has succeeded."""

    def agree(self, first_layer: int | None) -> None:
        """``first_layer``: number of the layer to warm up on, None when this F rank runs eager."""
        if self._is_done():
            return
        self.open()
        with self._step():
            mode = EAGER if first_layer is None else f"{GRAPH}{first_layer}"
            self._say(f"ffn/mode/{self._world_rank}", mode)
            self._agreed_mode()

    def warm_up(self, transactions: Callable[[], None]) -> None:
        """``transactions``: receive, compute and send once for every group of A ranks; may block. Graph only."""
        if self._is_done():
            return
        with self._step():
            self._await("attn/prepared/", self._attention, "every A rank to be prepared")
            self._say(f"ffn/warmup/start/{self._world_rank}")
            transactions()
            self._say(f"ffn/warmup/done/{self._world_rank}")
            self._await("attn/done/", self._attention, "every A rank to end the warm-up")
            self._await("ffn/warmup/done/", self._ffn, "every F rank to end the warm-up")

    def complete(self, capture: Callable[[], None], start_receiver: Callable[[float], bool]) -> None:
        """``capture`` runs no transaction. ``start_receiver(seconds)``: whether the thread runs within that time."""
        if self._is_done():
            return
        with self._step():
            capture()
            self._look_around()
            if not start_receiver(self._timing.receiver):
                raise Stuck(f"the thread that receives did not start within {self._timing.receiver:g} s")
            mine = f"ffn/{self._world_rank}"
            said = self._store.compare_set(mine, "", READY).decode()
            if said != READY:
                raise SessionLost(f"this F rank has failed before it was ready: {said.removeprefix(FAILED)}")
            self._started = True

    def _is_done(self) -> bool:
        return self._started and not self._closed and self._failure is None

    def _failure_entry(self, why: str) -> tuple[str, str]:
        return f"ffn/{self._world_rank}", f"{FAILED}{why}"


def warm_up_ids(tp_rank: int, shape: CamShape) -> list[int]:
    """Expert ids of the one row that an A rank sends in the warm-up: every F rank gets some, whatever the rank."""
    ranks, experts = shape.ffn_ranks, shape.experts_per_rank
    numbers = range(tp_rank * shape.top_k, (tp_rank + 1) * shape.top_k)
    return [(n % ranks) * experts + (n // ranks) % experts for n in numbers]
