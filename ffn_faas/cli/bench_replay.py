"""``bench --replay``: recorded requests against two deployments."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any


def measure(options: argparse.Namespace) -> tuple[dict[str, Any], str]:
    """(everything measured, the table)."""
    from ffn_faas.bench import replay
    from ffn_faas.bench.cpu_machine import machine
    from ffn_faas.cli.bench import numbers

    requests = replay.read_requests(Path(options.replay))
    urls = [url for url in options.deployments.split(",") if url]
    concurrency = numbers("--concurrency", options.concurrency) or (1,)
    result = {"machine": machine(), **replay.run(requests, urls, concurrency, options.brackets)}
    return result, replay.print_table(result)
