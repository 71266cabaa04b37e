"""Which vLLM features cannot work with remote experts, by name and remedy. Pure functions over plain values."""

from __future__ import annotations

from dataclasses import dataclass

from ffn_faas.errors import UsageError

LOAD_FORMAT = "ffn_faas"
TRIED_VLLM: dict[str, tuple[str, ...]] = {"cpu": ("0.32.0",), "cuda": ("0.23.0",), "npu": ()}
"""By vLLM's name of the platform. What runs on the one was not tried on the other; on npu nothing was."""
CARRIED_ACTIVATIONS = ("silu", "swigluoai")
NOT_SERVED_YET = "not served yet by this version of ffn_faas"


@dataclass(frozen=True)
class EngineFacts:
    """What the refusals read from a vLLM configuration; ``attention.compat`` fills it in."""

    vllm_version: str
    allow_untried_vllm: bool = False
    load_format: str = LOAD_FORMAT
    platform: str = "cpu"
    quantization: str | None = None
    prefill_context_parallel_size: int = 1
    enable_eplb: bool = False
    num_redundant_experts: int = 0
    enable_elastic_ep: bool = False
    enable_dbo: bool = False
    ubatch_size: int = 0
    lora: bool = False
    weight_updates: bool = False
    draft: str | None = None
    """Speculative method that brings a model with routed experts of its own."""
    num_attention_ranks: int | None = None
    """What the afd block says, None when it says nothing."""
    world_size: int = 1


@dataclass(frozen=True)
class LayerFacts:
    """What the refusals read from one routed-experts layer."""

    name: str
    activation: str = "silu"
    has_bias: bool = False
    activation_limits: bool = False
    """True when a swiglu alpha or beta is set, or a limit that the model's config.json does not name."""
    apply_router_weight_on_input: bool = False
    skip_final_all_reduce: bool = False
    num_fused_shared_experts: int = 0
    zero_experts: bool = False
    class_name: str = ""
    """Set when the layer is of a class of its own, which the hook does not replace."""


@dataclass(frozen=True)
class Refusal:
    feature: str
    why: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.feature}: {self.why}; {self.remedy}"


def vllm_version_refusal(facts: EngineFacts) -> Refusal | None:
    """A vLLM that was never tried is refused by name."""
    tried = TRIED_VLLM.get(facts.platform)
    if tried is None or facts.vllm_version.split("+")[0] in tried or facts.allow_untried_vllm:
        return None
    return Refusal(
        f"vllm {facts.vllm_version}",
        f"was never tried on {facts.platform} with this version of ffn_faas (tried: {', '.join(tried) or 'none'})",
        'install a tried one, or set "connector_extra_config": {"allow_untried_vllm": true} in the afd block '
        "or FFN_FAAS_ALLOW_UNTRIED_VLLM=1",
    )


def engine_refusals(facts: EngineFacts) -> list[Refusal]:
    """Every reason why a vLLM with these settings cannot be an Attention instance; empty when there is none."""
    version = vllm_version_refusal(facts)
    found = [version] if version else []
    if facts.load_format != LOAD_FORMAT:
        found.append(
            Refusal(
                f"--load-format {facts.load_format}",
                "with an afd block of role attention it would read every expert tensor",
                f"add --load-format {LOAD_FORMAT}",
            )
        )
    checks: list[tuple[bool, str, str, str]] = [
        *_not_served_yet(facts),
        (facts.lora, "--enable-lora", "adapters on experts cannot reach F", "remove it"),
        (facts.enable_eplb, "--enable-eplb", "F places the experts, not vLLM", "remove it"),
        (
            facts.num_redundant_experts > 0,
            f"eplb_config.num_redundant_experts={facts.num_redundant_experts}",
            "F places the experts, not vLLM",
            "remove it",
        ),
        (facts.enable_elastic_ep, "--enable-elastic-ep", "F places the experts, not vLLM", "remove it"),
        (
            facts.prefill_context_parallel_size > 1,
            f"--prefill-context-parallel-size {facts.prefill_context_parallel_size}",
            "its gather runs between the router and the experts",
            "set it to 1",
        ),
        (facts.weight_updates, "--weight-transfer-config", "F would keep the old experts", "remove it"),
        (
            facts.ubatch_size > 0 and not facts.enable_dbo,
            f"--ubatch-size {facts.ubatch_size}",
            "it has no meaning without --enable-dbo",
            "remove it",
        ),
        (
            facts.num_attention_ranks not in (None, facts.world_size),
            f"afd.num_attention_ranks={facts.num_attention_ranks}",
            f"this vLLM has {facts.world_size} ranks",
            f"set it to {facts.world_size} or leave it out",
        ),
    ]
    found += [Refusal(feature, why, remedy) for bad, feature, why, remedy in checks if bad]
    return found


def _not_served_yet(facts: EngineFacts) -> list[tuple[bool, str, str, str]]:
    """What a later version lifts, in one place."""
    return [
        (
            facts.quantization is not None,
            f"quantization {facts.quantization}",
            NOT_SERVED_YET,
            "use a checkpoint with bfloat16, float16 or float32 experts",
        ),
        (facts.enable_dbo, "--enable-dbo", NOT_SERVED_YET, "remove it"),
        (facts.draft is not None, f"speculative method {facts.draft} with experts", NOT_SERVED_YET, "remove it"),
        (
            facts.platform not in TRIED_VLLM,
            f"vLLM on {facts.platform}",
            NOT_SERVED_YET,
            f"use vLLM on {' or '.join(TRIED_VLLM)}",
        ),
    ]


def layer_refusals(facts: LayerFacts) -> list[Refusal]:
    """Every reason why one routed-experts layer cannot be served by F."""
    checks: list[tuple[bool, str, str]] = [
        (bool(facts.class_name), f"routed-experts class {facts.class_name}", "is not replaced by the plugin"),
        (facts.activation not in CARRIED_ACTIVATIONS, f"activation {facts.activation}", "F does not carry it"),
        (facts.has_bias, "expert biases", "F does not carry them"),
        (facts.activation_limits, "swiglu limit, alpha or beta", "F does not carry them"),
        (
            facts.apply_router_weight_on_input,
            "apply_router_weight_on_input with several experts per token",
            "F gets one row for all of them",
        ),
        (facts.skip_final_all_reduce, "a deferred final all-reduce", "F returns whole sums"),
        (facts.num_fused_shared_experts > 0, "fused shared experts", "shared experts must stay on Attention"),
        (facts.zero_experts, "zero experts", "their router hands F ids that no expert has"),
    ]
    return [
        Refusal(f"{facts.name}: {feature}", why, "this model cannot be served") for bad, feature, why in checks if bad
    ]


def require_none(refusals: list[Refusal]) -> None:
    """Raise UsageError naming every refusal."""
    if refusals:
        raise UsageError("ffn_faas cannot run in this vLLM: " + " | ".join(map(str, refusals)))
