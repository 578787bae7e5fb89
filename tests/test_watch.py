"""The stopwatch."""

import time

from decoding.watch import Watch


def test_laps_are_those_of_the_clock(monkeypatch):
    clock = iter([10.0, 10.5, 12.5])
    monkeypatch.setattr(time, "perf_counter", lambda: next(clock))
    watch = Watch("cpu")
    watch.mark()
    assert watch.seconds() == [0.5, 2.0]
