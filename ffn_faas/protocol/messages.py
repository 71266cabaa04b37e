"""Handshake messages between an A rank and an F rank, and between F ranks: one JSON object per WebSocket frame.

The order on the attach socket: Attach -> Granted | Refused, then Progress* from F while it loads; Layers ->
LayersAccepted | Refused any time after Granted; once F is READY: Windows -> WindowsMapped -> Attached. After that
the socket is silent but for Profile -> Profiled; its close, or Ended, ends the session. docs/protocol.md tells the same
for another peer.
"""

from __future__ import annotations

import json
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

from ffn_faas.protocol import PROTOCOL_VERSION

MAX_RANKS = 1 << 16
MAX_LAYERS = 1 << 12
MAX_EXPERTS = 1 << 20
MAX_EPOCH = (1 << 24) - 1
MAX_SPANS = 1 << 12
Name = Annotated[str, Field(max_length=512, pattern="^[^\x00-\x1f\x7f]*$")]
"""One line: it stands in logs and in reasons."""
Text = Annotated[str, Field(max_length=1 << 16)]
Rank = Annotated[int, Field(ge=0, lt=MAX_RANKS)]
Ranks = Annotated[int, Field(ge=1, le=MAX_RANKS)]
Transport = Literal["auto", "shm", "tcp", "m2n", "cam"]
Size = Annotated[int, Field(ge=1, le=1 << 40)]
Nanoseconds = Annotated[int, Field(ge=0, le=1 << 62)]


class Message(BaseModel):
    """Frozen; an unknown field is an error, so that a newer peer is noticed instead of half understood."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Fingerprint(Message):
    """What must be equal on both sides. Built by ``experts.fingerprint``."""

    architecture: Name
    hidden_size: Size
    intermediate_size: Size
    num_experts: Size
    top_k: Size
    dtype: Name
    """Wire and weight type: bfloat16, float16 or float32."""
    activation: Name
    quantization: Name
    """"none", or the method's name."""
    num_moe_layers: Annotated[int, Field(ge=0, le=MAX_LAYERS)]
    checkpoint: Name
    """sha256 over the checkpoint's index and expert tensor headers, or "dummy"."""


class HostIdentity(Message):
    """Tells whether two processes can share memory: same kernel, same network namespace."""

    boot_id: Name
    network_namespace: Name


class CamTerms(Message):
    """Transport cam: what Attention and F must have equal, since it lays out the windows that both compute."""

    num_attention_ranks: Ranks
    attn_ranks_per_dp: Ranks
    """A ranks that send the parts of one batch."""
    max_num_batched_tokens: Annotated[int, Field(ge=1, le=1 << 20)]
    dynamic_quant: bool
    ffn_mega_moe: bool
    cam_ops: Name
    """afd_ascend, or cpu-twin."""
    cam_twin_directory: Name = ""


class Attach(Message):
    type: Literal["attach"] = "attach"
    protocol_version: int
    software_version: Name
    peer: Name
    """For logs: the program and its version, for example "vllm 0.32.0"."""
    instance: str = Field(min_length=1, max_length=128, pattern="^[!-~]+$")
    """Names the Attention instance; equal on all its ranks, new at every start."""
    attempt: int = Field(0, ge=0, le=1 << 40)
    """How often this process has attached before: a higher one replaces what is left of a lower one."""
    attention_rank: Rank
    num_attention_ranks: Ranks
    num_ffn_ranks: Ranks | None = None
    """What A was told to expect, None when it was told nothing."""
    stages: int = Field(ge=1, le=8)
    capacity: int = Field(ge=1, le=1 << 20)
    """Rows a window should hold."""
    capacity_is_required: bool = False
    """True when a user asked for exactly this capacity: F then refuses instead of granting less."""
    transport: Transport = "shm"
    """auto: shm if F is on the same host, else tcp."""
    host: HostIdentity
    fingerprint: Fingerprint
    cam: CamTerms | None = None
    """Transport cam."""


class Granted(Message):
    type: Literal["granted"] = "granted"
    session: Name
    ffn_rank: Rank
    num_ffn_ranks: Ranks
    addresses: Annotated[list[Name], Field(max_length=MAX_RANKS)]
    """host:port of every F rank, in rank order."""
    expert_counts: Annotated[list[Annotated[int, Field(ge=0, le=MAX_EXPERTS)]], Field(max_length=MAX_RANKS)]
    """Experts per layer of every F rank; contiguous ranges in rank order (protocol.topology)."""
    capacity: int = Field(ge=1, le=1 << 20)
    epoch: int = Field(ge=1, le=MAX_EPOCH)
    software_version: Name
    rendezvous_port: int = Field(0, ge=0, le=65535)
    """Transport cam: port of the store, on F rank 0's host, over which A and F pair; else 0."""


class Refused(Message):
    type: Literal["refused"] = "refused"
    reason: Text
    """Names both values and the remedy; A raises with this very text."""
    final: bool = True
    """False: trying again may help, F is about to stop."""


class Progress(Message):
    type: Literal["progress"] = "progress"
    phase: Name
    progress: float


class Layers(Message):
    type: Literal["layers"] = "layers"
    names: Annotated[list[Name], Field(max_length=MAX_LAYERS)]
    """Checkpoint prefix of each routed-experts layer A built, for example model.layers.3.mlp.experts."""


class Loaded(Message):
    """Transport cam, once F's phase is pairing: A's model is loaded, this rank pairs as soon as all others do."""

    type: Literal["loaded"] = "loaded"


class LayersAccepted(Message):
    type: Literal["layers_accepted"] = "layers_accepted"
    indices: Annotated[list[Annotated[int, Field(ge=0, lt=MAX_LAYERS)]], Field(max_length=MAX_LAYERS)]
    """F's index of each name; this is the layer number that posts carry."""


class DeviceMemory(Message):
    """Where a peer finds windows in GPU memory (transport m2n; connectors.m2n_window says what lies in them)."""

    handle: str = Field(pattern="^[0-9a-f]{128}$")
    """CUDA IPC handle of the allocation."""
    offset: int = Field(ge=0, le=1 << 50)
    nbytes: int = Field(ge=1, le=1 << 50)
    device: str = Field(pattern="^[0-9a-f]{32}$")
    """UUID of the GPU; indices differ from process to process."""


class Windows(Message):
    """F has made the windows of this (A rank, F rank) pair; A fetches their file descriptor and maps them."""

    type: Literal["windows"] = "windows"
    broker: Name
    """Abstract Unix socket (without the leading NUL) that hands over the descriptors; or ``tcp:PORT``, on F's host."""
    ticket: Name
    """Proves to the broker which windows are meant; used once."""
    nbytes: int = Field(ge=0, le=1 << 50)
    dispatch: DeviceMemory | None = None
    """Transport m2n, which has no broker and no ticket: A's posts go here."""


class WindowsMapped(Message):
    type: Literal["windows_mapped"] = "windows_mapped"
    combine: DeviceMemory | None = None
    """Transport m2n: F's answers go here, in A's memory."""


class Attached(Message):
    type: Literal["attached"] = "attached"


class Detach(Message):
    type: Literal["detach"] = "detach"
    returning: bool = False
    """This A rank will attach again at once: the other ranks of its instance stay attached."""


class Ended(Message):
    type: Literal["ended"] = "ended"
    reason: Text
    final: bool = True
    """False: F goes away, and A may wait for the next one. True: this Attention is at fault, or has lost a rank."""


class Profile(Message):
    """F rank 0 to A, any time after Attached: keep times of the next posts; with 0, send what was kept (Profiled)."""

    type: Literal["profile"] = "profile"
    posts: int = Field(ge=0, le=MAX_SPANS)


Times = tuple[Nanoseconds, Nanoseconds, Nanoseconds, Nanoseconds, Nanoseconds, Rank, Rank, Nanoseconds]
"""The fields of telemetry.spans.PostSpan: five times of CLOCK_MONOTONIC, stage, layer, rows."""


class Profiled(Message):
    """A's only answer to Profile with 0; no spans where A cannot keep any."""

    type: Literal["profiled"] = "profiled"
    clock_offset_ns: int = Field(ge=-(1 << 62), le=1 << 62)
    """CLOCK_REALTIME minus CLOCK_MONOTONIC on A's host."""
    spans: Annotated[list[Times], Field(max_length=MAX_SPANS)]


class WorldJoin(Message):
    """F rank k > 0 to F rank 0, first message on /v1/world."""

    type: Literal["world_join"] = "world_join"
    rank: Rank
    world_size: Ranks
    address: Name
    launch: dict[Name, Text]
    """Settings that must be equal on all F ranks, by flag name."""


class WorldWelcome(Message):
    """F rank 0, once every rank has joined and all launch settings are equal."""

    type: Literal["world_welcome"] = "world_welcome"
    addresses: Annotated[list[Name], Field(max_length=MAX_RANKS)]
    rendezvous_port: int = Field(0, ge=0, le=65535)
    """As in Granted."""


class WorldPhase(Message):
    """F rank k to F rank 0: where it stands."""

    type: Literal["world_phase"] = "world_phase"
    phase: Name
    progress: float
    reason: Text = ""


class WorldPhases(Message):
    """F rank 0 to all: the phase of every rank, in rank order."""

    type: Literal["world_phases"] = "world_phases"
    phases: Annotated[list[Name], Field(max_length=MAX_RANKS)]


class WorldStop(Message):
    """Either way: the whole F world stops. ``lost`` names a failure, so that the others exit non-zero too."""

    type: Literal["world_stop"] = "world_stop"
    reason: Text
    lost: bool = False


class WorldDrained(Message):
    """While the world stops. F rank k to F rank 0: nothing is in flight here; F rank 0 to all: nowhere is anything."""

    type: Literal["world_drained"] = "world_drained"


AnyMessage = Annotated[
    Attach
    | Granted
    | Refused
    | Progress
    | Layers
    | Loaded
    | LayersAccepted
    | Windows
    | WindowsMapped
    | Attached
    | Detach
    | Ended
    | Profile
    | Profiled
    | WorldJoin
    | WorldWelcome
    | WorldPhase
    | WorldPhases
    | WorldStop
    | WorldDrained,
    Field(discriminator="type"),
]

_ADAPTER: TypeAdapter[AnyMessage] = TypeAdapter(AnyMessage)


def parse(text: str | bytes) -> AnyMessage:
    """One frame to its message; raises ``pydantic.ValidationError`` for anything else."""
    return _ADAPTER.validate_json(text)


def foreign_protocol(text: str | bytes) -> str | None:
    """The protocol version of a first message that another version wrote, so that it may not even validate."""
    try:
        content = json.loads(text)
    except ValueError:
        return None
    version = content.get("protocol_version") if isinstance(content, dict) else None
    return None if version in (None, PROTOCOL_VERSION) else str(version)
