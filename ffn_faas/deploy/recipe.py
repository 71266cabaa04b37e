"""A recipe: a few ``KEY=VALUE`` lines that say what one deployment is. Pure but for reading the file."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from ffn_faas.deploy import layout
from ffn_faas.deploy.layout import Node
from ffn_faas.errors import UsageError

DEFAULTS = {
    "MODEL": "",
    "BACKEND": "cpu",
    "LAYOUT": "1A1F",
    "NODES": "127.0.0.1",
    "TENSOR_PARALLEL_SIZE": "1",
    "MODE": "graph",
    "MAX_MODEL_LEN": "8192",
    "MAX_NUM_BATCHED_TOKENS": "4096",
    "REATTACH_TIMEOUT_S": "240",
    "STARTUP_S": "1800",
    "KV_CACHE_GIB": "8",
    "FFN_PORT": "8100",
    "ATTENTION_PORT": "8000",
    "TORCHRUN_PORT": "29400",
    "DATA_PORT": "8200",
    "FFN_THREADS": "",
}
MODES = ("graph", "eager")
ONE_HOST = {"gpu-deepep-m2n": "CUDA IPC"}
"""Backends whose windows do not leave a host."""


@dataclass(frozen=True)
class Recipe:
    """One deployment. ``nodes`` and ``addresses`` are in the same order."""

    model: str
    backend: str
    nodes: tuple[Node, ...]
    addresses: tuple[str, ...]
    tensor_parallel: int
    eager: bool
    max_model_len: int
    max_num_batched_tokens: int
    reattach_timeout_s: int
    startup_s: int
    kv_cache_gib: int
    ffn_port: int
    attention_port: int
    torchrun_port: int
    data_port: int | None
    """cpu, more than one node: base port of the connections that carry rows."""
    ffn_threads: int | None
    """cpu: threads of each F rank; None: as serve finds them."""

    @property
    def ffn_nodes(self) -> tuple[int, ...]:
        """Indices of the nodes with F ranks, in rank order."""
        return tuple(index for index, node in enumerate(self.nodes) if node.ffn)

    @property
    def num_ffn_ranks(self) -> int:
        return sum(node.ffn for node in self.nodes)


def read(path: Path, override: Callable[[str], str | None] = lambda _: None) -> Recipe:
    """The recipe in ``path``; ``override`` (such as the environment) wins. Raises UsageError naming the line or key."""
    values = dict(DEFAULTS)
    try:
        lines = path.read_text().splitlines()
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}") from None
    for number, line in enumerate(lines, start=1):
        if not line.strip() or line.startswith("#"):
            continue
        key, equals, value = (part.strip() for part in line.partition("="))
        if not equals or key not in DEFAULTS:
            raise UsageError(f"{path}:{number}: {line!r} is not understood", remedy=f"keys: {', '.join(DEFAULTS)}")
        values[key] = value
    return build({key: override(key) or value for key, value in values.items()})


def build(values: Mapping[str, str]) -> Recipe:
    """A checked recipe. Raises UsageError."""
    nodes = layout.parse(values["LAYOUT"])
    addresses = tuple(part.strip() for part in values["NODES"].split(",") if part.strip())
    numbers = {key: _positive(key, values[key]) for key, default in DEFAULTS.items() if default.isdigit()}
    tensor_parallel = numbers["TENSOR_PARALLEL_SIZE"]
    if not values["MODEL"]:
        raise UsageError("MODEL is not given")
    if values["MODE"] not in MODES:
        raise UsageError(f"MODE={values['MODE']} is not known", remedy=f"one of {', '.join(MODES)}")
    if len(nodes) > 1 and values["BACKEND"] in ONE_HOST:
        raise UsageError(
            f"LAYOUT={values['LAYOUT']} has {len(nodes)} nodes, but windows of backend {values['BACKEND']} are "
            f"{ONE_HOST[values['BACKEND']]}, which does not leave a host"
        )
    if len(addresses) != len(nodes):
        raise UsageError(f"LAYOUT has {len(nodes)} node(s), NODES lists {len(addresses)}: {values['NODES']}")
    for node in nodes:
        if node.attention % tensor_parallel:
            raise UsageError(
                f"{node.attention} A ranks of a node are no multiple of TENSOR_PARALLEL_SIZE={tensor_parallel}"
            )
    return Recipe(
        model=values["MODEL"],
        backend=values["BACKEND"],
        nodes=nodes,
        addresses=addresses,
        tensor_parallel=tensor_parallel,
        eager=values["MODE"] == "eager",
        max_model_len=numbers["MAX_MODEL_LEN"],
        max_num_batched_tokens=numbers["MAX_NUM_BATCHED_TOKENS"],
        reattach_timeout_s=numbers["REATTACH_TIMEOUT_S"],
        startup_s=numbers["STARTUP_S"],
        kv_cache_gib=numbers["KV_CACHE_GIB"],
        ffn_port=numbers["FFN_PORT"],
        attention_port=numbers["ATTENTION_PORT"],
        torchrun_port=numbers["TORCHRUN_PORT"],
        data_port=numbers["DATA_PORT"] if values["BACKEND"] == "cpu" and len(nodes) > 1 else None,
        ffn_threads=_positive("FFN_THREADS", values["FFN_THREADS"]) if values["FFN_THREADS"] else None,
    )


def _positive(key: str, text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise UsageError(f"{key}={text} is not a positive number")
    return int(text)
