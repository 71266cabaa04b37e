"""Times of single steps and posts, kept by the kernels: always on, right in order, copied beside whatever waits."""

import json
import threading
import time

import pytest
import torch

from ffn_faas.bench.gpu_rig import LayerShape
from ffn_faas.cli import main
from ffn_faas.connectors.m2n_library import KEPT_TIMES
from tests import traces
from tests.gpu import rigs
from tests.gpu.test_processes import PORT, attention, daemon, model  # noqa: F401 - fixtures

pytestmark = pytest.mark.gpu
SHAPE = LayerShape(256, 128, 8, 2, 3)
ROWS = (1, 16, 5, 12)
RESOLUTION_NS = 2_000
"""Of globaltimer, at worst, on both sides."""


class Posts:
    """Posts of all layers in turn, each of its own rows; ``run`` all of them once, eager or in a graph of A's."""

    def __init__(self, rig, count, *, captured):
        self.rig = rig
        torch.cuda.set_device(rig.a)
        self.stream = torch.cuda.Stream(rig.a)
        self.batches = [rig.batch(ROWS[turn % len(ROWS)], turn) for turn in range(count)]
        self.told = [(turn % SHAPE.layers, ROWS[turn % len(ROWS)]) for turn in range(count)]
        torch.cuda.synchronize(rig.a)
        self.graph = None
        if captured:
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph, stream=self.stream, capture_error_mode="thread_local"):
                self._enqueue()

    def _enqueue(self):
        for (layer, _), batch in zip(self.told, self.batches, strict=True):
            self.rig.dispatch(layer, batch, self.stream.cuda_stream)
            self.rig.receive(batch, self.stream.cuda_stream)

    def run(self):
        torch.cuda.set_device(self.rig.a)
        with torch.cuda.stream(self.stream):
            if self.graph is None:
                self._enqueue()
            else:
                self.graph.replay()
        self.stream.synchronize()

    def results(self):
        return [batch.out.clone() for batch in self.batches]


def record(rig, limit):
    rig.library.call("use_device", rig.f)
    rig.service.times.record(limit)
    rig.library.call("use_device", rig.a)
    rig.attention.times.record(limit)


def take(rig):
    rig.library.call("use_device", rig.f)
    steps = rig.service.times.take()
    rig.library.call("use_device", rig.a)
    return steps, rig.attention.times.take()


def check(rig, steps, posts, told):
    """``told``: (layer, rows) of each post, which is one step, in order."""
    assert [(step.layer, step.rows, step.parts) for step in steps] == [(*one, 1) for one in told]
    assert [(post.layer, post.rows, post.stage) for post in posts] == [(*one, 0) for one in told]
    for step in steps:
        assert list(step[:6]) == sorted(step[:6])
        assert step.taken < step.computed < step.sent
    for post in posts:
        assert list(post[:5]) == sorted(post[:5])
    for times in (steps, posts):
        ends = [span[5 if times is steps else 4] for span in times]
        assert all(end <= following[0] for end, following in zip(ends, times[1:], strict=False))
    slack = RESOLUTION_NS
    if rig.f != rig.a:
        slack += rig.service.times.error_ns + rig.attention.times.error_ns
    for step, post in zip(steps, posts, strict=True):
        assert post.dispatching - slack <= step.taken, (step, post, slack)
        assert step.computed <= post.answered + slack, (step, post, slack)


def prepare(library, pair):
    rig, _ = rigs.make_serving(library, SHAPE, max(ROWS), pair)
    library.call("use_device", rig.f)
    rig.service.capture()
    library.call("use_device", rig.a)
    return rig


@pytest.mark.parametrize("captured", [False, True], ids=["eager", "graphs"])
def test_posts_and_steps_of_both_sides_are_seen_on_one_clock_and_no_result_changes(
    library, pair, captured, record_property
):
    rig = prepare(library, pair)
    posts = Posts(rig, 12, captured=captured)
    with rig.serving(captured=captured):
        posts.run()
        before = posts.results()
        assert take(rig) == ([], []), "nobody has asked"
        began = time.monotonic_ns()
        record(rig, 24)
        for _ in range(4):
            posts.run()
        steps, sent = take(rig)
        ended = time.monotonic_ns()
    assert all(torch.equal(now, then) for now, then in zip(posts.results(), before, strict=True))
    check(rig, steps, sent, posts.told * 2)
    errors = rig.service.times.error_ns, rig.attention.times.error_ns
    print(f"clocks of F and A: +- {errors} ns")
    record_property("clock_error_ns", list(errors))
    assert max(errors) < 20_000
    assert began - max(errors) <= steps[0].began
    assert sent[-1].summed <= ended + max(errors)
    rig.close()


def test_the_clocks_of_one_moment_agree_again_later(library, pair):
    """Two readings a fifth of a second apart differ by the drift of a crystal, some millionths, and their errors."""
    rig = prepare(library, pair)
    for device, times in ((rig.f, rig.service.times), (rig.a, rig.attention.times)):
        library.call("use_device", device)
        first = times._read_clock()
        time.sleep(0.2)
        last = times._read_clock()
        drift = (last.host_ns - last.device_ns) - (first.host_ns - first.device_ns)
        print(f"device {device}: drift {drift} ns in {last.host_ns - first.host_ns} ns, +- {first.error_ns}")
        assert abs(drift) <= (last.host_ns - first.host_ns) // 2_000 + first.error_ns + last.error_ns + RESOLUTION_NS
    rig.close()


def test_the_oldest_are_left_out_when_a_ring_has_gone_round(library, pair):
    rig = prepare(library, pair)
    posts = Posts(rig, 96, captured=True)
    turns = KEPT_TIMES // len(posts.told) + 5
    with rig.serving():
        posts.run()
        record(rig, 4096)
        for _ in range(turns):
            posts.run()
        steps, sent = take(rig)
        record(rig, 50)
        posts.run()
        again = take(rig)
    # Numbers 97 to 97 + 96 * turns have ended; the one that comes next lies where the oldest of the ring did.
    total, first = len(posts.told) * (turns + 1), len(posts.told) + 1
    oldest = total + 2 - KEPT_TIMES
    numbers = range(max(first, oldest), first + 4096)
    assert oldest > first
    check(rig, steps, sent, [posts.told[(number - 1) % len(posts.told)] for number in numbers])
    check(rig, *again, posts.told[:50])
    rig.close()


def test_a_profile_is_taken_beside_a_wait_that_nobody_answers(library, pair):
    rig = prepare(library, pair)
    batch, stream = rig.batch(4, 1), torch.cuda.Stream(rig.a)
    torch.cuda.synchronize(rig.a)
    record(rig, 8)
    rig.dispatch(1, batch, stream.cuda_stream)
    rig.receive(batch, stream.cuda_stream)
    time.sleep(0.01)
    begin = time.monotonic()
    assert take(rig) == ([], [])
    assert time.monotonic() - begin < 2, "F serves nobody: A waits for ever"
    record(rig, 8)
    with rig.serving():
        stream.synchronize()
        steps, posts = take(rig)
    check(rig, steps, posts, [(1, 4)])
    rig.close()


def test_a_profile_is_taken_while_another_thread_captures_a_graph(library, pair):
    rig = prepare(library, pair)
    batch, stream, failures = rig.batch(4, 1), torch.cuda.Stream(rig.a), []
    torch.cuda.synchronize(rig.a)

    def profile():
        try:
            record(rig, 8)
            take(rig)
        except Exception as error:  # noqa: BLE001 - raised by the test
            failures.append(error)

    graph = torch.cuda.CUDAGraph()
    torch.cuda.set_device(rig.a)
    with torch.cuda.graph(graph, stream=stream):
        rig.dispatch(1, batch, stream.cuda_stream)
        thread = threading.Thread(target=profile)
        thread.start()
        thread.join()
        rig.receive(batch, stream.cuda_stream)
    assert failures == []
    del graph
    rig.close()


def test_the_command_shows_both_sides_of_running_processes(daemon, tmp_path):  # noqa: F811 - the fixture
    """F in its graph with an Attention in one, or both eager."""
    running = attention(daemon, "profiled", 64, "eager" if daemon.flags else "graph")
    running.rounds(10)
    target = tmp_path / "trace.json"
    assert main(["profile", f"127.0.0.1:{PORT}", "--steps", "120", "--output", str(target)]) == 0
    running.rounds(10)
    running.kill()
    captured = json.loads(target.read_text())
    traces.check(captured)
    pids = traces.processes(captured)
    steps = traces.spans(captured, pids["F rank 0 of 1"], "step")
    posts = traces.spans(captured, pids["Attention profiled rank 0"], "post")
    assert len(steps) == 120
    assert {step["args"]["layer"] for step in steps} == {0, 1, 2}
    assert {step["args"]["rows"] for step in steps} == {43, 21}, "chunks of 64 rows, two thirds the first"
    assert {(post["args"]["layer"], post["args"]["rows"]) for post in posts} == {
        (step["args"]["layer"], step["args"]["rows"]) for step in steps
    }
    errors_us = int(captured["otherData"]["clock_error_ns"]["F rank 0 of 1"]) / 1000
    parts = [part for part in traces.spans(captured, pids["F rank 0 of 1"], "step part") if part["name"] == "experts"]
    slack = 2 * errors_us + 10
    seen = 0
    for part in parts:
        if posts[0]["ts"] <= part["ts"] and part["ts"] + part["dur"] <= posts[-1]["ts"] + posts[-1]["dur"]:
            seen += 1
            assert any(
                post["ts"] - slack <= part["ts"] and part["ts"] + part["dur"] <= post["ts"] + post["dur"] + slack
                for post in posts
            ), part
    assert seen > 60
