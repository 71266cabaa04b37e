"""Ports, paths, probes and times of the manifests, held against the program's own settings: neither may drift."""

from __future__ import annotations

import argparse
import json
import re
from typing import Any

import pytest

from ffn_faas.afd_block import AfdBlock
from ffn_faas.cli import COMMANDS, serve
from ffn_faas.config import ServeConfig
from ffn_faas.http.app import create_app
from ffn_faas.service.last_words import TEARDOWN_S

from .rendered import OVERLAYS, Overlay, all_containers

TORCHRUN_KILLS_AFTER_S = 30.0
APART = ("cpu-apart",)
"""Overlays whose windows leave the host."""


@pytest.fixture(params=OVERLAYS)
def overlay(request: pytest.FixtureRequest) -> Overlay:
    return Overlay(request.param)


def _serve_config(overlay: Overlay, monkeypatch: pytest.MonkeyPatch) -> ServeConfig:
    """What ``serve`` makes of the F pod's environment and command line."""
    pod = overlay.side("ffn")[0]
    words, variables = overlay.started(pod, overlay.container("ffn"))
    for name, value in variables.items():
        if name.startswith("FFN_FAAS_"):
            monkeypatch.setenv(name, value)
    config, ignored = serve.parse(words[words.index("serve") + 1 :])
    assert ignored == []
    return config


def _seconds(probe: dict[str, Any]) -> float:
    return float(probe.get("initialDelaySeconds", 0) + probe["periodSeconds"] * probe["failureThreshold"])


def _pre_stop_s(container: dict[str, Any]) -> float:
    hook = container["lifecycle"]["preStop"]
    if "sleep" in hook:
        return float(hook["sleep"]["seconds"])
    words = hook["exec"]["command"]
    assert words[:3] == ["python", "-m", "ffn_faas"]
    assert words[3] in COMMANDS
    return float(words[words.index("--timeout") + 1])


def _routes() -> set[str]:
    return {route.path for route in create_app(argparse.Namespace(config=argparse.Namespace(token=None))).routes}  # type: ignore[arg-type]


def test_f_listens_on_its_pods_address_and_the_port_that_everything_names(
    overlay: Overlay, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = _serve_config(overlay, monkeypatch)
    assert config.host == "10.1.2.3"
    container = overlay.container("ffn")
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert ports["management"] == config.port
    for service in (m for m in overlay.manifests if m["kind"] == "Service" and m["metadata"]["name"] != "attention"):
        assert [port["port"] for port in service["spec"]["ports"]] == [config.port]
        assert service["spec"]["clusterIP"] == "None"
        assert service["spec"]["publishNotReadyAddresses"] is True
    _, variables = overlay.started(overlay.side("attention")[0], overlay.container("attention"))
    assert variables["FFN_PORT"] == str(config.port)
    assert variables["FFN_HOST"] == overlay.kind("Service", "ffn-leader")["metadata"]["name"]


def test_the_network_policy_opens_the_ports_of_all_local_ranks_and_no_more_doors(
    overlay: Overlay, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = _serve_config(overlay, monkeypatch)
    management, torchrun, *data = overlay.kind("NetworkPolicy", "ffn")["spec"]["ingress"]
    _, variables = overlay.started(overlay.side("ffn")[0], overlay.container("ffn"))
    (ports,) = management["ports"]
    assert ports["port"] == config.port
    assert ports["endPort"] >= config.port + int(variables["RANKS_PER_POD"]) - 1
    assert {peer["podSelector"]["matchLabels"].get("app") for peer in management["from"]} == {"ffn", "attention", None}
    assert [port["port"] for port in torchrun["ports"]] == [int(variables["TORCHRUN_PORT"])]
    assert torchrun["from"] == [{"podSelector": {"matchLabels": {"app": "ffn"}}}]
    assert bool(data) == (overlay.name in APART)


@pytest.mark.parametrize("name", APART)
def test_where_no_namespace_is_shared_rows_go_to_a_fixed_port_that_attention_may_reach(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    overlay = Overlay(name)
    config = _serve_config(overlay, monkeypatch)
    assert config.connector == "tcp"
    assert config.advertise_address is None, "Attention is told the address that F binds, which is the pod's"
    assert not config.binds_all_addresses
    _, variables = overlay.started(overlay.side("ffn")[0], overlay.container("ffn"))
    *_, data = overlay.kind("NetworkPolicy", "ffn")["spec"]["ingress"]
    (ports,) = data["ports"]
    assert ports["protocol"] == "TCP"
    assert ports["port"] == config.data_port > 0
    assert ports["endPort"] >= config.data_port + int(variables["RANKS_PER_POD"]) - 1
    assert config.data_port > config.port + 15, "ranges of the two ports are apart"
    (peer,) = data["from"]
    assert peer["podSelector"]["matchLabels"].items() <= overlay.side("attention")[0].labels.items()
    named = {port["name"]: port["containerPort"] for port in overlay.container("ffn")["ports"]}
    assert named["data"] == config.data_port


def test_probes_ask_paths_and_ports_that_exist(overlay: Overlay) -> None:
    f = overlay.container("ffn")
    assert {kind: f[kind]["httpGet"]["path"] for kind in ("startupProbe", "livenessProbe", "readinessProbe")} == {
        "startupProbe": "/ready",
        "livenessProbe": "/live",
        "readinessProbe": "/ready",
    }
    assert {"/ready", "/live", "/stop"} <= _routes()
    for _, container in all_containers(overlay):
        names = {port["name"] for port in container.get("ports", [])}
        for kind in ("startupProbe", "livenessProbe", "readinessProbe"):
            if kind in container:
                assert container[kind]["httpGet"]["port"] in names


def test_attention_binds_the_port_that_is_probed_and_served(overlay: Overlay) -> None:
    words, _ = overlay.started(overlay.side("attention")[0], overlay.container("attention"))
    port = overlay.container("attention")["ports"][0]["containerPort"]
    assert f"--port={port}" in words
    assert "--host=10.1.2.3" in words
    assert overlay.kind("NetworkPolicy", "attention")["spec"]["ingress"][0]["ports"][0]["port"] == port


def test_attention_gets_a_valid_afd_block_and_our_loader(overlay: Overlay) -> None:
    words, variables = overlay.started(overlay.side("attention")[0], overlay.container("attention"))
    assert "--load-format=ffn_faas" in words
    assert variables["VLLM_PLUGINS"] == "ffn_faas"
    (text,) = [word.partition("=")[2] for word in words if word.startswith("--additional-config=")]
    block = AfdBlock.from_additional_config(json.loads(text), role="attention")
    assert block is not None
    assert (block.host, block.port) == ("ffn-leader", 8100)


def test_one_startup_budget_holds_for_f_the_gate_the_attach_and_attention(
    overlay: Overlay, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = _serve_config(overlay, monkeypatch)
    words, _ = overlay.started(overlay.side("attention")[0], overlay.container("attention"))
    (text,) = [word.partition("=")[2] for word in words if word.startswith("--additional-config=")]
    block = AfdBlock.from_additional_config(json.loads(text), role="attention")
    gate, _ = overlay.started(overlay.side("attention")[0], overlay.container("attention", "wait-for-ffn"))
    (waits,) = [float(word.partition("=")[2]) for word in gate if word.startswith("--timeout=")]
    attention = _seconds(overlay.container("attention")["startupProbe"])
    assert block is not None
    assert waits == block.attach_timeout_s == attention == config.world_timeout_s == 1800
    f = _seconds(overlay.container("ffn")["startupProbe"])
    assert f == (waits + attention if overlay.name == "ascend" else waits), "paired backends wait for Attention as well"


def test_f_is_given_time_for_pre_stop_drain_and_teardown(overlay: Overlay, monkeypatch: pytest.MonkeyPatch) -> None:
    config = _serve_config(overlay, monkeypatch)
    pre_stop = _pre_stop_s(overlay.container("ffn"))
    grace = overlay.side("ffn")[0].spec["terminationGracePeriodSeconds"]
    assert grace > pre_stop + config.drain_timeout_s + TEARDOWN_S
    assert pre_stop >= config.drain_timeout_s + TEARDOWN_S, "POST /stop is waited for, SIGTERM comes after it"


def test_attention_is_given_more_time_than_its_pre_stop(overlay: Overlay) -> None:
    grace = overlay.side("attention")[0].spec["terminationGracePeriodSeconds"]
    assert grace >= _pre_stop_s(overlay.container("attention")) + 60


def test_a_stuck_step_is_seen_before_f_is_restarted_for_it(overlay: Overlay, monkeypatch: pytest.MonkeyPatch) -> None:
    config = _serve_config(overlay, monkeypatch)
    liveness = overlay.container("ffn")["livenessProbe"]
    assert liveness["timeoutSeconds"] < liveness["periodSeconds"] < config.stall_timeout_s


def test_attention_is_gated_on_f(overlay: Overlay) -> None:
    words, variables = overlay.started(overlay.side("attention")[0], overlay.container("attention", "wait-for-ffn"))
    assert words[:4] == ["python", "-m", "ffn_faas", "wait"]
    assert words[3] in COMMANDS
    phase = "pairing" if overlay.name == "ascend" else "ready"
    assert words[4:7] == [f"--host={variables['FFN_HOST']}", f"--port={variables['FFN_PORT']}", f"--phase={phase}"]


def test_every_reference_of_a_command_line_has_a_value(overlay: Overlay) -> None:
    for pod, container in all_containers(overlay):
        words, _ = overlay.started(pod, container)
        assert not [word for word in words if re.search(r"\$\(", word)]


def test_images_keep_their_entrypoint(overlay: Overlay) -> None:
    for _, container in all_containers(overlay):
        assert "command" not in container, "it would replace the init process of the image"


def test_torchrun_meets_statically_and_restarts_nothing(overlay: Overlay) -> None:
    pods = overlay.side("ffn")
    container = overlay.container("ffn")
    ranks = set()
    for pod in pods:
        words, variables = overlay.started(pod, container)
        assert words[:3] == ["python", "-m", "torch.distributed.run"]
        flags = dict(word.lstrip("-").split("=", 1) for word in words if word.startswith("--"))
        assert flags["rdzv-backend"] == "static"
        assert flags["max-restarts"] == "0"
        assert flags["nnodes"] == str(len(pods))
        assert flags["nproc-per-node"] == variables["RANKS_PER_POD"]
        assert flags["master-addr"] == pods[0].address_name
        ranks.add(int(flags["node-rank"]))
    assert ranks == set(range(len(pods)))


def test_a_lost_pod_recreates_its_group(overlay: Overlay) -> None:
    if overlay.name == "cpu-statefulset":
        assert overlay.kind("StatefulSet")["spec"]["podManagementPolicy"] == "Parallel"
        assert int(overlay.kind("ConfigMap", "ffn-world")["data"]["F_PODS"]) == len(overlay.side("ffn"))
    else:
        template = overlay.kind("LeaderWorkerSet")["spec"]["leaderWorkerTemplate"]
        assert template["restartPolicy"] == "RecreateGroupOnPodRestart"
        assert template["size"] == len(overlay.side("ffn"))


def test_both_sides_get_the_token(overlay: Overlay) -> None:
    token = overlay.kind("Secret", "ffn-token")["stringData"]["token"]
    for app in ("ffn", "attention"):
        _, variables = overlay.started(overlay.side(app)[0], overlay.container(app))
        assert variables["FFN_FAAS_TOKEN"] == token


def test_nothing_runs_as_root_or_gains_rights(overlay: Overlay) -> None:
    users = set()
    for pod, container in all_containers(overlay):
        assert pod.spec["securityContext"]["runAsNonRoot"] is True
        users.add(pod.spec["securityContext"]["runAsUser"])
        assert container["securityContext"]["allowPrivilegeEscalation"] is False
        assert container["securityContext"]["readOnlyRootFilesystem"] is True
        assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
        assert container["resources"]["requests"]
    assert len(users) == 1, "windows are handed only to processes of the same user"


NAMESPACES = {
    "cpu": {"hostNetwork"},
    "cpu-apart": set(),
    "cpu-statefulset": {"hostNetwork"},
    "local": {"hostNetwork"},
    "nvidia": {"hostNetwork", "hostIPC", "hostPID"},
    "ascend": {"hostNetwork"},
}


def test_namespaces_of_the_host_are_shared_only_where_windows_need_them(overlay: Overlay) -> None:
    for pod in overlay.pods:
        assert {key for key in pod.spec if key.startswith("host")} == NAMESPACES[overlay.name]
    labels = overlay.kind("Namespace")["metadata"]["labels"]
    enforced = "privileged" if NAMESPACES[overlay.name] else "restricted"
    assert labels["pod-security.kubernetes.io/enforce"] == enforced
    mounts = [mount["mountPath"] for mount in overlay.container("ffn")["volumeMounts"]]
    assert "/dev/shm" not in mounts, "windows have no name there"


def test_budgets_and_services_select_the_pods_that_exist(overlay: Overlay) -> None:
    for kind in ("PodDisruptionBudget", "NetworkPolicy"):
        for app in ("ffn", "attention"):
            spec = overlay.kind(kind, app)["spec"]
            selector = spec.get("selector", spec.get("podSelector"))["matchLabels"]
            assert selector.items() <= overlay.side(app)[0].labels.items()
    leader = overlay.kind("Service", "ffn-leader")["spec"]["selector"]
    assert [pod.name for pod in overlay.pods if leader.items() <= pod.labels.items()] == [overlay.side("ffn")[0].name]
