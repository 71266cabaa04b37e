"""What was said about backend npu-async-cam: by the ``afd`` block, by flags, and by the operators' own variables."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from ffn_faas import env
from ffn_faas.ascend.shape import DEFAULT_HCCL_BUFFER_MIB, DEFAULT_KERNEL_WINDOW_MIB, CamShape, receive_rows
from ffn_faas.errors import LaunchDisagreement, UsageError

if TYPE_CHECKING:
    from ffn_faas.afd_block import AfdBlock
    from ffn_faas.experts.spec import MoESpec
    from ffn_faas.protocol.messages import CamTerms

T = TypeVar("T")
BACKEND = "npu-async-cam"
REAL, TWIN = "afd_ascend", "cpu-twin"
SHUTDOWN_BUDGETS_S = {"worker": 60.0, "service": 90.0, "runner": 120.0}
"""Most seconds of an end: of the thread that receives, of the process, and of whoever waits for the process."""


@dataclass(frozen=True)
class CamSettings:
    """One side's settings, before the model is known. All but ``hccl_buffer_mib`` must be equal on both sides."""

    attention_ranks: int
    tensor_parallel: int = 1
    dynamic_quant: bool = True
    mega: bool = False
    hccl_buffer_mib: int | None = None
    ops: str = REAL
    twin_directory: str | None = None

    @classmethod
    def of_block(
        cls,
        block: AfdBlock | None,
        *,
        attention_ranks: int | None = None,
        tensor_parallel: int | None = None,
        ops: str | None = None,
        twin_directory: str | None = None,
    ) -> CamSettings:
        """The arguments say what flags, or Attention itself, said. Raises LaunchDisagreement and UsageError."""
        extra = block.connector_extra_config if block else None
        ranks = _one("num_attention_ranks", attention_ranks, block.num_attention_ranks if block else None)
        if ranks is None:
            raise UsageError(
                f"{BACKEND} needs the number of A ranks before it starts",
                remedy="give --additional-config.afd.num_attention_ranks A",
            )
        parts = _one("attn_ranks_per_dp", tensor_parallel, extra.attn_ranks_per_dp if extra else None)
        chosen = _one("cam_ops", ops, extra.cam_ops if extra else None) or REAL
        directory = _one("cam_twin_directory", twin_directory, extra.cam_twin_directory if extra else None)
        if (chosen == TWIN) != (directory is not None):
            raise UsageError(
                f"cam_ops is {chosen}, cam_twin_directory is {directory}: the twin, and only it, needs one",
                remedy="--cam-ops cpu-twin --cam-twin-directory DIR on F, the keys of the same names on Attention",
            )
        return cls(
            attention_ranks=ranks,
            tensor_parallel=parts or 1,
            dynamic_quant=extra is None or extra.dynamic_quant is not False,
            mega=bool(extra and extra.ffn_mega_moe),
            hccl_buffer_mib=extra.hccl_buffer_size if extra else None,
            ops=chosen,
            twin_directory=directory,
        )

    def terms(self, max_num_batched_tokens: int) -> CamTerms:
        """What the handshake compares."""
        from ffn_faas.protocol.messages import CamTerms

        return CamTerms(
            num_attention_ranks=self.attention_ranks,
            attn_ranks_per_dp=self.tensor_parallel,
            max_num_batched_tokens=max_num_batched_tokens,
            dynamic_quant=self.dynamic_quant,
            ffn_mega_moe=self.mega,
            cam_ops=self.ops,
            cam_twin_directory=self.twin_directory or "",
        )

    def shape(self, spec: MoESpec, ffn_ranks: int, max_num_batched_tokens: int) -> CamShape:
        """With the model. Not yet checked."""
        return CamShape(
            attention_ranks=self.attention_ranks,
            ffn_ranks=ffn_ranks,
            num_experts=spec.num_experts,
            top_k=spec.top_k,
            hidden_size=spec.hidden_size,
            max_num_batched_tokens=max_num_batched_tokens,
            tensor_parallel=self.tensor_parallel,
            dynamic_quant=self.dynamic_quant,
            mega=self.mega,
        )

    def checked_shape(self, spec: MoESpec, ffn_ranks: int, max_num_batched_tokens: int, side: str) -> CamShape:
        """``shape``, and everything that would fail later: topology, capacity, windows of ``side``. UsageError."""
        shape = self.shape(spec, ffn_ranks, max_num_batched_tokens)
        shape.check()
        shape.check_capacity(receive_rows(env.batch_size_factor()))
        kernel_window = env.kernel_window_mib() or DEFAULT_KERNEL_WINDOW_MIB
        shape.check_windows(side, kernel_window, self.hccl_buffer_mib or DEFAULT_HCCL_BUFFER_MIB[side])
        return shape


def _one(name: str, said: T | None, in_block: T | None) -> T | None:
    if said is not None and in_block is not None and said != in_block:
        raise LaunchDisagreement(f"{name} is {said}, the afd block says {in_block}", remedy="say it once")
    return said if said is not None else in_block
