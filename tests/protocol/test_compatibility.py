"""Messages and windows against the record of their protocol version: what was released never changes."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any, get_args

import pytest

from ffn_faas.connectors.base import WindowGeometry
from ffn_faas.protocol import PROTOCOL_VERSION, messages
from ffn_faas.protocol.window import window_layout

ROOT = Path(__file__).parents[2]
GEOMETRY = WindowGeometry(stages=2, capacity=33, hidden_size=72, top_k=3, element_size=2)
IS_RELEASED = "## 0.1.0 (unreleased)" not in (ROOT / "CHANGELOG.md").read_text()


def shape() -> dict[str, Any]:
    """Kind and necessity of every field of every message, and the offsets of one window layout."""
    models = [
        *get_args(get_args(messages.AnyMessage)[0]),
        messages.Fingerprint,
        messages.HostIdentity,
        messages.CamTerms,
    ]
    return {
        "messages": {model.__name__: _fields(model.model_json_schema()) for model in models},
        "window": dataclasses.asdict(window_layout(GEOMETRY)) | {"stage_1": window_layout(GEOMETRY).stage(1)},
    }


def _fields(schema: dict[str, Any]) -> dict[str, str]:
    needed = schema.get("required", [])
    return {
        name: f"{_kind(field)}{'' if name in needed else ', optional'}" for name, field in schema["properties"].items()
    }


def _kind(field: dict[str, Any]) -> str:
    if "anyOf" in field:
        return " or ".join(_kind(choice) for choice in field["anyOf"])
    return str(field.get("type") or field["$ref"].rpartition("/")[2])


@pytest.fixture(scope="module")
def record() -> dict[str, Any]:
    path = Path(__file__).parent / "versions" / f"{PROTOCOL_VERSION}.json"
    assert path.exists(), f"record version {PROTOCOL_VERSION}: python -m tests.protocol.test_compatibility"
    return json.loads(path.read_text())


def test_no_field_of_a_message_goes_away_or_changes_its_kind(record):
    now = shape()["messages"]
    for name, fields in record["messages"].items():
        assert now[name] == fields if IS_RELEASED else now[name] | fields == now[name], name
    if IS_RELEASED:
        assert now.keys() == record["messages"].keys()


def test_every_offset_of_the_windows_is_that_of_the_record(record):
    assert json.loads(json.dumps(shape()["window"])) == record["window"]


if __name__ == "__main__":
    target = Path(__file__).parent / "versions" / f"{PROTOCOL_VERSION}.json"
    target.write_text(json.dumps(shape(), indent=1, sort_keys=True) + "\n")
