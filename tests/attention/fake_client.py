"""A data plane that only notes what the session tells it, and the session that has it."""

from __future__ import annotations

import logging
import threading
from typing import Any

from ffn_faas.attention.attempt import DataPlane
from ffn_faas.attention.session import AttentionSession
from ffn_faas.connectors.base import WindowGeometry, WindowOffer
from ffn_faas.protocol.messages import Attach, Granted

from .fake_f import ATTACH

NAMES = ["model.layers.0.mlp.experts", "model.layers.1.mlp.experts"]
LOG = logging.getLogger("tests.attention")


class FakeClient:
    def __init__(self, geometry: WindowGeometry, grants: list[Granted]) -> None:
        self.geometry = geometry
        self.grants = grants
        self.layers: list[int] = []
        self.links: dict[int, Any] = {}
        self.failed = threading.Event()
        self.reason = ""

    def set_layers(self, indices: list[int]) -> None:
        self.layers = indices

    def set_link(self, ffn_rank: int, arena: Any) -> None:
        self.links[ffn_rank] = arena

    def fail(self, reason: str) -> None:
        self.reason = self.reason or reason
        self.failed.set()


def session_to(address: str, attach: Attach = ATTACH) -> AttentionSession:
    def fetch(offer: WindowOffer, geometry: WindowGeometry, epoch: int, timeout: float) -> tuple[str, int]:
        return offer.ticket, epoch

    return AttentionSession(address, attach, DataPlane(FakeClient, fetch, 8, 2, 2), LOG)
