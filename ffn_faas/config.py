"""Settings of one F rank, complete and checked before anything starts. Immutable."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass, field

from ffn_faas.ascend.settings import CamSettings
from ffn_faas.credentials import Credentials

DEFAULT_PORT = 8100
DEFAULT_CAPACITY = 4096
DTYPES = ("auto", "bfloat16", "float16", "float32")
LOAD_FORMATS = ("auto", "dummy")
CONNECTORS = ("auto", "shm", "tcp")
MOE_KERNELS = ("auto", "native", "torch", "vllm", "zero")


def is_loopback(host: str) -> bool:
    """Whether an address, or the one name that is known for it, is reached from its own host only."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


@dataclass(frozen=True)
class World:
    """Where this process stands in the F world."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    master_addr: str = "127.0.0.1"

    @property
    def local_ranks(self) -> range:
        """Ranks on this node; the first of them answers probes for all."""
        first = self.rank - self.local_rank
        return range(first, min(first + self.local_size, self.size))


@dataclass(frozen=True)
class ServeConfig:
    """One F rank's settings. ``port`` is the base port; this rank listens on ``listen_port``."""

    model: str
    world: World
    revision: str | None = None
    host: str = "127.0.0.1"
    port: int = DEFAULT_PORT
    dtype: str = "auto"
    max_num_batched_tokens: int = DEFAULT_CAPACITY
    load_format: str = "auto"
    backend: str = "cpu"
    moe_kernel: str = "auto"
    log_json: bool = False
    drain_timeout_s: float = 15.0
    world_timeout_s: float = 300.0
    stall_timeout_s: float = 60.0
    item_limit: int = 4096
    """Most rows of one step: ready posts of a layer are merged up to it, a longer post is split."""
    max_sessions: int = 16
    window_memory: int | None = None
    """Most bytes of windows over all sessions; None: what the host has."""
    exit_record: str | None = None
    profile_dir: str | None = None
    """Where the times of the first ``profile_steps`` steps are written; None: nowhere."""
    profile_steps: int = 256
    launched: bool = False
    """Whether a launcher (torchrun) started this process."""
    seed: int = 0
    device_ids: tuple[int, ...] = ()
    """GPU of each local rank, as indices into what CUDA_VISIBLE_DEVICES leaves; () = by local rank."""
    share_device: bool = False
    enforce_eager: bool = False
    cam: CamSettings | None = None
    """Of backend npu-async-cam, else None."""
    connector: str = "auto"
    """cpu: auto (shm on one host, tcp between hosts), shm or tcp."""
    advertise_address: str | None = None
    """Host under which others reach this rank; None: the one it binds."""
    data_port: int = 0
    """Base port of connections from other hosts, + local rank; 0: any free one."""
    token: str | None = field(default=None, repr=False)
    """What attaching, joining the world and every POST must show; None only on a loopback address."""
    ssl_certfile: str | None = None
    """With it the management port serves TLS."""
    ssl_keyfile: str | None = None
    ssl_ca_certs: str | None = None
    """What F ranks check each other's certificate against; None: the system's."""

    @property
    def listen_port(self) -> int:
        return self.port + self.world.local_rank

    @property
    def credentials(self) -> Credentials:
        """What this F rank shows to F rank 0, and checks of it."""
        return Credentials(self.token, self.ssl_certfile is not None, self.ssl_ca_certs)

    @property
    def binds_loopback(self) -> bool:
        """Whether only this host can reach the management port."""
        return is_loopback(self.host)

    @property
    def binds_all_addresses(self) -> bool:
        """Whether ``host`` says where to listen but not where to be found."""
        return self.host in ("", "::") or not self.host.strip("0.")

    @property
    def rank_zero_host(self) -> str:
        """Where other F ranks reach F rank 0."""
        if self.world.size == self.world.local_size and not self.binds_all_addresses:
            return self.host
        return self.world.master_addr

    def launch_settings(self) -> dict[str, str]:
        """Flags that must be equal on every F rank, by name."""
        return {
            "model": self.model,
            "--revision": str(self.revision),
            "--dtype": self.dtype,
            "--max-num-batched-tokens": str(self.max_num_batched_tokens),
            "--load-format": self.load_format,
            "--backend": self.backend,
            "--moe-kernel": self.moe_kernel,
            "--connector": self.connector,
            "--max-sessions": str(self.max_sessions),
            "--window-memory": str(self.window_memory),
            "--enforce-eager": str(self.enforce_eager),
            "settings of npu-async-cam": str(self.cam),
            "world size": str(self.world.size),
        }
