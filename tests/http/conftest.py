"""A management port on a free loopback port, over a connector that needs no memory."""

import json
from dataclasses import dataclass, field

import httpx
import pytest
from websockets.sync.client import connect

from ffn_faas.config import ServeConfig, World
from ffn_faas.connectors.base import FFNConnector, WindowOffer
from ffn_faas.experts.spec import MoESpec
from ffn_faas.http.app import create_app
from ffn_faas.http.server import HttpServer, bind
from ffn_faas.protocol import PROTOCOL_VERSION, messages
from ffn_faas.protocol.handshake import Offer
from ffn_faas.protocol.messages import Fingerprint, HostIdentity
from ffn_faas.service.lifecycle import Lifecycle, Phase
from ffn_faas.service.sessions import NO_LIMITS, SessionRegistry
from ffn_faas.service.state import ServiceState
from ffn_faas.service.stop import StopRequest
from ffn_faas.service.world import WorldHub

HOST = HostIdentity(boot_id="0123456789", network_namespace="net:[1]")
SPEC = MoESpec(
    architecture="Qwen3MoeForCausalLM",
    hidden_size=64,
    intermediate_size=32,
    num_experts=8,
    top_k=2,
    dtype="bfloat16",
    activation="silu",
    quantization="none",
    layers=("model.layers.0.mlp.experts", "model.layers.1.mlp.experts"),
)
FINGERPRINT = Fingerprint(
    architecture=SPEC.architecture,
    hidden_size=64,
    intermediate_size=32,
    num_experts=8,
    top_k=2,
    dtype="bfloat16",
    activation="silu",
    quantization="none",
    num_moe_layers=2,
    checkpoint="dummy",
)


@dataclass
class RecordingConnector(FFNConnector):
    """Keeps what it is asked, hands out keys."""

    transport: str = "shm"
    opened: list = field(default_factory=list)
    active: set = field(default_factory=set)

    def open_link(self, geometry, epoch, expert_counts):
        self.opened.append((geometry, epoch, expert_counts))
        return len(self.opened), WindowOffer("broker", "ticket", 4096)

    def activate_link(self, link):
        self.active.add(link)

    def close_link(self, link):
        self.active.discard(link)

    def receive(self, timeout_s):
        return None

    def step(self, kernel, timeout_s):
        return False

    def cancel_receive(self):
        pass

    def take_faults(self):
        return []

    def statistics(self):
        return dict.fromkeys(
            ("steps", "rows", "posts", "splits", "wait_s", "compute_s", "post_s", "idle_s", "item_s"), 0.0
        )

    def close(self):
        pass


ALONE = World()


class Service:
    """One F rank's HTTP side, driven by hand."""

    def __init__(self, world=ALONE, limits=NO_LIMITS, token=None, tls=None):
        listener = bind("127.0.0.1", 0)
        self.port = listener.getsockname()[1]
        certificate = tls.certificate if tls is not None else None
        config = ServeConfig(
            model="m", world=world, port=self.port - world.local_rank, token=token, ssl_certfile=certificate
        )
        lifecycle, stop = Lifecycle(), StopRequest()
        hub = WorldHub(config, lifecycle, stop, f"127.0.0.1:{self.port}")
        offer = Offer(fingerprint=FINGERPRINT, host=HOST, num_ffn_ranks=world.size, max_capacity=512)
        self.state = ServiceState(config, lifecycle, stop, hub, SPEC, offer, SessionRegistry(limits))
        self.connector = RecordingConnector()
        self.server = HttpServer(create_app(self.state), listener, tls)
        self.server.start()

    def to(self, *phases):
        for phase in phases:
            if phase is Phase.READY:
                self.state.connector = self.connector
            self.state.lifecycle.advance(phase)

    def to_ready(self):
        self.to(Phase.LOADING, Phase.CAPTURING, Phase.READY)

    def get(self, path):
        return httpx.get(f"http://127.0.0.1:{self.port}{path}")

    def post(self, path):
        return httpx.post(f"http://127.0.0.1:{self.port}{path}")

    def socket(self, path="/v1/attach"):
        return connect(f"ws://127.0.0.1:{self.port}{path}", ping_interval=None, proxy=None)


def attach_message(**changes):
    fields = {
        "protocol_version": PROTOCOL_VERSION,
        "software_version": "0.1.0",
        "peer": "vllm 0.32.0",
        "instance": "i",
        "attention_rank": 0,
        "num_attention_ranks": 1,
        "stages": 1,
        "capacity": 256,
        "host": HOST,
        "fingerprint": FINGERPRINT,
    }
    return messages.Attach(**(fields | changes)).model_dump_json()


def receive(socket, *kinds, timeout=5):
    """The next message of one of ``kinds``, skipping progress."""
    while True:
        message = json.loads(socket.recv(timeout=timeout))
        if message["type"] in kinds:
            return message
        assert message["type"] == "progress", message


@pytest.fixture
def service():
    running = Service()
    yield running
    running.server.shutdown()
