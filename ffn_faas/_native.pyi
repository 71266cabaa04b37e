"""The data plane in C++. Import it through ``ffn_faas.native.load``. Threads: see each class."""

from collections.abc import Sequence
from typing import final

LAYOUT_VERSION: int
F32: int
F16: int
BF16: int

@final
class Geometry:
    """``connectors.base.WindowGeometry`` for C++. Raises ValueError for what is out of range."""

    def __init__(self, *, stages: int, capacity: int, hidden_size: int, top_k: int, element_size: int) -> None: ...
    def offsets(self) -> dict[str, int]:
        """The C++ layout; equal to ``protocol.window.window_layout``."""

@final
class Arena:
    """The windows of one link. Freed with the last of: this object, its views, the receiver's or client's use of it."""

    @staticmethod
    def create(geometry: Geometry, epoch: int) -> Arena:
        """F: new anonymous shared memory, sealed. Raises OSError, or ValueError for an epoch outside 1 ... 2^24 - 1."""

    @staticmethod
    def map(fd: int, doorbell: int, geometry: Geometry, epoch: int) -> Arena:
        """A: map what F's broker sent. Takes over both descriptors in any case; doorbell -1 = none.

        Raises ValueError naming what is not as agreed: size, seals, geometry or epoch.
        """

    @property
    def fd(self) -> int:
        """The memory's descriptor, -1 once closed."""

    @property
    def nbytes(self) -> int: ...
    @property
    def epoch(self) -> int: ...
    @property
    def failure(self) -> str:
        """Windows of ``connect_windows``: why their connection has ended; empty while it works, and for all others."""

    def close_fd(self) -> None:
        """No further peer will be given this memory; the mapping stays."""

    def view(self) -> memoryview:
        """All bytes, writable: for tests and for looking at a hung peer."""

    def poison(self) -> None:
        """Test hook: NaN into rows, weights, partials; wild ids, layer and count. No post may be outstanding."""

def connect_windows(fd: int, geometry: Geometry, epoch: int) -> Arena:
    """A: windows whose posts and answers travel over the connected socket ``fd``, which is taken over in any case.

    Two threads of the arena carry them; its last user ends the connection. Raises OSError, ValueError.
    """

@final
class ServiceMirror:
    """F: carries posts from a connection into an arena, and its answers back, until ``close`` or the connection ends.

    A peer that breaks the protocol loses its link (``ItemReceiver.take_faults``). Threads of its own, without the GIL.
    """

    def __init__(self, fd: int, arena: Arena, receiver: ItemReceiver, key: int) -> None:
        """Takes the connected socket over; ``receiver`` knows the link already."""

    def close(self) -> None:
        """End the connection and join the threads. Idempotent."""

@final
class Item:
    """``connectors.base.Item``. Views keep the memory alive; their content is valid until ``complete``.

    One part is computed in its windows; several lie side by side in the receiver's workspace.
    """

    @property
    def parts(self) -> list[tuple[int, int, int]]:
        """(link, stage, rows) of each post, or of the part of a post, in the order of their rows."""

    @property
    def layer(self) -> int: ...
    @property
    def rows(self) -> int: ...
    @property
    def hidden(self) -> memoryview:
        """u8 [rows, hidden_size * element_size]."""

    @property
    def expert_ids(self) -> memoryview:
        """i32 [rows, top_k], a private checked copy."""

    @property
    def weights(self) -> memoryview:
        """f32 [rows, top_k], a private copy."""

    @property
    def partial(self) -> memoryview:
        """f32 [rows, hidden_size], to be written."""

    def complete(self) -> None:
        """Hand back merged rows, release the combine flags, wake A. Never blocks. RuntimeError the second time."""

@final
class ZeroKernel:
    """An expert kernel that answers exact zeros."""

    def __init__(self) -> None: ...
    @property
    def address(self) -> int:
        """Of the ``ffn_expert_kernel`` (native/include/ffn_faas/expert_kernel.h); valid as long as this object."""

@final
class ExpertsCpu:
    """Packed experts of all layers and the threads that compute them. Matrices: 0 gate, 1 up [I, H], 2 down [H, I]."""

    def __init__(
        self,
        *,
        layers: int,
        experts: int,
        hidden_size: int,
        intermediate_size: int,
        dtype: int,
        threads: int,
        path: str = "auto",
    ) -> None:
        """Memory is mapped here and taken when packed. MemoryError; ValueError for a path that this CPU lacks."""

    @staticmethod
    def paths(dtype: int) -> list[str]:
        """Instruction sets that this CPU runs and the system allows, best first.

        Of AVX512's two, on Intel's CPUs the f32 one comes first. The first call asks the
        kernel for AMX's tiles, for all threads of the process.
        """

    @staticmethod
    def refused(dtype: int) -> str:
        """A path that the CPU has and the system does not let this process use, and why; empty where none is."""

    @property
    def address(self) -> int:
        """Of the ``ffn_expert_kernel`` (native/include/ffn_faas/expert_kernel.h); valid as long as this object."""

    @property
    def path(self) -> str: ...
    @property
    def threads(self) -> int: ...
    @property
    def nbytes(self) -> int:
        """Of the packed weights, padding included."""

    def pack(self, layer: int, expert: int, matrix: int, source: int) -> None:
        """Take a contiguous matrix at an address. Any thread; releases the GIL. IndexError for no such expert."""

    def unpack(self, layer: int, expert: int, matrix: int, target: int) -> None:
        """The reverse of ``pack``."""

    def compute(self, layer: int, rows: int, top_k: int, hidden: int, ids: int, weights: int, partial: int) -> int:
        """An item by addresses, as ``ffn_item`` has it; ids are trusted. 0, or why not: 1 memory, 2 no such layer.

        One caller at a time. Releases the GIL.
        """

def cpu_peak_flops(*, threads: int, dtype: int, path: str = "auto", rounds: int = 20_000_000) -> float:
    """Multiply-adds in registers by the instruction that ``path`` uses for that dtype, in FLOP/s of all threads."""

def cpu_read_bandwidth(*, threads: int, address: int, nbytes: int) -> float:
    """Bytes per second of reading that memory once, a part by each thread."""

@final
class ItemReceiver:
    """All links of an F rank as one stream of items. One thread receives or steps; the rest is for any thread."""

    def __init__(self, *, spin_us: int = 50, item_limit: int = 4096, merge_wait_us: int = 5) -> None:
        """``item_limit``: most rows of an item, and the rows of the workspace in which posts are merged.

        ``merge_wait_us``: how long an item waits for posts of its layer from links that were active just before and
        stood at the same layer; a 32nd of the last step's time where that is longer, at most 4 ms. 0: never.
        """

    @property
    def doorbell(self) -> int:
        """eventfd that peers write to wake the receiver; owned by this object."""

    def add_link(self, key: int, arena: Arena, expert_counts: Sequence[int]) -> None:
        """From now on posts of this link are received. ValueError when the key is in use."""

    def remove_link(self, key: int) -> None:
        """Idempotent; an item in flight may still be computed and completed, nobody hears of it."""

    def receive(self, timeout_us: int) -> Item | None:
        """The next item: posts take turns by link and stage, and those of one layer are merged.

        None: timeout, signal, cancelled, or a link turned out faulty.

        Spins for ``spin_us``, then sleeps. Releases the GIL.
        """

    def step(self, kernel: int, timeout_us: int) -> bool:
        """``receive``, compute by the kernel at that address, ``complete``, all without the GIL. False = no item.

        RuntimeError when the kernel fails.
        """

    def cancel(self) -> None:
        """The pending or else the next receive returns None at once."""

    def take_faults(self) -> list[tuple[int, str]]:
        """(link, reason) of links closed since the last call because their peer broke the protocol."""

    def counters(self) -> dict[str, int]:
        """steps, posts, splits, rows, last_step_monotonic_ns, taken_at_ns.

        splits: items that were a part of a post, not its last. taken_at_ns is 0 while nothing is computed.
        """

    def posts_per_item(self) -> tuple[list[tuple[int, int]], int]:
        """How many posts, or parts of them, an item held: ((most, items) ..., sum). Counts are not cumulative.

        The last bound, -1, is open.
        """

    def step_times(self) -> dict[str, tuple[list[tuple[int, int]], int]]:
        """Nanoseconds of steps, each as ``posts_per_item``: wait (since the step before), compute, send."""

    def expert_rows(self) -> list[list[int]]:
        """Rows computed by layer and local expert; empty before the first link."""

    def record(self, limit: int) -> None:
        """Keep times of the next ``limit`` items (1 to 4096), and forget those before. ValueError."""

    def recorded(self) -> int:
        """How many are kept so far."""

    def take_spans(self) -> list[tuple[int, int, int, int, int, int, int, int, int]]:
        """Stop keeping, and hand out what was: the fields of ``telemetry.spans.StepSpan``, in order."""

@final
class Call:
    """One batch of one layer by addresses, for tests and peers without torch. The arrays stay the caller's."""

    def __init__(
        self,
        *,
        stage: int,
        handle: int,
        rows: int,
        hidden_size: int,
        top_k: int,
        dtype: int,
        x: int,
        ids: int,
        ids_are_int64: bool,
        weights: int,
    ) -> None: ...

@final
class AttentionClient:
    """A's side: one per Attention worker. Each stage is used by one thread at a time; ``fail`` by any."""

    def __init__(self, geometry: Geometry, expert_counts: Sequence[int], *, spin_us: int = 50) -> None:
        """``expert_counts``: experts per layer of every F rank (contiguous ids in rank order), as granted."""

    def set_layers(self, layers: Sequence[int]) -> None:
        """F's layer number of each handle. RuntimeError while a post is outstanding."""

    def set_link(self, ffn_rank: int, arena: Arena) -> None:
        """Windows from ``connectors.shm_client.fetch_windows``. RuntimeError while a post is outstanding."""

    def dispatch(self, call: Call) -> None:
        """Send the batch, or its first chunk. Never blocks. ValueError before anything was written."""

    def combine(self, call: Call, out: int) -> None:
        """Wait for all F ranks and write ``out`` [rows, hidden_size] in the call's dtype. Releases the GIL.

        RuntimeError with the reason of ``fail``.
        """

    def hold(self) -> None:
        """F is away: calls wait, dispatch writes nothing, until ``resume`` or ``fail``. Any thread; never blocks."""

    def resume(self, arenas: Sequence[Arena], layers: Sequence[int]) -> None:
        """F is back, with new windows by F rank and new epochs; posts without an answer are sent again.

        ValueError for another number of either. Any thread; never blocks.
        """

    def longest_wait(self) -> tuple[float, int]:
        """Seconds that a ``combine`` has been waiting for an answer now, and for which F rank; 0 while held."""

    def fail(self, reason: str) -> None:
        """Pending and later calls raise this reason. The first one stays. Any thread; never blocks."""

    def bind(self) -> int:
        """Address of the function table that the torch ops call; valid as long as this object."""

    def counters(self) -> dict[str, int]:
        """posts, resent (of these, again after F was away), wait_ns, sleeps."""

    def record(self, limit: int) -> None:
        """Keep times of the next ``limit`` posts (1 to 4096), and forget those before. ValueError."""

    def take_spans(self) -> list[tuple[int, int, int, int, int, int, int, int]]:
        """Stop keeping, and hand out what was: the fields of ``telemetry.spans.PostSpan``, in order."""

def arm_watchdog(seconds: float, exit_code: int, message: str, files: Sequence[tuple[str, str]]) -> None:
    """End the process in ``seconds`` unless disarmed, whatever holds the interpreter; ``files``: (path, content)."""

def disarm_watchdog() -> None:
    """The deadline is off."""

def bound_signals(
    from_fd: int, to_fd: int, seconds: float, exit_code: int, message: str, files: Sequence[tuple[str, str]]
) -> None:
    """Pass signal numbers on; the first arms the watchdog. Blocking descriptors, which stay the caller's."""

def record_crashes(record_path: str, record: str) -> None:
    """A fatal signal writes ``record`` (its number in place of "@@") to ``record_path`` first."""
