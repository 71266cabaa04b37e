"""Real F ranks over the twin, each a process, and A ranks that attach, pair and exchange in threads of the test."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import torch

from ffn_faas.afd_block import AfdBlock
from ffn_faas.ascend.shape import MAX_SEQUENCE
from ffn_faas.attention.data_plane import async_cam
from ffn_faas.attention.loader import Model, Place, attach_message
from ffn_faas.attention.session import AttentionSession
from tests.cam.model import Reference, TinyModel
from tests.service.daemon import Daemon, free_port

LOG = logging.getLogger("tests.cam")
TOKENS = 16


class FWorld:
    """M processes of ``serve --backend npu-async-cam --cam-ops cpu-twin``."""

    def __init__(
        self,
        model: Path,
        directory: Path,
        stack: ExitStack,
        ranks: int,
        attention: int,
        *flags: str,
        tokens: int = TOKENS,
        ops: str = "cpu-twin",
        **extra: Any,
    ) -> None:
        self.model, self.directory, self.ranks, self.attention = model, directory, ranks, attention
        self.extra, self.tokens, self.ops = extra, tokens, ops
        self.port = free_port(ranks)
        afd = {"role": "ffn", "num_attention_ranks": attention, "connector_extra_config": extra}
        arguments = [
            model,
            *("--backend", "npu-async-cam", "--cam-ops", ops),
            *(("--cam-twin-directory", directory) if ops == "cpu-twin" else ()),
            *("--port", self.port, "--max-num-batched-tokens", tokens),
            *("--additional-config", json.dumps({"afd": afd})),
            *flags,
        ]
        self.daemons = [
            stack.enter_context(Daemon(*arguments, environment=self._environment(rank))) for rank in range(ranks)
        ]

    def _environment(self, rank: int) -> dict[str, str]:
        return {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(self.ranks),
            "LOCAL_WORLD_SIZE": str(self.ranks),
            "BATCH_SIZE_FACTOR": str((self.tokens + 4) / MAX_SEQUENCE),
            "OMP_NUM_THREADS": "1",
        }

    def get(self, path: str, rank: int = 0) -> httpx.Response:
        return httpx.get(f"http://127.0.0.1:{self.port + rank}{path}")

    def block(self, **extra: Any) -> AfdBlock:
        """Attention's afd block."""
        raw = {
            "role": "attention",
            "connector": "cam",
            "port": self.port,
            "connector_extra_config": {
                "cam_ops": self.ops,
                **({"cam_twin_directory": str(self.directory)} if self.ops == "cpu-twin" else {}),
                "attach_timeout_s": 60,
                **self.extra,
                **extra,
            },
        }
        block = AfdBlock.from_additional_config({"afd": raw}, "attention")
        assert block is not None
        return block


@contextmanager
def f_world(
    model: Path,
    directory: Path,
    ranks: int,
    attention: int,
    *flags: str,
    made: type[FWorld] = FWorld,
    **options: Any,
) -> Iterator[FWorld]:
    """``options``: ``tokens`` and ``ops`` of FWorld, else keys of connector_extra_config."""
    with ExitStack() as stack:
        yield made(model, directory, stack, ranks, attention, *flags, **options)


class ARank:
    """What a vLLM worker does, without vLLM."""

    def __init__(self, world: FWorld, rank: int, tensor_parallel: int = 1, instance: str = "tests") -> None:
        block = world.block()
        self.model = Model.read(str(world.model), None, "auto", dummy=False)
        place = Place(instance, rank, world.attention, tensor_parallel)
        attach = attach_message(block, self.model, "tests", TOKENS, place)
        plane = async_cam(self.model.spec, attach, block, lethal=False)
        self.session = AttentionSession(f"{block.host}:{block.port}", attach, plane, LOG)
        self.rank, self.tensor_parallel = rank, tensor_parallel

    def join(self) -> None:
        self.session.attach(60)
        self.session.declare_layers(list(self.model.spec.layers))
        self.session.wait_ready(60)

    @property
    def client(self) -> Any:
        return self.session.client

    def check(self, tiny: TinyModel, reference: Reference, rounds: int = 2, **tolerance: float) -> None:
        """All layers, each answer as the oracle's: every bit of it, or within ``tolerance``."""
        device = self.client.device.torch_device
        generator = torch.Generator().manual_seed(self.rank)
        for step in range(rounds * len(tiny.numbers)):
            layer = step % len(tiny.numbers)
            count = int(torch.randint(1, TOKENS // self.tensor_parallel + 1, (1,), generator=generator))
            x = torch.randn(count, tiny.hidden, generator=generator).to(torch.bfloat16)
            scores = torch.rand(count, tiny.experts, generator=generator)
            ids = scores.topk(tiny.top_k, -1).indices.to(torch.int32)
            weights = torch.rand(count, tiny.top_k, generator=generator)
            self.client.dispatch(layer, x.to(device), ids.to(device), weights.to(device))
            got, want = self.client.combine().cpu(), reference.layer(x, ids, weights, tiny.numbers[layer])
            if tolerance:
                torch.testing.assert_close(got.float(), want.float(), **tolerance)
                continue
            assert torch.equal(got, want), (self.rank, layer, (got.float() - want.float()).abs().max())


def together(ranks: list[ARank], what: Callable[[ARank], None], timeout_s: float = 90) -> None:
    """Run ``what`` for all ranks at once; raises what one of them raises."""
    failures: list[BaseException] = []

    def run(rank: ARank) -> None:
        try:
            what(rank)
        except BaseException as error:  # noqa: BLE001
            failures.append(error)

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout_s)
        assert not thread.is_alive()
    for failure in failures:
        raise failure
