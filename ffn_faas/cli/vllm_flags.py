"""How vLLM spells its command line, and what its flags mean to F: honoured, accepted without effect, or refused."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from ffn_faas.errors import LaunchDisagreement, UsageError

JSON_FLAGS = ("--additional-config", "--compilation-config", "--eplb-config")

RETIRED = {
    "--afd-config": "--additional-config '{\"afd\": {...}}'",
    "--afd-role": "--additional-config.afd.role",
    "--num-redundant-experts": "nothing: redundant experts are not served",
}
"""Flags of older systems, each with its replacement."""

HARMLESS: dict[str, int] = {
    "--trust-remote-code": 0,
    "--disable-log-stats": 0,
    "--disable-log-requests": 0,
    "--no-enable-prefix-caching": 0,
    "--enable-prefix-caching": 0,
    "--enable-chunked-prefill": 0,
    "--no-enable-chunked-prefill": 0,
    "--async-scheduling": 0,
    "--no-async-scheduling": 0,
    "--served-model-name": 1,
    "--max-model-len": 1,
    "--max-num-seqs": 1,
    "--gpu-memory-utilization": 1,
    "--block-size": 1,
    "--kv-cache-dtype": 1,
    "--tokenizer": 1,
    "--tokenizer-mode": 1,
    "--distributed-executor-backend": 1,
    "--api-server-count": 1,
    "--swap-space": 1,
}
"""vLLM flags that mean nothing to F, with the number of values they take; one log line says that they are ignored."""


def normalize(argv: Sequence[str]) -> list[str]:
    """Dashes for underscores in flag names; ``--json-flag.a.b v`` gathered into ``--json-flag '{"a": {"b": v}}'``.

    Later settings win over earlier ones, key by key, as in vLLM.
    """
    plain: list[str] = []
    gathered: dict[str, Any] = {}
    arguments = iter(argv)
    for argument in arguments:
        if not argument.startswith("--"):
            plain.append(argument)
            continue
        name, equals, value = argument.partition("=")
        flag, dot, path = name.partition(".")
        flag = flag.replace("_", "-")
        if flag not in JSON_FLAGS:
            plain.append(flag + dot + path + equals + value)
            continue
        if not equals:
            try:
                value = next(arguments)
            except StopIteration:
                raise UsageError(f"{name} needs a value") from None
        _merge(gathered.setdefault(flag, {}), _parsed(flag, path, value))
    for flag, content in gathered.items():
        plain += [flag, json.dumps(content)]
    return plain


def take_harmless(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split off the flags of HARMLESS; returns (what is left, flags that are ignored)."""
    left: list[str] = []
    ignored: list[str] = []
    values_to_skip = 0
    for argument in argv:
        if values_to_skip:
            values_to_skip -= 1
            continue
        name, equals, _ = argument.partition("=")
        if name in HARMLESS:
            ignored.append(name)
            values_to_skip = 0 if equals else HARMLESS[name]
        else:
            left.append(argument)
    return left, ignored


def refuse_retired(argv: Sequence[str]) -> None:
    """Raise UsageError for the first retired flag."""
    for argument in argv:
        name = argument.partition("=")[0]
        if name in RETIRED:
            raise UsageError(f"{name} is a retired flag", remedy=f"use instead: {RETIRED[name]}")


def refuse_contradictory(
    *, tensor_parallel: int, pipeline_parallel: int, eplb: bool, elastic_ep: bool, eplb_config: dict[str, Any]
) -> None:
    """Raise LaunchDisagreement for parallel forms that F has no use for."""
    if tensor_parallel > 1:
        raise LaunchDisagreement(
            f"--tensor-parallel-size is {tensor_parallel}, on F it can only be 1",
            remedy="F splits by experts: start more ranks with torchrun --nproc-per-node",
        )
    if pipeline_parallel > 1:
        raise LaunchDisagreement(
            f"--pipeline-parallel-size is {pipeline_parallel}, on F it can only be 1",
            remedy="every F rank holds its experts of every layer",
        )
    if eplb:
        raise LaunchDisagreement("--enable-eplb is set, but experts are not rebalanced here", remedy="remove it")
    if elastic_ep:
        raise LaunchDisagreement("--enable-elastic-ep is set, but an F world has a fixed size", remedy="remove it")
    redundant = eplb_config.get("num_redundant_experts", 0)
    if redundant:
        raise LaunchDisagreement(
            f"eplb-config asks for {redundant} redundant experts, but only 0 can be served", remedy="remove it"
        )


def _parsed(flag: str, path: str, value: str) -> dict[str, Any]:
    try:
        content: Any = json.loads(value)
    except json.JSONDecodeError as error:
        if not path:
            raise UsageError(f"{flag} is not valid JSON: {error}", remedy=f"got {value!r}") from None
        content = value
    for key in reversed(path.split(".") if path else []):
        content = {key.replace("-", "_"): content}
    if not isinstance(content, dict):
        raise UsageError(f"{flag} must be a JSON object, got {value!r}")
    return content


def _merge(into: dict[str, Any], new: dict[str, Any]) -> None:
    for key, value in new.items():
        if isinstance(value, dict) and isinstance(into.get(key), dict):
            _merge(into[key], value)
        else:
            into[key] = value
