"""F's answer to an Attach: granted, or refused with both values and the remedy. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from ffn_faas import __version__
from ffn_faas.protocol import PROTOCOL_VERSION
from ffn_faas.protocol.messages import Attach, CamTerms, Fingerprint, HostIdentity

FINGERPRINT_REMEDY = {
    "dtype": "give both sides the same --dtype",
    "checkpoint": "serve the same revision of the same checkpoint on both sides (dummy weights: on both or on neither)",
}
MODEL_REMEDY = "serve the same model on both sides"


@dataclass(frozen=True)
class Offer:
    """What this F rank can grant."""

    fingerprint: Fingerprint
    host: HostIdentity
    num_ffn_ranks: int
    max_capacity: int
    transport: str = "shm"
    """auto (shm on one host, tcp between hosts), shm, tcp, or what else the backend has."""
    cam: CamTerms | None = None
    """Transport cam."""


def refusal(attach: Attach, offer: Offer) -> str | None:
    """The first thing that does not fit, as the one text that both sides show; None when all fits."""
    if attach.protocol_version != PROTOCOL_VERSION:
        return version_refusal(str(attach.protocol_version))
    for field in Fingerprint.model_fields:
        theirs, ours = getattr(attach.fingerprint, field), getattr(offer.fingerprint, field)
        if theirs != ours:
            remedy = FINGERPRINT_REMEDY.get(field, MODEL_REMEDY)
            return f"{field.replace('_', ' ')}: Attention has {theirs}, F has {ours}; {remedy}"
    if attach.num_ffn_ranks is not None and attach.num_ffn_ranks != offer.num_ffn_ranks:
        return (
            f"number of F ranks: Attention was told {attach.num_ffn_ranks} (afd.num_ffn_ranks), "
            f"F runs {offer.num_ffn_ranks}; make them equal or leave the key out"
        )
    if attach.attention_rank >= attach.num_attention_ranks:
        return f"A rank {attach.attention_rank} is not in an instance of {attach.num_attention_ranks} A ranks"
    if attach.capacity_is_required and attach.capacity > offer.max_capacity:
        return (
            f"capacity: Attention requires windows of {attach.capacity} rows (connector_extra_config.capacity), "
            f"F grants at most {offer.max_capacity} (--max-num-batched-tokens); lower the one or raise the other"
        )
    return _transport_refusal(attach, offer) or _cam_refusal(attach.cam, offer.cam)


def transport(attach: Attach, offer: Offer) -> str | None:
    """What both sides use between them; None when nothing fits both."""
    asked = {attach.transport, offer.transport} - {"auto"}
    if not asked:
        return "shm" if attach.host == offer.host else "tcp"
    if len(asked) > 1 or not (asked <= {"shm", "tcp"} or attach.transport == offer.transport):
        return None
    wanted = asked.pop()
    return wanted if wanted == "tcp" or attach.host == offer.host else None


def _transport_refusal(attach: Attach, offer: Offer) -> str | None:
    if transport(attach, offer) is not None:
        return None
    asked = {attach.transport, offer.transport} - {"auto"}
    if attach.host != offer.host and len(asked) == 1:
        return (
            f"host: Attention runs on {_host(attach.host)}, F on {_host(offer.host)}; transport {asked.pop()} "
            "needs one host and one network namespace (the containers of one pod have that)"
        )
    return (
        f"transport: Attention uses {attach.transport}, F uses {offer.transport}; "
        "F's --backend decides: cpu has shm and tcp (--connector, afd.connector), gpu-deepep-m2n has m2n, "
        "npu-async-cam has cam (afd.connector on Attention)"
    )


def _cam_refusal(theirs: CamTerms | None, ours: CamTerms | None) -> str | None:
    if ours is None:
        return None
    if theirs is None:
        return "transport cam: Attention says nothing of its settings; install matching versions of ffn_faas"
    for field in CamTerms.model_fields:
        there, here = getattr(theirs, field), getattr(ours, field)
        if there != here:
            return f"{field}: Attention has {there}, F has {here}; npu-async-cam needs it equal on both sides"
    return None


def version_refusal(theirs: str) -> str:
    """Two versions of the protocol meet."""
    return (
        f"protocol version: Attention speaks {theirs}, F speaks {PROTOCOL_VERSION} (ffn_faas {__version__}); "
        "install matching versions of ffn_faas on both sides"
    )


def granted_capacity(attach: Attach, offer: Offer) -> int:
    """Rows a window of this session holds."""
    return min(attach.capacity, offer.max_capacity)


def _host(host: HostIdentity) -> str:
    return f"boot {host.boot_id[:8]}, network namespace {host.network_namespace}"
