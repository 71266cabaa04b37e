"""What the ``ffn_faas`` load format does around vLLM's own weight loading. No vLLM imports; compat calls it."""

from __future__ import annotations

import atexit
import logging
import re
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from multiprocessing.util import Finalize
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from ffn_faas import __version__
from ffn_faas.afd_block import AfdBlock
from ffn_faas.attention.data_plane import shared_memory
from ffn_faas.attention.session import AttentionSession, LossPolicy
from ffn_faas.config import DEFAULT_CAPACITY
from ffn_faas.credentials import Credentials, checked_token, read_token
from ffn_faas.errors import HandshakeRefused, UsageError
from ffn_faas.protocol import PROTOCOL_VERSION
from ffn_faas.protocol.messages import Attach, Fingerprint, Transport

if TYPE_CHECKING:
    import torch

    from ffn_faas.attention.attempt import DataPlane
    from ffn_faas.connectors.cam_client import CamClient
    from ffn_faas.connectors.m2n_client import M2nClient
    from ffn_faas.experts.spec import MoESpec

NOT_EXPERTS = ("e_score_correction_bias",)
"""Router tensors that some checkpoints keep under the experts' prefix, and vLLM in the experts' layer."""
NOT_OF_THE_LAYER = ("runner.",)
"""Gate and shared experts, where vLLM hangs them below the routed experts."""
WHOLE_FILE_STRATEGIES = ("eager", "prefetch", "torchao")


@dataclass(frozen=True)
class LoaderOptions:
    """``--model-loader-extra-config`` of the load format."""

    dummy: bool = False
    """Random weights for everything that Attention holds; F then runs with --load-format dummy."""

    @classmethod
    def parse(cls, extra: Mapping[str, Any], strategy: str | None) -> LoaderOptions:
        """Raises UsageError for unknown keys, and for strategies that read whole files, experts included."""
        unknown = sorted(set(extra) - {"dummy"})
        if unknown:
            raise UsageError(
                f"--model-loader-extra-config: {unknown[0]!r} is not known to load format ffn_faas",
                remedy='known: {"dummy": true}',
            )
        if not isinstance(extra.get("dummy", False), bool):
            raise UsageError(f"--model-loader-extra-config: dummy is {extra['dummy']!r}, true or false is needed")
        if strategy in WHOLE_FILE_STRATEGIES:
            raise UsageError(
                f"--safetensors-load-strategy {strategy} reads whole files, experts included", remedy="remove it"
            )
        return cls(dummy=extra.get("dummy", False))


@dataclass(frozen=True)
class Model:
    """What both sides must agree on, as Attention sees it."""

    spec: MoESpec
    fingerprint: Fingerprint

    @classmethod
    def read(cls, model: str, revision: str | None, dtype: str, dummy: bool) -> Model:
        """From config.json and the checkpoint's headers; ``dtype`` is vLLM's resolved one, for example bfloat16."""
        from ffn_faas.experts.checkpoint import Checkpoint
        from ffn_faas.experts.fingerprint import fingerprint
        from ffn_faas.experts.model_path import resolve_model
        from ffn_faas.experts.spec import MoESpec

        directory = resolve_model(model, revision)
        spec = MoESpec.from_model_dir(directory, dtype)
        return cls(spec, fingerprint(spec, None if dummy else Checkpoint.open(directory)))


@dataclass(frozen=True)
class Place:
    """One worker of an Attention instance; alone in one of its own if not told otherwise."""

    instance: str = field(default_factory=lambda: uuid.uuid4().hex)
    """Equal on all ranks of the deployment."""
    rank: int = 0
    size: int = 1
    tensor_parallel: int = 1
    """Ranks that hold the parts of one batch; neighbours."""


def attach_message(
    block: AfdBlock,
    model: Model,
    peer: str,
    max_num_batched_tokens: int,
    place: Place | None = None,
    transport: Transport | None = None,
) -> Attach:
    """This worker's Attach."""
    place = place or Place()
    if "cam" in (block.transport, transport):
        return _cam_attach(block, model, peer, max_num_batched_tokens, place)
    from ffn_faas.connectors.host_identity import host_identity

    required = block.connector_extra_config.capacity
    return Attach(
        protocol_version=PROTOCOL_VERSION,
        software_version=__version__,
        peer=peer,
        instance=place.instance,
        attention_rank=place.rank,
        num_attention_ranks=place.size,
        num_ffn_ranks=block.num_ffn_ranks,
        stages=1,
        capacity=required or min(max_num_batched_tokens, DEFAULT_CAPACITY),
        capacity_is_required=required is not None,
        transport=transport or cast("Transport", block.transport),
        host=host_identity(),
        fingerprint=model.fingerprint,
    )


def _cam_attach(block: AfdBlock, model: Model, peer: str, max_num_batched_tokens: int, place: Place) -> Attach:
    """Windows are not granted but reckoned by both sides: what goes into them must be equal."""
    from ffn_faas.ascend.settings import CamSettings
    from ffn_faas.connectors.host_identity import host_identity

    extra = block.connector_extra_config
    if extra.reattach_timeout_s or extra.capacity:
        key = "reattach_timeout_s" if extra.reattach_timeout_s else "capacity"
        raise UsageError(
            f"afd.connector_extra_config.{key} means nothing to connector cam: A and F start and end together, and "
            "max_num_batched_tokens says what a window holds",
            remedy="leave it out",
        )
    settings = CamSettings.of_block(block, attention_ranks=place.size, tensor_parallel=place.tensor_parallel)
    return Attach(
        protocol_version=PROTOCOL_VERSION,
        software_version=__version__,
        peer=peer,
        instance=place.instance,
        attention_rank=place.rank,
        num_attention_ranks=place.size,
        num_ffn_ranks=block.num_ffn_ranks,
        stages=1,
        capacity=max(1, max_num_batched_tokens // place.tensor_parallel),
        transport="cam",
        host=host_identity(),
        fingerprint=model.fingerprint,
        cam=settings.terms(max_num_batched_tokens),
    )


@dataclass(frozen=True)
class Attached:
    """The session of this worker while its model loads."""

    session: AttentionSession
    model: Model
    patience_s: float
    log: logging.Logger
    transport: str = "shm"

    def finish(self, layers: list[Any], dropped: ExpertFilter) -> None:
        """Report the memory, block until F is READY, join the ops to the session. Detaches when the process ends."""
        from ffn_faas.attention import cam_ops, device_ops, ops

        held = sum(
            tensor.numel() * tensor.element_size()
            for layer in layers
            for name, tensor in layer.named_parameters()
            if not name.endswith(NOT_EXPERTS) and not name.startswith(NOT_OF_THE_LAYER)
        )
        self.log.info(
            "Attention holds %d bytes of routed experts in %d remote layers; %d expert tensors were not read",
            held,
            len(layers),
            dropped.dropped,
        )
        self.session.wait_ready(self.patience_s)
        if self.transport == "m2n":
            device_ops.bind(cast("M2nClient", self.session.client))
        elif self.transport == "cam":
            cam_ops.bind(cast("CamClient", self.session.client))
        else:
            ops.bind(self.session.client)
        atexit.register(self.session.close)
        Finalize(None, self.session.close, exitpriority=100)
        self.log.info("F is READY and attached: %s", ", ".join(map(str, self.session.links)))


def open_session(
    block: AfdBlock,
    model: Model,
    attach: Attach,
    log: logging.Logger,
    make_plane: Callable[[MoESpec], DataPlane] = shared_memory,
) -> Attached:
    """Attach to every F rank; blocks until F answers. The torch ops exist after it.

    From here on this process ends when the vLLM that it belongs to does.
    """
    from ffn_faas.attention import cam_ops, device_ops, ops, orphan

    orphan.end_with_first_process(log)
    plane = make_plane(model.spec)
    if attach.transport == "cam":
        cam_ops.load()
    else:
        (device_ops if attach.transport == "m2n" else ops).load()
    extra = block.connector_extra_config
    policy = LossPolicy(extra.reattach_timeout_s, extra.answer_timeout_s)
    session = AttentionSession(f"{block.host}:{block.port}", attach, plane, log, policy)
    try:
        session.attach(block.attach_timeout_s, _credentials(block))
    except BaseException:
        session.close()
        raise
    return Attached(session, model, block.attach_timeout_s, log, attach.transport)


def _credentials(block: AfdBlock) -> Credentials:
    """A token file wins over FFN_FAAS_TOKEN."""
    from ffn_faas import env

    extra, token = block.connector_extra_config, env.token()
    if extra.token_file is not None:
        token = read_token(extra.token_file)
    elif token is not None:
        token = checked_token(token, "FFN_FAAS_TOKEN")
    return Credentials(token, extra.tls or extra.tls_ca_file is not None, extra.tls_ca_file)


def checkpoint_names(vllm_names: Iterable[str], spec_layers: Iterable[str]) -> list[str]:
    """Checkpoint prefix of each of vLLM's routed-experts layers: the one that has the same layer number.

    What stands around the number differs from model to model (``mlp`` for ``block_sparse_moe``, ``language_model.``
    before it). A layer whose number no prefix has, or another layer took, keeps its own name, which F then refuses.
    """
    free = {_layer_number(prefix): prefix for prefix in spec_layers}
    return [free.pop(_layer_number(name), name) for name in vllm_names]


def _layer_number(name: str) -> int | None:
    number = re.search(r"\blayers\.(\d+)\.", name)
    return int(number[1]) if number else None


def check_shapes(
    spec: MoESpec, name: str, hidden: int, intermediate: int, experts: int, top_k: int, activation: str = "silu"
) -> None:
    """vLLM may have been told (--hf-overrides) to build other layers than the checkpoint's config.json says."""
    pairs: dict[str, tuple[object, object]] = {
        "hidden size": (hidden, spec.hidden_size),
        "intermediate size": (intermediate, spec.intermediate_size),
        "number of experts": (experts, spec.num_experts),
        "top k": (top_k, spec.top_k),
        "activation": (activation, spec.activation),
    }
    for what, (built, stored) in pairs.items():
        if built != stored:
            raise HandshakeRefused(
                f"{name}: {what} is {built} in vLLM and {stored} in config.json", remedy="remove --hf-overrides"
            )


class ExpertFilter:
    """Tells expert tensors by name, before they are read: every tensor under one of ``MoESpec.tensor_prefixes``."""

    def __init__(self, prefixes: Iterable[str]) -> None:
        self._prefixes = tuple(f"{prefix}." for prefix in prefixes)
        self.dropped = 0

    def drops(self, name: str) -> bool:
        if not name.startswith(self._prefixes) or name.endswith(NOT_EXPERTS):
            return False
        self.dropped += 1
        return True

    def read(self, files: Iterable[str | Path]) -> Iterator[tuple[str, torch.Tensor]]:
        """Every other tensor of ``files`` (safetensors), mapped lazily: pages of dropped tensors are never touched."""
        from safetensors import safe_open

        for file in sorted(files, key=str):
            with safe_open(file, framework="pt") as checkpoint:
                for name in checkpoint.keys():  # noqa: SIM118 (no mapping)
                    if not self.drops(name):
                        yield name, checkpoint.get_tensor(name)
