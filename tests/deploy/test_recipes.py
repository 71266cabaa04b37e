"""Every recipe's dry run: as written down in dry_runs/, and understood by the programs it starts."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ffn_faas import env
from ffn_faas.afd_block import AfdBlock
from ffn_faas.cli import serve
from ffn_faas.deploy import launch, launch_plan, layout, recipe
from ffn_faas.deploy.environment import Sources, command, environment
from ffn_faas.deploy.pods import pods
from ffn_faas.errors import UsageError
from ffn_faas.service.last_words import TEARDOWN_S

from .rendered import ROOT

RECIPES = sorted(path.stem for path in (ROOT / "recipes").glob("*.env"))
EXPECTED = Path(__file__).parent / "dry_runs"


def path(name: str) -> Path:
    return ROOT / "recipes" / f"{name}.env"


@pytest.fixture(autouse=True)
def no_settings_of_this_shell(monkeypatch: pytest.MonkeyPatch) -> None:
    for key in (*recipe.DEFAULTS, "DRY_RUN", "NODE_RANK"):
        monkeypatch.delenv(key, raising=False)


def test_recipes_and_expected_dry_runs_are_the_same_set() -> None:
    assert sorted(file.stem for file in EXPECTED.iterdir()) == RECIPES


@pytest.mark.parametrize("name", RECIPES)
def test_a_dry_run_prints_exactly_these_commands(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("DRY_RUN", "1")
    assert launch.main([str(path(name))]) == 0
    assert capsys.readouterr().out == (EXPECTED / f"{name}.txt").read_text()


@pytest.mark.parametrize("name", RECIPES)
def test_f_understands_its_commands_on_every_rank(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FFN_FAAS_TOKEN", "as-every-pod-has-it")
    chosen = recipe.read(path(name))
    ranks = []
    for pod in (pod for pod in launch_plan.plan(chosen) if pod.side == "ffn"):
        flags = dict(word.lstrip("-").split("=", 1) for word in pod.command if word.startswith("--") and "=" in word)
        per_node, node = int(flags["nproc-per-node"]), int(flags["node-rank"])
        for local_rank in range(per_node):
            values = {
                "RANK": node * per_node + local_rank, "LOCAL_RANK": local_rank, "LOCAL_WORLD_SIZE": per_node,
                "WORLD_SIZE": per_node * int(flags["nnodes"]), "MASTER_ADDR": flags["master-addr"],
            }  # fmt: skip
            for key, value in values.items():
                monkeypatch.setenv(key, str(value))
            config, ignored = serve.parse(pod.command[pod.command.index("serve") + 1 :])
            assert ignored == []
            assert (config.model, config.backend) == (chosen.model, chosen.backend)
            assert config.port == pod.port
            apart = chosen.backend == "cpu" and len(chosen.nodes) > 1
            assert config.data_port == (int(recipe.DEFAULTS["DATA_PORT"]) if apart else 0)
            ranks.append(config.world.rank)
            own = range(chosen.nodes[pod.node].attention, chosen.nodes[pod.node].attention + per_node)
            assert list(config.device_ids) == (list(own) if chosen.backend.startswith("gpu") else [])
    assert ranks == list(range(chosen.num_ffn_ranks))


@pytest.mark.parametrize("name", RECIPES)
def test_attention_finds_f_and_both_agree_on_ranks(name: str) -> None:
    chosen = recipe.read(path(name))
    planned = launch_plan.plan(chosen)
    leader = next(pod for pod in planned if pod.side == "ffn")
    for pod in (pod for pod in planned if pod.side == "attention"):
        flags = dict(word.lstrip("-").split("=", 1) for word in pod.command if word.startswith("--") and "=" in word)
        block = AfdBlock.from_additional_config(json.loads(flags["additional-config"]), role="attention")
        assert block is not None
        assert (block.host, block.port) == (leader.address, leader.port)
        assert block.num_ffn_ranks == chosen.num_ffn_ranks
        ranks = int(flags["tensor-parallel-size"]) * int(flags["data-parallel-size"])
        own = chosen.nodes[pod.node].attention
        paired = chosen.backend == "npu-async-cam"
        assert block.num_attention_ranks == ranks == (sum(n.attention for n in chosen.nodes) if paired else own)
        local = int(flags.get("data-parallel-size-local", flags["data-parallel-size"]))
        assert local * int(flags["tensor-parallel-size"]) == own
        assert pod.gate[3:6] == ["wait", f"--host={leader.address}", f"--port={leader.port}"]
        assert ("--phase=pairing" in pod.gate) == (chosen.backend == "npu-async-cam")


@pytest.mark.parametrize("name", RECIPES)
def test_what_is_run_is_what_is_printed(name: str) -> None:
    chosen = recipe.read(path(name))
    for planned in launch_plan.plan(chosen):
        (pod,) = pods(launch_plan.manifests(chosen, [planned]))
        (container,) = pod.spec["containers"]
        variables = environment(container, pod, Sources([]), "127.0.0.1")
        assert command(container, variables) == planned.command
        assert planned.variables.items() <= variables.items()
        gates = [command(gate, variables) for gate in pod.spec.get("initContainers", [])]
        assert gates == ([planned.gate] if planned.gate else [])
        printed = list(launch_plan.shell([planned]))[-1]
        assert [word for word in shlex.split(printed) if word in planned.command] == planned.command


@pytest.mark.parametrize("backend", ["cpu", "npu-async-cam"])
def test_a_launched_f_is_given_time_to_drain(backend: str) -> None:
    chosen = recipe.build({**recipe.DEFAULTS, "MODEL": "m", "BACKEND": backend})
    (f, _) = launch_plan.plan(chosen)
    config, _ = serve.parse(f.command[f.command.index("serve") + 1 :])
    spec = launch_plan.manifests(chosen, [f])[0]["spec"]["leaderWorkerTemplate"]["workerTemplate"]["spec"]
    stop = spec["containers"][0]["lifecycle"]["preStop"]["exec"]["command"]
    (timeout_s,) = [float(word.partition("=")[2]) for word in stop if word.startswith("--timeout=")]
    assert timeout_s >= config.drain_timeout_s + TEARDOWN_S
    assert spec["terminationGracePeriodSeconds"] > timeout_s + config.drain_timeout_s + TEARDOWN_S


@given(
    st.lists(st.tuples(st.integers(0, 16), st.integers(0, 1)).filter(any), min_size=1, max_size=4), st.integers(1, 8)
)
def test_a_layout_gives_each_rank_a_device_of_its_own(shape: list[tuple[int, int]], ffn: int) -> None:
    counts = [(attention, has_f * ffn) for attention, has_f in shape]
    text = ",".join((f"{a}A" if a else "") + (f"{f}F" if f else "") for a, f in counts)
    if not any(a for a, _ in counts) or not any(f for _, f in counts):
        with pytest.raises(UsageError, match="both A and F"):
            layout.parse(text)
        return
    nodes = layout.parse(text)
    assert [(node.attention, node.ffn) for node in nodes] == counts
    for node in nodes:
        devices = [*node.attention_devices, *node.ffn_devices]
        assert devices == list(range(node.attention + node.ffn))


@pytest.mark.parametrize("text", ["", "2", "2A2F,", "2A2G", "A1F", "0A0F", "2A1F,2A2F", "-1A1F"])
def test_a_layout_that_cannot_be_launched_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="LAYOUT"):
        layout.parse(text)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"MODEL": ""}, "MODEL"),
        ({"MODE": "fast"}, "MODE=fast"),
        ({"LAYOUT": "1A1F,1A1F", "NODES": "a,b", "BACKEND": "gpu-deepep-m2n"}, "does not leave a host"),
        ({"FFN_THREADS": "0"}, "FFN_THREADS=0"),
        ({"LAYOUT": "1A1F,1A1F", "NODES": "a", "BACKEND": "npu-async-cam"}, r"2 node\(s\), NODES lists 1"),
        ({"LAYOUT": "3A1F", "TENSOR_PARALLEL_SIZE": "2"}, "no multiple"),
        ({"FFN_PORT": "x"}, "FFN_PORT=x"),
    ],
)
def test_a_recipe_that_cannot_work_is_refused_by_name(changes: dict[str, str], named: str) -> None:
    with pytest.raises(UsageError, match=named):
        recipe.build({**recipe.DEFAULTS, "MODEL": "m", **changes})


def test_the_environment_wins_over_the_file(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("DRY_RUN", "1")
    monkeypatch.setenv("LAYOUT", "1A3F")
    assert launch.main([str(path("qwen3-30b-a3b-cpu"))]) == 0
    assert "--nproc-per-node=3" in capsys.readouterr().out


def test_beyond_loopback_nothing_is_started_without_a_token(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("FFN_FAAS_TOKEN", raising=False)
    assert launch.main([str(path("qwen3-30b-a3b-cpu-apart"))]) == 2
    assert "node0.example.com can be reached from other hosts" in capsys.readouterr().err


def test_every_pod_gets_the_token_and_no_command_line_shows_it() -> None:
    chosen = recipe.read(path("qwen3-30b-a3b-cpu"))
    planned = launch_plan.plan(chosen)
    manifests = launch_plan.manifests(chosen, planned, "a-secret")
    for pod in pods(manifests):
        for container in (*pod.spec.get("initContainers", []), *pod.spec["containers"]):
            variables = environment(container, pod, Sources(manifests), "127.0.0.1")
            assert variables["FFN_FAAS_TOKEN"] == "a-secret"
            assert "a-secret" not in " ".join(command(container, variables))
    assert "a-secret" not in "\n".join(launch_plan.shell(planned))


def test_threads_of_f_are_what_the_recipe_says(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = recipe.build({**recipe.DEFAULTS, "MODEL": "m", "FFN_THREADS": "3"})
    (f, attention) = launch_plan.plan(chosen)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    for name, value in f.variables.items():
        monkeypatch.setenv(name, value)
    assert env.num_threads() == 3
    assert "FFN_FAAS_NUM_THREADS" not in attention.variables


def test_an_unknown_key_is_named_with_its_line(tmp_path: Path) -> None:
    file = tmp_path / "r.env"
    file.write_text("# x\nMODEL=m\nLAYUOT=1A1F\n")
    with pytest.raises(UsageError, match=r"r\.env:3: 'LAYUOT=1A1F'"):
        recipe.read(file)


def test_a_node_that_the_layout_does_not_have_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("NODE_RANK", "1")
    assert launch.main([str(path("qwen3-30b-a3b-cpu"))]) == 2
    assert "the layout has 1 node(s)" in capsys.readouterr().err
