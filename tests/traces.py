"""What a trace has to be for Perfetto and chrome://tracing, by the format's own description, and for its reader."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

Event = dict[str, Any]
ROUNDING_US = 0.002


def check(trace: dict[str, Any]) -> None:
    """Fields of every event; on each row spans nest, and those inside a step or post fill it without gaps."""
    json.loads(json.dumps(trace, allow_nan=False))
    assert trace["displayTimeUnit"] in ("ms", "ns")
    rows = defaultdict(list)
    named = set()
    for event in trace["traceEvents"]:
        assert isinstance(event["name"], str)
        assert isinstance(event["pid"], int)
        assert isinstance(event["tid"], int)
        assert event["ph"] in ("X", "M")
        if event["ph"] == "M":
            named.add((event["pid"], event["name"]))
            continue
        assert event["ts"] >= 0
        assert event["dur"] >= 0
        rows[event["pid"], event["tid"]].append(event)
    for (pid, _), events in rows.items():
        assert (pid, "process_name") in named
        for whole, inside in _nested(events):
            assert abs(sum(part["dur"] for part in inside) - whole["dur"]) < ROUNDING_US * (len(inside) + 1)
            at = whole["ts"]
            for part in inside:
                assert abs(part["ts"] - at) < ROUNDING_US * (len(inside) + 1)
                at = part["ts"] + part["dur"]


def _nested(events: list[Event]) -> Iterator[tuple[Event, list[Event]]]:
    """Each outermost span with those that begin inside it; they have to end inside it as well."""
    events = sorted(events, key=lambda event: (event["ts"], -event["dur"]))
    outer = [event for event in events if not event["cat"].endswith("part")]
    parts = [event for event in events if event["cat"].endswith("part")]
    ends = [event["ts"] + event["dur"] for event in outer]
    for end, following in zip(ends, outer[1:], strict=False):
        assert following["ts"] >= end - ROUNDING_US
    for whole, end in zip(outer, ends, strict=True):
        inside = [part for part in parts if whole["ts"] - ROUNDING_US <= part["ts"] < end - ROUNDING_US]
        yield whole, [part for part in inside if part["cat"] == f"{whole['cat']} part"]


def processes(trace: dict[str, Any]) -> dict[str, int]:
    """pid by name."""
    return {event["args"]["name"]: event["pid"] for event in trace["traceEvents"] if event["name"] == "process_name"}


def spans(trace: dict[str, Any], pid: int, kind: str) -> list[Event]:
    """Spans of a process and category, in order of time."""
    found = [event for event in trace["traceEvents"] if event["pid"] == pid and event.get("cat") == kind]
    return sorted(found, key=lambda event: event["ts"])
