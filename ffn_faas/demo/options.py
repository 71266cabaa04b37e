"""What a demo is asked to do."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class DemoOptions:
    """``timeout_s`` bounds each start and each completion; ``work_dir`` holds checkpoint, logs and vLLM's cache."""

    work_dir: Path
    arch: str = "qwen3_moe"
    size_bytes: int | None = None
    ffn_ranks: int = 1
    moe_kernel: str = "vllm"
    compiled: bool = False
    prompts: int = 6
    max_tokens: int = 48
    skip_stock: bool = False
    stock_answers: Path | None = None
    timeout_s: float = 300.0

    @property
    def is_control(self) -> bool:
        """True when F returns zeros on purpose."""
        return self.moe_kernel == "zero"

    @property
    def must_equal_stock(self) -> bool:
        """Only one rank with vLLM's own kernel promises stock's bits: partial sums of several ranks round elsewhere."""
        return self.moe_kernel == "vllm" and self.ffn_ranks == 1
