"""Spans of several processes as one Chrome trace, which Perfetto and chrome://tracing open. Pure.

Every process has its own offset from its monotonic clock to the time of day; the trace counts from ``base_unix_ns``, so
that all stand on one clock: exactly on one host, as far as clocks are synchronized between hosts.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from ffn_faas.telemetry.spans import PostSpan, StepSpan

FIRST_ATTENTION_PID = 100_001
Event = dict[str, Any]
Trace = dict[str, Any]


@dataclass(frozen=True)
class FProcess:
    """What one F rank kept."""

    rank: int
    world_size: int
    clock_offset_ns: int
    spans: Sequence[StepSpan]
    clock_error_ns: int = 0
    """How far off its monotonic clock the spans may be, where another clock was read."""


@dataclass(frozen=True)
class AProcess:
    """What one A rank kept."""

    instance: str
    rank: int
    clock_offset_ns: int
    spans: Sequence[PostSpan]


def build(f: Sequence[FProcess], attention: Sequence[AProcess]) -> Trace:
    """A document of its own; with no spans at all it has only the names of processes."""
    began = [span.began + process.clock_offset_ns for process in f for span in process.spans]
    posted = [span.dispatching + sender.clock_offset_ns for sender in attention for span in sender.spans]
    base = min([*began, *posted], default=0)
    events: list[Event] = []
    clocks = {}
    errors = {}
    for process in f:
        name, pid = f"F rank {process.rank} of {process.world_size}", process.rank + 1
        clocks[name] = process.clock_offset_ns
        if process.clock_error_ns:
            errors[name] = process.clock_error_ns
        events += [*_names(pid, name, {1: "steps"}), *_steps(process, pid, process.clock_offset_ns - base)]
    for number, sender in enumerate(attention):
        name, pid = f"Attention {sender.instance[:8]} rank {sender.rank}", FIRST_ATTENTION_PID + number
        clocks[name] = sender.clock_offset_ns
        lanes = {span.stage + 1: f"stage {span.stage}" for span in sender.spans}
        events += [*_names(pid, name, lanes or {1: "stage 0"}), *_posts(sender, pid, sender.clock_offset_ns - base)]
    # As text: numbers of this size lose digits in JavaScript.
    other = {"base_unix_ns": str(base), "clock_offset_ns": {name: str(ns) for name, ns in clocks.items()}}
    if errors:
        other["clock_error_ns"] = {name: str(ns) for name, ns in errors.items()}
    return {"displayTimeUnit": "ns", "traceEvents": events, "otherData": other}


def merge(traces: Sequence[Trace]) -> Trace:
    """Traces of several F ranks as one, on the clock of the earliest."""
    bases = [int(trace["otherData"]["base_unix_ns"]) for trace in traces]
    base = min((value for value in bases if value), default=0)
    events: list[Event] = []
    clocks: dict[str, str] = {}
    errors: dict[str, str] = {}
    for trace, own in zip(traces, bases, strict=True):
        clocks |= trace["otherData"]["clock_offset_ns"]
        errors |= trace["otherData"].get("clock_error_ns", {})
        for event in trace["traceEvents"]:
            moved = {"ts": _us(round(event["ts"] * 1000) + own - base)} if "ts" in event else {}
            events.append({**event, **moved})
    other = {"base_unix_ns": str(base), "clock_offset_ns": clocks, **({"clock_error_ns": errors} if errors else {})}
    return {"displayTimeUnit": "ns", "traceEvents": events, "otherData": other}


def steps(trace: Trace) -> int:
    """How many steps of F ranks it shows."""
    return sum(event.get("cat") == "step" for event in trace["traceEvents"])


def posts(trace: Trace) -> int:
    """How many posts of Attention ranks it shows."""
    return sum(event.get("cat") == "post" for event in trace["traceEvents"])


def _steps(process: FProcess, pid: int, shift: int) -> Iterable[Event]:
    for span in process.spans:
        args = {"layer": span.layer, "rows": span.rows, "posts": span.parts}
        ends = [("wait", span.taken), ("merge", span.gathered), ("sort", span.sorted or span.gathered)]
        ends += [("experts", span.computed), ("combine", span.sent)]
        yield from _nested("step", f"step, layer {span.layer}", args, pid, 1, span.began + shift, ends, shift)


def _posts(process: AProcess, pid: int, shift: int) -> Iterable[Event]:
    for span in process.spans:
        args = {"layer": span.layer, "rows": span.rows}
        ends = [("dispatch", span.dispatched), ("meanwhile", span.waiting), ("wait", span.answered)]
        ends.append(("sum", span.summed))
        name = f"post, layer {span.layer}"
        yield from _nested("post", name, args, pid, span.stage + 1, span.dispatching + shift, ends, shift)


def _nested(
    kind: str,
    name: str,
    args: dict[str, int],
    pid: int,
    tid: int,
    begin: int,
    ends: list[tuple[str, int]],
    shift: int,
) -> Iterable[Event]:
    """A span and the parts it consists of, one after the other without a gap; parts that took no time are left out."""
    yield _span(kind, name, begin, ends[-1][1] + shift, pid, tid) | {"args": args}
    for part, end in ends:
        if end + shift > begin:
            yield _span(f"{kind} part", part, begin, end + shift, pid, tid)
        begin = max(begin, end + shift)


def _span(kind: str, name: str, begin: int, end: int, pid: int, tid: int) -> Event:
    return {"ph": "X", "cat": kind, "name": name, "ts": _us(begin), "dur": _us(end - begin), "pid": pid, "tid": tid}


def _names(pid: int, name: str, lanes: dict[int, str]) -> Iterable[Event]:
    yield {"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "args": {"name": name}}
    yield {"ph": "M", "name": "process_sort_index", "pid": pid, "tid": 0, "args": {"sort_index": pid}}
    for tid, lane in lanes.items():
        yield {"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": {"name": lane}}


def _us(nanoseconds: int) -> float:
    return nanoseconds / 1000
