"""``serve``: command line and environment to one checked ServeConfig, then the service."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from typing import Any

from ffn_faas import config, env
from ffn_faas.afd_block import CAM_OPS, AfdBlock
from ffn_faas.ascend.settings import BACKEND as CAM
from ffn_faas.ascend.settings import SHUTDOWN_BUDGETS_S, CamSettings
from ffn_faas.cli import vllm_flags
from ffn_faas.config import ServeConfig, World
from ffn_faas.credentials import checked_token, read_token
from ffn_faas.errors import LaunchDisagreement, UsageError
from ffn_faas.telemetry.spans import MOST
from ffn_faas.units import parse_size

EPILOG = """\
examples:
  python -m ffn_faas serve Qwen/Qwen3-30B-A3B
  torchrun --nproc-per-node 4 -m ffn_faas serve /models/Qwen3-30B-A3B --port 8100

then, for Attention, stock vLLM with this package installed beside it:
  vllm serve MODEL --load-format ffn_faas \\
    --additional-config '{"afd": {"role": "attention", "host": "127.0.0.1", "port": 8100}}'

Flags are spelled as in `vllm serve` (underscores and dotted JSON too); vllm flags that mean nothing to F are
accepted and named in one log line. Each flag F knows can also be given as FFN_FAAS_<FLAG>.

exit codes: 0 stopped as asked, 2 usage, 3 launch disagreement or refused model, 4 a rank of the world was lost,
5 forced or stuck, 6 resources (memory, disk, port, device)."""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m ffn_faas serve",
        description="Run one F rank: load its share of the routed experts, be /ready, serve Attention until /stop.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("model", nargs="?", metavar="MODEL", help="Hugging Face directory, or a hub id in the local cache")
    add("--model", dest="model_flag", help=argparse.SUPPRESS)
    add("--revision", help="revision of a hub id (default: what the cache calls main)")
    add("--host", default="127.0.0.1", help="management address to bind (default: %(default)s)")
    add("--port", type=int, default=config.DEFAULT_PORT, help="base port; local rank r has port + r (%(default)s)")
    add("--advertise-address", metavar="HOST", help="under which other hosts reach this rank (the bound address)")
    add("--connector", choices=config.CONNECTORS, help="shm, tcp, or auto: shm on one host, tcp between hosts (auto)")
    add("--data-port", type=int, default=0, help="tcp: base port of connections for rows, + local rank (any free one)")
    add("--dtype", default="auto", choices=config.DTYPES, help="weights and wire type; auto: as the checkpoint says")
    add(
        "--max-num-batched-tokens",
        type=int,
        default=config.DEFAULT_CAPACITY,
        help="most rows a window may hold (its capacity); larger batches come in chunks (%(default)s)",
    )
    add("--item-limit", type=int, default=4096, help="most rows of one step; longer posts are split (%(default)s)")
    add("--max-sessions", type=int, default=16, help="most Attention instances attached at once (%(default)s)")
    add("--window-memory", metavar="SIZE", help="most memory for windows over all sessions, such as 4GiB")
    add("--load-format", default="auto", choices=config.LOAD_FORMATS, help="dummy: random experts, only config.json")
    add("--seed", type=int, default=0, help="of dummy weights (%(default)s)")
    add("--data-parallel-size", "-dp", type=int, help="number of F ranks, if given; must agree with the launcher")
    add("--tensor-parallel-size", "-tp", type=int, default=1, help="only 1: F splits by experts")
    add("--pipeline-parallel-size", "-pp", type=int, default=1, help="only 1")
    add("--enable-expert-parallel", "-ep", action="store_true", help="always on")
    add("--enable-eplb", action="store_true", help=argparse.SUPPRESS)
    add("--enable-elastic-ep", action="store_true", help=argparse.SUPPRESS)
    add("--eplb-config", default="{}", help=argparse.SUPPRESS)
    add("--additional-config", default="{}", metavar="JSON", help='the "afd" block, role "ffn"; also dotted')
    add("--backend", default="cpu", help="cpu (default), gpu-deepep-m2n, npu-async-cam, or a package's own")
    add("--device-ids", metavar="LIST", help="GPU of each local rank, such as 0,1, among those that are visible")
    add("--share-device", action="store_true", help="allow two F ranks, or A and F, on one GPU (functional tests only)")
    add("--enforce-eager", action="store_true", help="gpu, npu: the same kernels without a graph, the same bits")
    add(
        "--compilation-config", default="{}", metavar="JSON", help='gpu, npu: cudagraph_mode "FULL" (default) or "NONE"'
    )
    add("--cam-ops", choices=CAM_OPS, help="npu: operators of the device, or their twin on CPUs for tests (afd_ascend)")
    add("--cam-twin-directory", metavar="DIR", help="npu: where processes of the twin share memory; only with cpu-twin")
    add(
        "--moe-kernel",
        default="auto",
        choices=config.MOE_KERNELS,
        help="auto = native (compiled; torch without it); vllm: vLLM's own CPU kernel, the same bits as local experts; "
        "zero: returns zeros (control)",
    )
    add(
        "--drain-timeout",
        "--receiver-shutdown-timeout",
        type=float,
        metavar="S",
        help="seconds to finish posts at stop (15; npu-async-cam 60)",
    )
    add("--world-timeout", type=float, default=300.0, metavar="S", help="seconds for F ranks to join (%(default)s)")
    add(
        "--stall-timeout",
        type=float,
        default=60.0,
        metavar="S",
        help="a step that takes longer is stuck: /live turns 503 (%(default)s)",
    )
    add("--exit-record", metavar="DIR", help="leave DIR/ffn-rank-R.json that says how this rank ended, also by a crash")
    add("--profile", metavar="DIR", help="write the times of the first steps to DIR/ffn-rank-R.trace.json (Perfetto)")
    add("--profile-steps", type=int, default=256, metavar="N", help="so many steps (%(default)s)")
    add("--token-file", metavar="FILE", help="token for attach and POST; also FFN_FAAS_TOKEN; needed beyond loopback")
    add("--ssl-certfile", metavar="FILE", help="serve TLS with this certificate (PEM)")
    add("--ssl-keyfile", metavar="FILE", help="its key, if that is in a file of its own")
    add("--ssl-ca-certs", metavar="FILE", help="what F ranks check each other's certificate against (the system's)")
    add("--log-json", action="store_true", help="one JSON object per log line")
    return parser


def parse(argv: Sequence[str]) -> tuple[ServeConfig, list[str]]:
    """Command line to (config, vLLM flags without effect). Raises UsageError or LaunchDisagreement."""
    normalized = vllm_flags.normalize(argv)
    vllm_flags.refuse_retired(normalized)
    known, ignored = vllm_flags.take_harmless(normalized)
    parser = _parser()
    args = parser.parse_args([*_from_environment(parser), *known])
    if args.model and args.model_flag and args.model != args.model_flag:
        raise UsageError(f"two models: {args.model!r} and --model {args.model_flag!r}", remedy="name one")
    model = args.model or args.model_flag
    if not model:
        raise UsageError("no MODEL", remedy="python -m ffn_faas serve --help shows examples")
    block = AfdBlock.from_additional_config(_json(args.additional_config), role="ffn")
    if args.drain_timeout is None:
        args.drain_timeout = SHUTDOWN_BUDGETS_S["worker"] if args.backend == CAM else 15.0
    vllm_flags.refuse_contradictory(
        tensor_parallel=args.tensor_parallel_size,
        pipeline_parallel=args.pipeline_parallel_size,
        eplb=args.enable_eplb,
        elastic_ep=args.enable_elastic_ep,
        eplb_config=_json(args.eplb_config),
    )
    world = _agreed_world(args.data_parallel_size, block.num_ffn_ranks if block else None)
    if not 1 <= args.port <= 65535 - world.local_rank:
        raise UsageError(f"--port {args.port} leaves no port for local rank {world.local_rank}")
    if args.data_port and not 1 <= args.data_port <= 65535 - world.local_rank:
        raise UsageError(f"--data-port {args.data_port} leaves no port for local rank {world.local_rank}")
    for flag, seconds in {"--drain-timeout": args.drain_timeout, "--stall-timeout": args.stall_timeout}.items():
        if not 0 <= seconds < float("inf"):
            raise UsageError(f"{flag} is {seconds}, a number of seconds is needed")
    for flag in ("max_sessions", "max_num_batched_tokens", "item_limit"):
        if getattr(args, flag) < 1:
            raise UsageError(f"--{flag.replace('_', '-')} is {getattr(args, flag)}, at least 1 is needed")
    if not 1 <= args.profile_steps <= MOST:
        raise UsageError(f"--profile-steps is {args.profile_steps}, 1 to {MOST} can be kept")
    if args.ssl_certfile is None and (args.ssl_keyfile or args.ssl_ca_certs):
        raise UsageError("--ssl-keyfile and --ssl-ca-certs mean nothing without --ssl-certfile")
    checked = (
        ServeConfig(
            model=model,
            revision=args.revision,
            world=world,
            host=args.host,
            port=args.port,
            dtype=args.dtype,
            max_num_batched_tokens=args.max_num_batched_tokens,
            item_limit=args.item_limit,
            max_sessions=args.max_sessions,
            window_memory=parse_size(args.window_memory) if args.window_memory else None,
            load_format=args.load_format,
            seed=args.seed,
            device_ids=_device_ids(args.device_ids),
            share_device=args.share_device,
            enforce_eager=args.enforce_eager or _graphs_off(_json(args.compilation_config)),
            backend=args.backend,
            moe_kernel=args.moe_kernel,
            log_json=args.log_json,
            drain_timeout_s=args.drain_timeout,
            world_timeout_s=args.world_timeout,
            stall_timeout_s=args.stall_timeout,
            exit_record=args.exit_record,
            profile_dir=args.profile,
            profile_steps=args.profile_steps,
            launched=env.world_size() is not None,
            cam=_cam(args, block),
            connector=_connector(args.connector, block, args.backend),
            advertise_address=args.advertise_address,
            data_port=args.data_port,
            token=_token(args.token_file),
            ssl_certfile=args.ssl_certfile,
            ssl_keyfile=args.ssl_keyfile,
            ssl_ca_certs=args.ssl_ca_certs,
        ),
        ignored,
    )
    if checked[0].token is None and not checked[0].binds_loopback:
        raise UsageError(
            f"--host {args.host} can be reached from other hosts, so a token is needed",
            remedy="set FFN_FAAS_TOKEN (openssl rand -hex 32) on both sides, or --token-file; or bind 127.0.0.1",
        )
    return checked


def run(argv: Sequence[str]) -> int:
    """Serve until stopped; returns the exit code."""
    serve_config, ignored = parse(argv)
    env.calm_openmp()  # before anything loads torch
    from ffn_faas.service.host import serve

    return serve(serve_config, ignored_flags=ignored)


def _agreed_world(data_parallel_size: int | None, num_ffn_ranks: int | None) -> World:
    given = {
        "WORLD_SIZE": env.world_size(),
        "--data-parallel-size": data_parallel_size,
        "afd.num_ffn_ranks": num_ffn_ranks,
    }
    launched = env.world_size() or 1
    stated = {name: value for name, value in given.items() if value is not None}
    if any(value != launched for value in stated.values()):
        values = ", ".join(f"{name}={value}" for name, value in ({"WORLD_SIZE": launched} | stated).items())
        raise LaunchDisagreement(
            f"the number of F ranks is stated differently: {values}",
            remedy="start as many ranks as stated: torchrun --nproc-per-node M -m ffn_faas serve ...",
        )
    rank = env.rank()
    if not 0 <= rank < launched:
        raise LaunchDisagreement(f"RANK={rank} is not in a world of WORLD_SIZE={launched}")
    return World(rank, launched, env.local_rank(), env.local_world_size(), env.master_addr())


def _from_environment(parser: argparse.ArgumentParser) -> list[str]:
    """FFN_FAAS_<FLAG> settings as arguments, to stand before those of the command line, which then win."""
    arguments: list[str] = []
    for name, default in vars(parser.parse_args([])).items():
        value = env.setting(name)
        if value is None or name in ("model", "model_flag"):
            continue
        option = f"--{name.replace('_', '-')}"
        if not isinstance(default, bool):
            arguments.append(f"{option}={value}")
        elif value.lower() in ("1", "true", "yes"):
            arguments.append(option)
    return arguments


def _device_ids(text: str | None) -> tuple[int, ...]:
    try:
        ids = tuple(int(part) for part in (text or "").split(",") if part.strip())
    except ValueError:
        ids = (-1,)
    if min(ids, default=0) < 0:
        raise UsageError(f"--device-ids is {text!r}, indices of GPUs such as 0,1 are needed")
    return ids


def _connector(flag: str | None, block: AfdBlock | None, backend: str) -> str:
    stated = {flag, block.transport if block else None} - {None, "auto"}
    if len(stated) > 1:
        raise LaunchDisagreement(f"--connector is {flag}, afd.connector is {block.connector if block else None}")
    connector = str(stated.pop()) if stated else "auto"
    if connector == "cam" and backend != CAM:
        raise UsageError(f"connector cam needs --backend {CAM}, --backend is {backend}")
    if backend == CAM and connector not in ("auto", "cam"):
        raise UsageError(f"--backend {CAM} has no connector {connector}", remedy="leave the connector out")
    return connector


def _cam(args: argparse.Namespace, block: AfdBlock | None) -> CamSettings | None:
    if args.backend == CAM:
        return CamSettings.of_block(block, ops=args.cam_ops, twin_directory=args.cam_twin_directory)
    given = block.cam_keys() if block else []
    given += [flag for flag in ("--cam-ops", "--cam-twin-directory") if getattr(args, flag[2:].replace("-", "_"))]
    if given:
        raise UsageError(f"{given[0]} means nothing to --backend {args.backend}", remedy=f"use --backend {CAM}")
    return None


def _token(path: str | None) -> str | None:
    """A file wins over FFN_FAAS_TOKEN."""
    if path is not None:
        return read_token(path)
    token = env.token()
    return checked_token(token, "FFN_FAAS_TOKEN") if token is not None else None


def _graphs_off(compilation: dict[str, Any]) -> bool:
    """Of --compilation-config only ``cudagraph_mode`` means something to F: one full graph, or none."""
    mode = str(compilation.get("cudagraph_mode", "FULL")).upper()
    if mode not in ("FULL", "FULL_DECODE_ONLY", "NONE"):
        raise UsageError(f"cudagraph_mode {mode} is not known to F", remedy="FULL or NONE")
    return mode == "NONE"


def _json(text: str) -> dict[str, Any]:
    content = json.loads(text)
    if not isinstance(content, dict):
        raise UsageError(f"a JSON object is needed, got {text!r}")
    return content
