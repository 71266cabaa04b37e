"""Probes say what an orchestrator may rely on."""

import socket

import pytest

from ffn_faas.config import World
from ffn_faas.errors import ResourceError, WorldLost
from ffn_faas.http.server import bind
from ffn_faas.service.lifecycle import Phase
from tests.http.conftest import Service


def test_ready_is_503_with_phase_and_progress_until_ready(service):
    assert service.get("/ready").json()["phase"] == "starting"
    service.to(Phase.LOADING)
    service.state.lifecycle.report(1, 4)
    answer = service.get("/ready")
    assert answer.status_code == 503
    assert (answer.json()["phase"], answer.json()["progress"]) == ("loading", 0.25)
    service.to(Phase.CAPTURING)
    assert service.get("/ready").status_code == 503
    service.to(Phase.READY)
    for path in ("/ready", "/v2/health/ready"):
        assert service.get(path).status_code == 200
    service.to(Phase.DRAINING)
    assert service.get("/ready").status_code == 503


def test_idle_is_alive_and_failed_is_not(service):
    for path in ("/live", "/health", "/v2/health/live"):
        assert service.get(path).status_code == 200
    service.state.lifecycle.fail("no memory")
    answer = service.get("/live")
    assert answer.status_code == 503
    assert answer.json()["reason"] == "no memory"


def test_a_lost_rank_makes_ready_503_at_once(service):
    service.to_ready()
    service.state.stop.request("F rank 1 was lost", WorldLost("F rank 1 was lost"))
    answer = service.get("/ready")
    assert answer.status_code == 503
    assert answer.json()["reason"] == "F rank 1 was lost"


def test_local_rank_0_answers_for_its_node():
    service = Service(World(rank=0, size=3, local_rank=0, local_size=2))
    try:
        service.to_ready()
        assert service.get("/ready").status_code == 503
        service.state.world.phases[1] = "ready"
        answer = service.get("/ready")
        assert answer.status_code == 200
        assert answer.json()["ranks"] == {"0": "ready", "1": "ready"}
    finally:
        service.server.shutdown()


def test_stop_is_202_and_idempotent(service):
    assert service.post("/stop").status_code == 202
    assert service.post("/stop").status_code == 202
    assert service.state.stop.reason == "POST /stop"
    assert service.get("/stop").status_code == 405


def test_status_and_metrics_agree_with_the_lifecycle(service):
    service.to_ready()
    status = service.get("/status").json()
    assert status["phase"] == "ready"
    assert set(status["phase_seconds"]) == {"starting", "loading", "capturing", "ready"}
    assert status["experts_per_rank"] == [8]
    text = service.get("/metrics").text
    assert 'ffn_faas:phase{phase="ready"} 1.0' in text
    assert "ffn_faas:steps_total 0.0" in text


def test_a_taken_port_is_one_clear_error():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ResourceError, match=f"127.0.0.1:{port}"):
            bind("127.0.0.1", port)


def test_openapi_describes_every_probe_with_its_503_and_its_aliases(service):
    paths = service.get("/openapi.json").json()["paths"]
    probes = ("/live", "/health", "/v2/health/live", "/ready", "/v2/health/ready")
    assert set(paths) == {*probes, "/status", "/metrics", "/stop", "/node", "/profile"}
    for path in probes:
        assert set(paths[path]["get"]["responses"]) == {"200", "503"}
    assert set(paths["/stop"]["post"]["responses"]) == {"202", "401", "403"}
    assert paths["/status"]["get"]["parameters"][0]["name"] == "experts"
