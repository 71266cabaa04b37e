"""From a recipe to pods: which node runs what, with which devices, ports, ranks, variables and commands. Pure."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from ffn_faas.deploy.kustomize import Manifest
from ffn_faas.deploy.recipe import Recipe

CAM = "npu-async-cam"
DRAIN_S = {CAM: 120}
TEARDOWN_S = 10
SECRET = "ffn-token"  # noqa: S105 - a name
VISIBLE = {CAM: "ASCEND_RT_VISIBLE_DEVICES"}
DP_RPC_PORT = 29500


@dataclass(frozen=True)
class PlannedPod:
    """One side on one node. ``gate`` has to end with 0 before ``command`` starts."""

    name: str
    side: str
    node: int
    address: str
    port: int
    variables: dict[str, str]
    command: list[str]
    gate: list[str]


def plan(recipe: Recipe) -> list[PlannedPod]:
    """All pods of all nodes, F before Attention on each node."""
    pods = []
    for index, node in enumerate(recipe.nodes):
        if node.ffn:
            pods.append(_ffn(recipe, index))
        if node.attention:
            pods.append(_attention(recipe, index))
    return pods


def shell(pods: Iterable[PlannedPod]) -> Iterator[str]:
    """The plan as lines that can be pasted into a shell, pod by pod."""
    for pod in pods:
        yield f"# {pod.name} on node {pod.node} ({pod.address})"
        if pod.gate:
            yield shlex.join(pod.gate) + " &&"
        variables = [f"{name}={shlex.quote(value)}" for name, value in sorted(pod.variables.items())]
        yield " ".join([*variables, shlex.join(pod.command)])


def manifests(recipe: Recipe, pods: Iterable[PlannedPod], token: str | None = None) -> list[Manifest]:
    """What ``deploy.local`` runs for these pods: probes, grace periods and the token's secret as in deploy/base."""
    drain = DRAIN_S.get(recipe.backend, 15)
    reference = {"name": "FFN_FAAS_TOKEN", "valueFrom": {"secretKeyRef": {"name": SECRET, "key": "token"}}}
    shared = [] if token is None else [reference]
    made = [
        _ffn_manifest(recipe, pod, drain, shared) if pod.side == "ffn" else _attention_manifest(recipe, pod, shared)
        for pod in pods
    ]
    if token is not None:
        made.append({"kind": "Secret", "metadata": {"name": SECRET}, "stringData": {"token": token}})
    return made


def _ffn(recipe: Recipe, index: int) -> PlannedPod:
    node, address = recipe.nodes[index], recipe.addresses[index]
    command = ["python", "-m", "torch.distributed.run", f"--nnodes={len(recipe.ffn_nodes)}"]
    command += [f"--node-rank={recipe.ffn_nodes.index(index)}", f"--nproc-per-node={node.ffn}", "--rdzv-backend=static"]
    command += [f"--master-addr={recipe.addresses[recipe.ffn_nodes[0]]}", f"--master-port={recipe.torchrun_port}"]
    command += ["--max-restarts=0", "-m", "ffn_faas", "serve", recipe.model, f"--host={address}"]
    command += [f"--port={recipe.ffn_port}", f"--backend={recipe.backend}"]
    command += [f"--data-parallel-size={recipe.num_ffn_ranks}"]
    command += [f"--max-num-batched-tokens={recipe.max_num_batched_tokens}"]
    command += [f"--drain-timeout={DRAIN_S.get(recipe.backend, 15)}", f"--world-timeout={recipe.startup_s}"]
    if recipe.backend == CAM:
        afd = {"role": "ffn", "num_attention_ranks": sum(other.attention for other in recipe.nodes)}
        command.append(f"--additional-config={json.dumps({'afd': afd})}")
    if recipe.data_port is not None:
        command.append(f"--data-port={recipe.data_port}")
    if recipe.backend.startswith("gpu"):
        command.append(f"--device-ids={_list(node.ffn_devices)}")
    if recipe.eager and recipe.backend != "cpu":
        command.append("--enforce-eager")
    variables = _devices(recipe, index, node.ffn_devices)
    if recipe.ffn_threads is not None:
        variables["FFN_FAAS_NUM_THREADS"] = str(recipe.ffn_threads)
    return PlannedPod(f"ffn-{index}", "ffn", index, address, recipe.ffn_port, variables, command, [])


def _attention(recipe: Recipe, index: int) -> PlannedPod:
    node, address = recipe.nodes[index], recipe.addresses[index]
    leader = recipe.addresses[recipe.ffn_nodes[0]]
    cam = recipe.backend == CAM
    phase = "pairing" if cam else "ready"
    gate = ["python", "-m", "ffn_faas", "wait", f"--host={leader}", f"--port={recipe.ffn_port}", f"--phase={phase}"]
    gate += [f"--timeout={recipe.startup_s}"]
    # One F world pairs with one Attention: the vLLMs of all nodes are its data parallel ranks.
    ranks = sum(other.attention for other in recipe.nodes) if cam else node.attention
    extra = {"attach_timeout_s": recipe.startup_s}
    afd = {
        "role": "attention",
        **({"connector": "cam"} if cam else {}),
        "host": leader,
        "port": recipe.ffn_port,
        "num_attention_ranks": ranks,
        "num_ffn_ranks": recipe.num_ffn_ranks,
        "connector_extra_config": extra if cam else {**extra, "reattach_timeout_s": recipe.reattach_timeout_s},
    }
    command = ["python", "-m", "vllm.entrypoints.openai.api_server", f"--model={recipe.model}", f"--host={address}"]
    command += [f"--port={recipe.attention_port}", f"--max-model-len={recipe.max_model_len}"]
    command += [f"--max-num-batched-tokens={recipe.max_num_batched_tokens}"]
    command += [f"--tensor-parallel-size={recipe.tensor_parallel}"]
    command += [f"--data-parallel-size={ranks // recipe.tensor_parallel}"]
    if ranks > node.attention:
        command += _part_of_one(recipe, index)
    command += ["--load-format=ffn_faas", f"--additional-config={json.dumps({'afd': afd})}"]
    if recipe.eager:
        command.append("--enforce-eager")
    variables = {"VLLM_PLUGINS": "ffn_faas", **_devices(recipe, index, node.attention_devices)}
    if recipe.backend == "cpu":
        variables["VLLM_CPU_KVCACHE_SPACE"] = str(recipe.kv_cache_gib)
    return PlannedPod(
        f"attention-{index}", "attention", index, address, recipe.attention_port, variables, command, gate
    )


def _part_of_one(recipe: Recipe, index: int) -> list[str]:
    """vLLM's flags for this node's share of the data parallel ranks."""
    before = sum(other.attention for other in recipe.nodes[:index]) // recipe.tensor_parallel
    first = next(place for place, node in enumerate(recipe.nodes) if node.attention)
    flags = [f"--data-parallel-size-local={recipe.nodes[index].attention // recipe.tensor_parallel}"]
    flags += [f"--data-parallel-address={recipe.addresses[first]}", f"--data-parallel-rpc-port={DP_RPC_PORT}"]
    return flags if index == first else [*flags, f"--data-parallel-start-rank={before}", "--headless"]


def _devices(recipe: Recipe, index: int, own: range) -> dict[str, str]:
    """GPU windows are opened by CUDA IPC handle: each side has to see the other's GPUs as well as its own."""
    node = recipe.nodes[index]
    if recipe.backend.startswith("gpu"):
        return {"CUDA_VISIBLE_DEVICES": _list(range(node.attention + node.ffn))}
    return {VISIBLE[recipe.backend]: _list(own)} if recipe.backend in VISIBLE else {}


def _list(numbers: Iterable[int]) -> str:
    return ",".join(map(str, numbers))


def _probe(pod: PlannedPod, path: str, period: int, failures: int) -> dict[str, Any]:
    asked = {"host": pod.address, "port": pod.port, "path": path}
    return {"httpGet": asked, "periodSeconds": period, "timeoutSeconds": 5, "failureThreshold": failures}


def _container(pod: PlannedPod, command: list[str], name: str, shared: list[dict[str, Any]]) -> dict[str, Any]:
    # "$" is doubled: kubelet's references are not meant here.
    variables = [{"name": key, "value": value.replace("$", "$$")} for key, value in pod.variables.items()]
    return {"name": name, "args": [word.replace("$", "$$") for word in command], "env": [*variables, *shared]}


def _ffn_manifest(recipe: Recipe, pod: PlannedPod, drain: int, shared: list[dict[str, Any]]) -> Manifest:
    stop_s = drain + TEARDOWN_S
    stop = ["python", "-m", "ffn_faas", "stop", f"--host={pod.address}", f"--port={pod.port}", f"--timeout={stop_s}"]
    container = {
        **_container(pod, pod.command, "ffn", shared),
        "startupProbe": _probe(pod, "/ready", 1, 2 * recipe.startup_s),
        "livenessProbe": _probe(pod, "/live", 10, 3),
        "readinessProbe": _probe(pod, "/ready", 1, 1),
        "lifecycle": {"preStop": {"exec": {"command": stop}}},
    }
    spec = {"terminationGracePeriodSeconds": 2 * stop_s + TEARDOWN_S, "containers": [container]}
    template = {"size": 1, "workerTemplate": {"metadata": {"labels": {"app": "ffn"}}, "spec": spec}}
    return {"kind": "LeaderWorkerSet", "metadata": {"name": "ffn"}, "spec": {"leaderWorkerTemplate": template}}


def _attention_manifest(recipe: Recipe, pod: PlannedPod, shared: list[dict[str, Any]]) -> Manifest:
    container = {
        **_container(pod, pod.command, "attention", shared),
        "startupProbe": _probe(pod, "/health", 1, recipe.startup_s),
        "livenessProbe": _probe(pod, "/health", 10, 6),
        "readinessProbe": _probe(pod, "/health", 1, 3),
    }
    spec = {
        "terminationGracePeriodSeconds": 90,
        "initContainers": [_container(pod, pod.gate, "wait-for-ffn", shared)],
        "containers": [container],
    }
    template = {"metadata": {"labels": {"app": "attention"}}, "spec": spec}
    return {"kind": "Deployment", "metadata": {"name": "attention"}, "spec": {"template": template}}
