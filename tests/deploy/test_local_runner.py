"""Pods as processes, with small programs in place of F and vLLM: gating, probes, restarts, the way a pod ends."""

from __future__ import annotations

import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from ffn_faas.deploy.local import Cluster, set_values
from ffn_faas.errors import UsageError

SERVER = textwrap.dedent(
    """
    import http.server, os, signal, sys, threading
    from pathlib import Path
    state = Path(os.environ["STATE"])
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200 if (state / self.path[1:]).exists() else 503)
            self.end_headers()
        def log_message(self, *_): pass
    server = http.server.ThreadingHTTPServer((os.environ["IP"], 8123), Handler)
    def end(*_):
        (state / "signalled").touch()
        if not os.environ.get("STUBBORN"): threading.Thread(target=server.shutdown).start()
    signal.signal(signal.SIGTERM, end)
    (state / "serving").touch()
    server.serve_forever(0.02)
    """
)
GET = {"periodSeconds": 0.1, "timeoutSeconds": 5}


def server(state: Path, **fields: Any) -> dict[str, Any]:
    return {
        "name": "server",
        "args": ["python", "-c", SERVER],
        "env": [
            {"name": "STATE", "value": str(state)},
            {"name": "IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
        ],
        "readinessProbe": {"httpGet": {"path": "/ready", "port": 8123}, "failureThreshold": 1, **GET},
        **fields,
    }


def world(size: int, container: dict[str, Any], grace: int = 20) -> dict[str, Any]:
    pod = {
        "metadata": {"labels": {"app": "f"}},
        "spec": {"terminationGracePeriodSeconds": grace, "containers": [container]},
    }
    spec = {"leaderWorkerTemplate": {"size": size, "workerTemplate": pod, "restartPolicy": "RecreateGroupOnPodRestart"}}
    return {"kind": "LeaderWorkerSet", "metadata": {"name": "f", "namespace": "ns"}, "spec": spec}


def deployment(name: str, spec: dict[str, Any]) -> dict[str, Any]:
    template = {"metadata": {"labels": {"app": name}}, "spec": spec}
    return {"kind": "Deployment", "metadata": {"name": name, "namespace": "ns"}, "spec": {"template": template}}


class Run:
    def __init__(self, cluster: Cluster, events: list[tuple[str, str]]) -> None:
        self.cluster, self.events = cluster, events

    def until(self, condition: Callable[[], object], seconds: float = 60.0) -> None:
        end = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < end, self.events
            self.cluster.tick()
            time.sleep(0.01)

    def for_seconds(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        self.until(lambda: time.monotonic() > end)

    def count(self, pod: str, event: str) -> int:
        return self.events.count((pod, event))


@contextmanager
def running(tmp_path: Path, *manifests: dict[str, Any]) -> Iterator[Run]:
    events: list[tuple[str, str]] = []
    with Cluster(manifests, tmp_path, lambda pod, what: events.append((pod, what))) as cluster:
        yield Run(cluster, events)
    assert threading.active_count() < 50


def test_a_pod_gated_by_an_init_container_starts_after_f_is_ready(tmp_path: Path) -> None:
    gate = {
        "name": "gate",
        "args": [
            "python",
            "-c",
            f"import time, pathlib\nwhile not pathlib.Path({str(tmp_path / 'ready')!r}).exists(): time.sleep(.02)",
        ],
    }
    main = {"name": "main", "args": ["python", "-c", "import time; time.sleep(600)"]}
    attention = deployment("attention", {"initContainers": [gate], "containers": [main]})
    with running(tmp_path, world(1, server(tmp_path)), attention) as run:
        run.until((tmp_path / "serving").exists)
        run.for_seconds(0.5)
        assert run.count("attention-0", "main started") == 0
        assert run.count("f-0", "Ready") == 0
        (tmp_path / "ready").touch()
        run.until(lambda: run.count("attention-0", "Ready") and run.count("f-0", "Ready"))
        assert run.events.index(("attention-0", "gate ended with exit code 0")) < run.events.index(
            ("attention-0", "main started")
        )
        (tmp_path / "ready").unlink()
        run.until(lambda: run.count("f-0", "not Ready"))


def test_a_failing_init_container_is_tried_again_and_holds_the_pod_back(tmp_path: Path) -> None:
    gate = {"name": "gate", "args": ["python", "-c", "raise SystemExit(1)"]}
    main = {"name": "main", "args": ["python", "-c", ""]}
    with running(tmp_path, deployment("a", {"initContainers": [gate], "containers": [main]})) as run:
        run.until(lambda: run.count("a-0", "gate ended with exit code 1") == 2)
        run.for_seconds(0.3)
        assert run.count("a-0", "gate started") == 2, "the third start waits for ten seconds"
        assert run.count("a-0", "main started") == 0


def test_a_killed_pod_of_a_world_recreates_the_whole_group(tmp_path: Path) -> None:
    (tmp_path / "ready").touch()
    with running(tmp_path, world(2, server(tmp_path))) as run:
        run.until(lambda: run.count("f-0", "Ready") and run.count("f-0-1", "Ready"))
        assert len(set(run.cluster.addresses.values())) == 2
        run.cluster.pods["f-0-1"].kill()
        run.until(lambda: run.count("f-0", "Ready") == 2 and run.count("f-0-1", "Ready") == 2)
        assert run.count("f-0-1", "server ended with signal SIGKILL") == 1
        assert run.count("f-0", "server ended with exit code 0") == 1, "the healthy pod was asked to end"
        assert run.count("f-0", "group recreated") == 1


def test_a_world_that_never_came_up_is_explained_and_made_anew_after_a_while(tmp_path: Path) -> None:
    program = "import sys; sys.exit('first\\nERROR no such model\\nERROR later')"
    container = {"name": "server", "args": ["python", "-c", program]}
    with running(tmp_path, world(1, container)) as run:
        run.until(lambda: run.count("f-0", "server ended with exit code 1") == 2)
        assert run.count("f-0", "server said: ERROR no such model") == 2
        run.for_seconds(0.5)
        assert run.count("f-0", "server started") == 2, "the third start waits for ten seconds"


def test_a_killed_container_outside_of_a_world_restarts_in_place(tmp_path: Path) -> None:
    (tmp_path / "ready").touch()
    with running(tmp_path, deployment("d", {"containers": [server(tmp_path)]})) as run:
        run.until(lambda: run.count("d-0", "Ready"))
        run.cluster.pods["d-0"].kill()
        run.until(lambda: run.count("d-0", "Ready") == 2)
        assert run.count("d-0", "terminating") == 0


def test_a_failed_startup_probe_restarts_the_container(tmp_path: Path) -> None:
    startup = {"httpGet": {"path": "/never", "port": 8123}, "failureThreshold": 3, **GET, "periodSeconds": 0.5}
    with running(tmp_path, deployment("d", {"containers": [server(tmp_path, startupProbe=startup)]})) as run:
        run.until(lambda: run.count("d-0", "server started") == 2)
        assert run.count("d-0", "server: startup probe failed") == 1
        assert run.count("d-0", "terminating") == 0


def test_a_failed_liveness_probe_restarts_the_container(tmp_path: Path) -> None:
    live = {"httpGet": {"path": "/live", "port": 8123}, **GET}
    container = server(tmp_path, startupProbe={**live, "failureThreshold": 10000}, livenessProbe=live)
    (tmp_path / "live").touch()
    (tmp_path / "ready").touch()
    with running(tmp_path, deployment("d", {"containers": [container]})) as run:
        run.until(lambda: run.count("d-0", "Ready"))
        (tmp_path / "live").unlink()
        run.until(lambda: run.count("d-0", "server started") == 2)
        assert run.count("d-0", "server: liveness probe failed") == 1
        assert (tmp_path / "signalled").exists(), "asked to end, not killed"


def test_readiness_and_liveness_wait_for_the_startup_probe(tmp_path: Path) -> None:
    startup = {"httpGet": {"path": "/started", "port": 8123}, "failureThreshold": 10000, **GET}
    liveness = {"httpGet": {"path": "/live", "port": 8123}, "failureThreshold": 1, **GET}
    (tmp_path / "ready").touch()
    container = server(tmp_path, startupProbe=startup, livenessProbe=liveness)
    with running(tmp_path, deployment("d", {"containers": [container]})) as run:
        run.until((tmp_path / "serving").exists)
        run.for_seconds(0.5)
        assert run.events == [("d-0", "server started")]
        (tmp_path / "live").touch()
        (tmp_path / "started").touch()
        run.until(lambda: run.count("d-0", "Ready"))
        assert run.count("d-0", "server started") == 1


def test_pre_stop_ends_before_the_signal_and_grace_bounds_both(tmp_path: Path) -> None:
    hook = (
        f"import pathlib, time; state = pathlib.Path({str(tmp_path)!r}); time.sleep(.3); "
        "(state / 'hook').write_text(str((state / 'signalled').exists()))"
    )
    pre_stop = {"preStop": {"exec": {"command": ["python", "-c", hook]}}}
    (tmp_path / "ready").touch()
    with running(tmp_path, world(1, server(tmp_path, lifecycle=pre_stop))) as run:
        run.until(lambda: run.count("f-0", "Ready"))
        run.cluster.stop()
        assert (tmp_path / "hook").read_text() == "False"
        assert run.count("f-0", "server ended with exit code 0") == 1


def test_what_ignores_the_signal_is_killed_when_the_grace_period_is_over(tmp_path: Path) -> None:
    container = server(tmp_path)
    container["env"].append({"name": "STUBBORN", "value": "1"})
    (tmp_path / "ready").touch()
    with running(tmp_path, world(1, container, grace=1)) as run:
        run.until(lambda: run.count("f-0", "Ready"))
        run.cluster.stop()
        assert (tmp_path / "signalled").exists()
        assert run.count("f-0", "server ended with signal SIGKILL") == 1


def test_who_is_in_a_hurry_does_not_wait_for_grace_periods(tmp_path: Path) -> None:
    container = server(tmp_path)
    container["env"].append({"name": "STUBBORN", "value": "1"})
    (tmp_path / "ready").touch()
    hurry = threading.Event()
    with running(tmp_path, world(1, container, grace=3600)) as run:
        run.until(lambda: run.count("f-0", "Ready"))
        threading.Timer(0.5, hurry.set).start()
        run.cluster.stop(hurry)
        assert run.count("f-0", "server ended with signal SIGKILL") == 1


def test_a_value_is_set_in_every_map_that_has_it_and_nowhere_else() -> None:
    maps = [
        {"kind": "ConfigMap", "metadata": {"name": n}, "data": {k: "old"}}
        for n, k in (("a", "X"), ("b", "Y"), ("c", "X"))
    ]
    set_values(maps, ["X=1=2"])
    assert [m["data"] for m in maps] == [{"X": "1=2"}, {"Y": "old"}, {"X": "1=2"}]
    with pytest.raises(UsageError, match="no ConfigMap has Z"):
        set_values(maps, ["Z=1"])
