"""The ``afd`` block of ``--additional-config``, the same on A and F: ten known keys, all else is refused by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ffn_faas.errors import LaunchDisagreement, UsageError

RETIRED_KEYS = {
    "afd_role": "role",
    "afd_connector": "connector",
    "afd_host": "host",
    "afd_port": "port",
    "afd_extra_config": "connector_extra_config",
    "num_attention_servers": "num_attention_ranks",
    "num_ffn_servers": "num_ffn_ranks",
    "num_afd_stages": "nothing: stages follow vLLM's own --enable-dbo",
    "afd_size": "num_attention_ranks and num_ffn_ranks",
    "async": "async_dp",
    "quant_mode": "nothing: the checkpoint says how its experts are quantized",
}
RETIRED_EXTRA_KEYS = {
    "ffn_two_stream": "nothing: every step runs in one stream",
    "ffn_compute_aic_num": "nothing: the operators share the cores out",
    "ffn_compute_aiv_num": "nothing: the operators share the cores out",
    "ffn_combine_aiv_num": "nothing: the operators share the cores out",
    "core_num": "nothing: the operators share the cores out",
    "shared_ffn_pool": "nothing: F is a pool of its own",
}
VLLM_EXECUTE_TIMEOUT_S = 300.0
CONNECTORS = ("auto", "shm", "tcp", "cam")
ALIASES = {"CAMAsyncAFDConnector": "cam"}
"""Names of other systems for what is served here."""
OTHER_CONNECTORS = {
    "DeepEPM2NAFDConnector": "needs backend gpu-deepep-m2n, which this version does not have",
}
CAM_OPS = ("afd_ascend", "cpu-twin")


class ConnectorExtraConfig(BaseModel):
    """Keys of our own."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    attach_timeout_s: float | None = Field(None, gt=0)
    """How long Attention waits for F to answer and to become READY; default 600."""
    reattach_timeout_s: float = Field(0.0, ge=0)
    """How long requests wait for F to come back after it was lost; 0: they fail at once."""
    answer_timeout_s: float = Field(60.0, gt=0)
    """A post that F has not answered for so long means that F is lost."""
    capacity: int | None = Field(None, ge=1, le=1 << 20)
    """Rows a window must hold; without it min(max_num_batched_tokens, 4096, F's limit)."""
    token_file: str | None = None
    """File with F's token; without it FFN_FAAS_TOKEN."""
    tls: bool = False
    """F serves its management port over TLS."""
    tls_ca_file: str | None = None
    """Certificates that F's is checked against, and with them TLS; without it those of the system."""
    allow_untried_vllm: bool = False
    """Run in a vLLM version that was never tried."""
    dynamic_quant: bool | None = Field(None, alias="dynamicQuant")
    """cam: Attention quantizes rows to 8 bits before they travel; None: yes."""
    attn_ranks_per_dp: int | None = Field(None, ge=1)
    """cam: A ranks that hold the parts of one batch, Attention's tensor parallel size; None: that, or on F 1."""
    hccl_buffer_size: int | None = Field(None, ge=1, le=1 << 20)
    """cam: MiB of this side's communication buffer; both sides may differ."""
    ffn_mega_moe: bool | None = None
    """cam: fused Pull transactions instead of Push."""
    cam_ops: Literal["afd_ascend", "cpu-twin"] | None = None
    """cam: which operators; the twin stands in for them on CPUs, in tests. None: afd_ascend."""
    cam_twin_directory: str | None = None
    """cam: directory in which the twin's processes share memory."""


class AfdBlock(BaseModel):
    """Validated ``afd`` block. ``host`` and ``port`` are F rank 0's management address."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    role: Literal["attention", "ffn"]
    connector: str = "auto"
    host: str = "127.0.0.1"
    port: int = Field(8100, ge=1, le=65535)
    num_attention_ranks: int | None = Field(None, ge=1)
    num_ffn_ranks: int | None = Field(None, ge=1)
    compute_gate_on_attention: bool = True
    async_dp: bool = True
    """Read and kept for other systems' files: no step here ever waits across DP ranks."""
    afd_process_group_timeout_s: float | None = Field(None, gt=0)
    """Default of connector_extra_config.attach_timeout_s."""
    connector_extra_config: ConnectorExtraConfig = ConnectorExtraConfig()

    @property
    def transport(self) -> str:
        """``connector`` without the names of other systems."""
        return ALIASES.get(self.connector, self.connector)

    def cam_keys(self) -> list[str]:
        """Keys of connector_extra_config that were given and mean something to connector cam only."""
        extra = self.connector_extra_config
        return [name for key, name in CAM_KEYS.items() if getattr(extra, key) is not None]

    @property
    def attach_timeout_s(self) -> float:
        return self.connector_extra_config.attach_timeout_s or self.afd_process_group_timeout_s or 600.0

    @classmethod
    def from_additional_config(cls, additional_config: Mapping[str, Any] | None, role: str) -> AfdBlock | None:
        """The block of ``additional_config``, None when there is none.

        Raises LaunchDisagreement when the role is another than ``role`` and UsageError for everything else that is
        wrong with it, naming the key and what replaces it.
        """
        if not isinstance(additional_config, Mapping) or "afd" not in additional_config:
            return None
        raw = additional_config["afd"]
        if not isinstance(raw, Mapping):
            raise UsageError(f'additional-config: "afd" must be an object, got {raw!r}')
        for key, replacement in RETIRED_KEYS.items():
            if key in raw:
                raise UsageError(f"afd.{key} is a retired key", remedy=f"use instead: {replacement}")
        extra = raw.get("connector_extra_config")
        for key, replacement in RETIRED_EXTRA_KEYS.items():
            if isinstance(extra, Mapping) and key in extra:
                raise UsageError(
                    f"afd.connector_extra_config.{key} is a retired key", remedy=f"use instead: {replacement}"
                )
        if "role" in raw and raw["role"] != role:
            raise LaunchDisagreement(
                f"afd.role is {raw['role']!r} where {role!r} is needed",
                remedy='"attention" belongs to vLLM, "ffn" to ffn_faas serve',
            )
        try:
            block = cls.model_validate({"role": role, **raw})
        except ValidationError as error:
            raise UsageError(_explain(error), remedy=f"known keys: {', '.join(cls.model_fields)}") from None
        block.check_values()
        return block

    def check_values(self) -> None:
        """Raise UsageError for values that validate but cannot be served."""
        if self.connector in OTHER_CONNECTORS:
            raise UsageError(f"afd.connector {self.connector!r} {OTHER_CONNECTORS[self.connector]}")
        if self.transport not in CONNECTORS:
            raise UsageError(f"afd.connector {self.connector!r} is not known", remedy=f"one of {', '.join(CONNECTORS)}")
        if self.role == "attention" and self.transport != "cam" and self.cam_keys():
            raise UsageError(
                f"afd.connector_extra_config.{self.cam_keys()[0]} means nothing to connector {self.connector}",
                remedy="remove it, or use connector cam",
            )
        for key in ("reattach_timeout_s", "answer_timeout_s"):
            value = getattr(self.connector_extra_config, key)
            if value >= VLLM_EXECUTE_TIMEOUT_S:
                raise UsageError(
                    f"afd.connector_extra_config.{key} is {value:g}, but vLLM itself gives a step up after "
                    f"{VLLM_EXECUTE_TIMEOUT_S:g} s (VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS)",
                    remedy=f"less than {VLLM_EXECUTE_TIMEOUT_S:g}",
                )
        if not self.compute_gate_on_attention:
            raise UsageError(
                "afd.compute_gate_on_attention is false, but the gate always runs on Attention here",
                remedy="remove the key or set it to true",
            )


CAM_KEYS = {
    "dynamic_quant": "dynamicQuant",
    "attn_ranks_per_dp": "attn_ranks_per_dp",
    "hccl_buffer_size": "hccl_buffer_size",
    "ffn_mega_moe": "ffn_mega_moe",
    "cam_ops": "cam_ops",
    "cam_twin_directory": "cam_twin_directory",
}
"""By attribute, as a user spells them."""


def _explain(error: ValidationError) -> str:
    first = error.errors()[0]
    where = ".".join(["afd", *map(str, first["loc"])])
    if first["type"] == "extra_forbidden":
        return f"{where} is not a known key"
    return f"{where}: {first['msg']}, got {first['input']!r}"
