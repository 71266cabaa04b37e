"""``bench --backend cpu``: flags to Options, the run, its table."""

from __future__ import annotations

import argparse
from typing import Any

from ffn_faas.errors import UsageError


def measure(options: argparse.Namespace) -> tuple[dict[str, Any], str]:
    """(everything measured, the table)."""
    from ffn_faas.bench import cpu_shm
    from ffn_faas.bench.cpu_layer import LayerShape
    from ffn_faas.bench.cpu_rivals import NAMES
    from ffn_faas.cli.bench import numbers
    from ffn_faas.connectors.shm import SPIN_US
    from ffn_faas.experts.kernels import KERNEL_NAMES

    for flag in ("inter", "experts", "top_k", "layers", "rounds", "stages"):
        if getattr(options, flag) < 1:
            raise UsageError(f"--{flag.replace('_', '-')} is {getattr(options, flag)}, at least 1 is needed")
    if options.top_k > options.experts:
        raise UsageError(f"--top-k {options.top_k} is more than --experts {options.experts}")
    if options.moe_kernel not in KERNEL_NAMES:
        raise UsageError(f"--moe-kernel {options.moe_kernel} is not known", remedy="one of " + ", ".join(KERNEL_NAMES))
    rivals = tuple(name for name in options.vs.split(",") if name)
    for name in rivals:
        if name not in NAMES:
            raise UsageError(f"--vs {name} is not known on this backend", remedy="one of " + ", ".join(NAMES))
    hidden = numbers("--hidden", options.hidden) or (2048,)
    if len(hidden) > 1:
        raise UsageError("--hidden takes one size on this backend", remedy="run once for each")
    shape = LayerShape(hidden[0], options.inter, options.experts, options.top_k, options.layers, options.dtype)
    result = cpu_shm.run(
        cpu_shm.Options(
            shape=shape,
            tokens=numbers("--tokens", options.tokens) or cpu_shm.TOKENS,
            sessions=numbers("--sessions", options.sessions) or (1,),
            stages=options.stages,
            routing=options.routing,
            kernel=options.moe_kernel,
            rivals=rivals,
            rounds=options.rounds,
            spin_us=SPIN_US if options.spin_us is None else max(0, options.spin_us),
        )
    )
    return result, cpu_shm.print_table(result)
