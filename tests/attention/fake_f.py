"""An F rank's attach socket played by a script, for the tests of the Attention side."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

from websockets.exceptions import ConnectionClosed
from websockets.sync.server import ServerConnection, serve

from ffn_faas.protocol.messages import (
    AnyMessage,
    Attach,
    Attached,
    Fingerprint,
    Granted,
    HostIdentity,
    Layers,
    LayersAccepted,
    Message,
    Progress,
    Windows,
    WindowsMapped,
    parse,
)

FINGERPRINT = Fingerprint(
    architecture="Qwen3MoeForCausalLM",
    hidden_size=8,
    intermediate_size=4,
    num_experts=4,
    top_k=2,
    dtype="bfloat16",
    activation="silu",
    quantization="none",
    num_moe_layers=2,
    checkpoint="dummy",
)
ATTACH = Attach(
    protocol_version=1,
    software_version="0.1.0",
    peer="vllm 0.32.0",
    instance="tests",
    attention_rank=0,
    num_attention_ranks=1,
    stages=1,
    capacity=16,
    host=HostIdentity(boot_id="b", network_namespace="n"),
    fingerprint=FINGERPRINT,
)


class Peer:
    """One accepted connection, as the script sees it. ``received`` holds every message so far."""

    def __init__(self, socket: ServerConnection) -> None:
        self.socket = socket
        self.received: list[AnyMessage] = []

    def say(self, *messages: Message) -> None:
        for message in messages:
            self.socket.send(message.model_dump_json())

    def hear(self) -> AnyMessage:
        message = parse(self.socket.recv(timeout=10))
        self.received.append(message)
        return message

    def listen_to_the_end(self) -> None:
        try:
            while True:
                self.hear()
        except ConnectionClosed:
            return

    def die(self) -> None:
        """What a killed process does: the kernel closes the connection without a goodbye."""
        self.socket.socket.shutdown(2)


Script = Callable[[Peer], None]


@contextmanager
def fake_f(*scripts: Script, ports: list[int] | None = None) -> Iterator[list[str]]:
    """Serve one fake F rank per script; yields their addresses, filled in before any script runs."""
    addresses: list[str] = []
    with ExitStack() as stack:
        for number, script in enumerate(scripts):

            def handler(socket: ServerConnection, script: Script = script) -> None:
                try:
                    script(Peer(socket))
                except ConnectionClosed:
                    return

            server = stack.enter_context(serve(handler, "127.0.0.1", ports[number] if ports else 0))
            stack.callback(server.shutdown)
            addresses.append(f"127.0.0.1:{server.socket.getsockname()[1]}")
            threading.Thread(target=server.serve_forever, daemon=True).start()
        yield addresses


def granted(addresses: list[str], rank: int = 0, capacity: int = 16) -> Granted:
    return Granted(
        session="s",
        ffn_rank=rank,
        num_ffn_ranks=len(addresses),
        addresses=addresses,
        expert_counts=[4] if len(addresses) == 1 else [2] * len(addresses),
        capacity=capacity,
        epoch=5 + rank,
        software_version="0.1.0",
    )


def serving(addresses: list[str], rank: int, then: Script = Peer.listen_to_the_end) -> Script:
    """An F rank that does everything right, then what ``then`` says."""

    def script(peer: Peer) -> None:
        assert isinstance(peer.hear(), Attach)
        peer.say(granted(addresses, rank), Progress(phase="LOADING", progress=0.5))
        layers = peer.hear()
        assert isinstance(layers, Layers)
        peer.say(LayersAccepted(indices=[4, 7][: len(layers.names)]))
        peer.say(Windows(broker="b", ticket=f"ticket {rank}", nbytes=64))
        assert isinstance(peer.hear(), WindowsMapped)
        peer.say(Attached())
        then(peer)

    return script
