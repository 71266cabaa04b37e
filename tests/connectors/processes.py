"""F ranks in this process and Attention in others, joined by real brokers."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import numpy as np

from ffn_faas.connectors.base import WindowGeometry, WindowOffer
from ffn_faas.connectors.shm import ShmConnector
from tests.native.world import answer

ROOT = Path(__file__).parents[2]


class NumpyKernel:
    """The experts of tests.native.world as ``ShmConnector.step`` calls them: on torch views of the windows."""

    def __init__(self, first_expert: int) -> None:
        self.spec = SimpleNamespace(dtype="float32")
        self._first = first_expert

    def compute(self, layer, hidden, expert_ids, weights, out) -> None:
        views = {"hidden": hidden, "expert_ids": expert_ids, "weights": weights, "partial": out}
        arrays = {name: view.numpy() for name, view in views.items()}
        arrays["hidden"] = arrays["hidden"].view(np.uint8)
        answer(SimpleNamespace(layer=layer, **arrays), self._first, "float32")


class Service:
    """One F rank: a connector and the thread that steps it; ``before_step`` may block it."""

    def __init__(self, first_expert: int, num_experts: int, **options: int) -> None:
        self.connector = ShmConnector(**options)
        self.num_experts = num_experts
        self._kernel = NumpyKernel(first_expert)
        self._stop = False
        self.failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        try:
            while not self._stop:
                self.connector.step(self._kernel, 0.1)
        except BaseException as error:  # noqa: BLE001 - raised again by close
            self.failure = error

    def stop(self) -> None:
        self._stop = True
        self.connector.cancel_receive()
        self._thread.join()
        if self.failure is not None:
            raise self.failure

    def close(self) -> None:
        self.stop()
        self.connector.close()


class Attention:
    """An attached Attention process; ``links`` are its keys, one per service."""

    def __init__(
        self,
        services: list[Service],
        geometry: WindowGeometry,
        epoch: int,
        mode: str,
        over: str = "shm",
        **options: int,
    ) -> None:
        opened = [self._open(service, geometry, epoch, over) for service in services]
        arguments = {
            "mode": mode,
            "offers": [dataclasses.astuple(offer) for _, offer in opened],
            "geometry": dataclasses.astuple(geometry),
            "counts": [service.num_experts for service in services],
            "epoch": epoch,
            **options,
        }
        self.services = services
        self.links = [link for link, _ in opened]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.connectors.attention_process", json.dumps(arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        )
        self.expect("mapped")
        for service, link in zip(services, self.links, strict=True):
            service.connector.activate_link(link)

    @staticmethod
    def _open(service: Service, geometry: WindowGeometry, epoch: int, over: str) -> tuple[int, WindowOffer]:
        connector = service.connector
        open_link = connector.open_link if over == "shm" else connector.open_remote_link
        link, offer = open_link(geometry, epoch, [service.num_experts] * 2)
        return link, dataclasses.replace(offer, broker=offer.broker.replace("tcp:", "tcp:127.0.0.1:"))

    def start(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("go\n")
        self.process.stdin.flush()

    def expect(self, line: str) -> None:
        assert self.process.stdout is not None
        assert self.process.stdout.readline().strip() == line

    def end(self) -> int:
        """Wait for the process, close its pipes and links; its exit code."""
        code = self.process.wait(timeout=60)
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()
        for service, link in zip(self.services, self.links, strict=True):
            service.connector.close_link(link)
        return code
