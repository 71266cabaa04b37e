"""Dashboard and alert rules ask for metrics, labels and reasons that the program really has."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from ffn_faas.config import ServeConfig, World
from ffn_faas.connectors.base import Distribution
from ffn_faas.service.lifecycle import Phase
from ffn_faas.telemetry.metrics import exposition
from tests.http.conftest import RecordingConnector, Service

FOLDER = Path(__file__).parents[2] / "deploy" / "observability"
DASHBOARD = json.loads((FOLDER / "dashboard.json").read_text())
RULES = [rule for group in yaml.safe_load((FOLDER / "alerts.yaml").read_text())["groups"] for rule in group["rules"]]
PANEL_QUERIES = [(panel["title"], target["expr"]) for panel in DASHBOARD["panels"] for target in panel["targets"]]
QUERIES = PANEL_QUERIES + [(rule["alert"], rule["expr"]) for rule in RULES]


class CountingConnector(RecordingConnector):
    """Counts all that a connector can count."""

    def step_seconds(self):
        return dict.fromkeys(("wait", "compute", "send"), Distribution([0.001], [1, 0], 0.0005))

    def posts_per_item(self):
        return Distribution([1.0], [1, 0], 1.0)

    def expert_rows(self):
        return [[1, 2]]


@pytest.fixture(scope="module")
def samples():
    """Labels of every sample of /metrics, by name: {name: {label: {values}}}."""
    service = Service()
    try:
        service.connector = CountingConnector()
        service.to_ready()
        service.state.sessions.refused("fingerprint")
        text = exposition(service.state).decode()
    finally:
        service.server.shutdown()
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = found.setdefault(sample.name, {})
            for label, value in sample.labels.items():
                labels.setdefault(label, set()).add(value)
    return found


@pytest.mark.parametrize(("title", "query"), QUERIES, ids=[title for title, _ in QUERIES])
def test_every_query_names_metrics_and_labels_that_exist(samples, title, query):
    selectors = re.findall(r"(ffn_faas:\w+)(?:\{([^}]*)\})?", query)
    assert selectors
    for name, conditions in selectors:
        assert name in samples, name
        for label, operator, wanted in re.findall(r'(\w+)(=~?)"([^"]*)"', conditions):
            if label == "instance":
                continue
            values = wanted.split("|") if operator == "=~" else [wanted]
            assert samples[name][label] >= set(values), (name, label)
    for labels in re.findall(r"by \(([^)]*)\)", query):
        known = {"instance"}.union(*(samples[name] for name, _ in selectors))
        assert set(re.split(r",\s*", labels)) <= known


@pytest.mark.parametrize(("title", "query"), QUERIES, ids=[title for title, _ in QUERIES])
def test_every_query_parses(title, query):
    promql_parser = pytest.importorskip("promql_parser")
    promql_parser.parse(query.replace("$__rate_interval", "1m").replace("$instance", ".*"))


def test_every_family_is_on_the_dashboard_or_told_of_elsewhere(samples):
    asked = {name for _, query in QUERIES for name in re.findall(r"ffn_faas:\w+", query)}
    families = {re.sub(r"_(bucket|sum|count|created)$", "", name) for name in samples}
    shown = {re.sub(r"_(bucket|sum|count)$", "", name) for name in asked}
    assert families - shown <= {"ffn_faas:phase_seconds", "ffn_faas:posts_total"}


def test_the_stuck_alert_waits_as_long_as_the_program_does():
    rule = next(rule for rule in RULES if rule["alert"] == "FfnStuck")
    limit = ServeConfig(model="m", world=World()).stall_timeout_s
    assert rule["expr"].endswith(f"> {limit:g}")


def test_every_rule_says_what_to_do_and_legends_name_labels_that_are_there(samples):
    for rule in RULES:
        assert rule["annotations"].keys() == {"summary", "remedy"}
        assert rule["labels"]["severity"] in ("critical", "warning", "info")
    for panel in DASHBOARD["panels"]:
        for target in panel["targets"]:
            names = re.findall(r"ffn_faas:\w+", target["expr"])
            known = {"instance"}.union(*(samples[name] for name in names))
            assert set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"])) <= known


def test_phases_of_the_rules_are_phases_of_the_program():
    phases = {phase.value for phase in Phase}
    named = {value for _, query in QUERIES for value in re.findall(r'phase="(\w+)"', query)}
    assert named == {"failed"} <= phases


def test_every_alert_stands_in_the_operations_page_with_its_severity():
    page = (FOLDER.parents[1] / "docs" / "operations.md").read_text()
    told = dict(re.findall(r"^\| `(Ffn\w+)` \|.*\| (\w+) \|$", page, re.MULTILINE))
    assert told == {rule["alert"]: rule["labels"]["severity"] for rule in RULES}
