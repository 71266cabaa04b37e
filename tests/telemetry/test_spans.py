"""A recorder of spans: as many as were asked for, since it was asked."""

import pytest

from ffn_faas.telemetry.spans import MOST, Recorder


def test_a_recorder_keeps_what_was_asked_for_and_no_more():
    recorder = Recorder()
    recorder.add("early")
    assert recorder.take() == []
    recorder.start(2)
    for one in ("a", "b", "c"):
        recorder.add(one)
    assert (recorder.count(), recorder.active) == (2, False)
    assert recorder.take() == ["a", "b"]
    assert recorder.take() == []
    recorder.start(2)
    recorder.add("d")
    recorder.start(2)
    assert recorder.take() == [], "a new order forgets the old one"
    for limit in (0, MOST + 1):
        with pytest.raises(ValueError, match=f"1 to {MOST} spans"):
            recorder.start(limit)
