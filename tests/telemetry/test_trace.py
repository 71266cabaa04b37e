"""Spans of several processes on one clock, by numbers written down."""

from ffn_faas.telemetry import trace
from ffn_faas.telemetry.spans import PostSpan, StepSpan, clock_offset_ns
from ffn_faas.telemetry.trace import AProcess, FProcess
from tests import traces

# F's host was started 1,000,000 ns before the epoch of this test's clock, A's 5,000,000.
STEP = StepSpan(
    began=100, taken=4_100, gathered=4_100, sorted=5_100, computed=9_100, sent=9_600, layer=3, rows=7, parts=1
)
POST = PostSpan(
    dispatching=-3_999_000, dispatched=-3_998_500, waiting=-3_998_000, answered=-3_990_000, summed=-3_989_000,
    stage=1, layer=3, rows=7,
)  # fmt: skip


def both(f_offset=1_000_000, a_offset=5_000_000):
    return trace.build([FProcess(0, 2, f_offset, [STEP])], [AProcess("0123456789", 1, a_offset, [POST])])


def test_both_sides_stand_on_one_clock():
    built = both()
    traces.check(built)
    pids = traces.processes(built)
    assert list(pids) == ["F rank 0 of 2", "Attention 01234567 rank 1"]
    (step,) = traces.spans(built, pids["F rank 0 of 2"], "step")
    (post,) = traces.spans(built, pids["Attention 01234567 rank 1"], "post")
    assert (step["ts"], step["dur"]) == (0.0, 9.5)
    assert (post["ts"], post["dur"]) == (0.9, 10.0), "dispatched 0.9 us after F began to wait"
    assert step["args"] == {"layer": 3, "rows": 7, "posts": 1}
    assert post["tid"] == 2, "a row for each stage"
    assert built["otherData"] == {
        "base_unix_ns": "1000100",
        "clock_offset_ns": {"F rank 0 of 2": "1000000", "Attention 01234567 rank 1": "5000000"},
    }


def test_parts_of_a_step_have_the_names_and_times_of_what_happened():
    built = both()
    names = {e["name"]: (e["ts"], e["dur"]) for e in built["traceEvents"] if e.get("cat", "").endswith("part")}
    assert names == {
        "sort": (4.0, 1.0),
        "experts": (5.0, 4.0),
        "combine": (9.0, 0.5),
        "dispatch": (0.9, 0.5),
        "meanwhile": (1.4, 0.5),
        "sum": (9.9, 1.0),
        "wait": names["wait"],
    }
    waits = [(e["ts"], e["dur"]) for e in built["traceEvents"] if e["name"] == "wait"]
    assert waits == [(0.0, 4.0), (1.9, 8.0)]


def test_a_kernel_that_does_not_say_when_it_sorted_has_no_such_part():
    built = trace.build([FProcess(0, 1, 0, [STEP._replace(sorted=0)])], [])
    traces.check(built)
    parts = {e["name"]: e["dur"] for e in built["traceEvents"] if e.get("cat") == "step part"}
    assert parts == {"wait": 4.0, "experts": 5.0, "combine": 0.5}


def test_traces_of_several_ranks_are_moved_to_the_clock_of_the_earliest():
    later = trace.build([FProcess(1, 2, 1_000_500, [STEP])], [])
    empty = trace.build([FProcess(2, 3, 0, [])], [])
    merged = trace.merge([later, empty, both()])
    traces.check(merged)
    assert merged["otherData"]["base_unix_ns"] == "1000100"
    assert [traces.spans(merged, pid, "step")[0]["ts"] for pid in (1, 2)] == [0.0, 0.5]
    assert trace.steps(merged) == 2
    assert trace.posts(merged) == 1


def test_the_clock_offset_leads_to_the_time_of_day():
    import time

    before = time.time_ns()
    now = time.monotonic_ns() + clock_offset_ns()
    assert before - 10**6 < now < time.time_ns() + 10**6


def test_how_far_off_a_devices_clock_may_be_is_told_and_survives_merging():
    sure = trace.build([FProcess(0, 2, 0, [STEP])], [])
    unsure = trace.build([FProcess(1, 2, 0, [STEP], clock_error_ns=900)], [])
    assert "clock_error_ns" not in sure["otherData"]
    assert trace.merge([sure, unsure])["otherData"]["clock_error_ns"] == {"F rank 1 of 2": "900"}
