"""`Watch`: a stopwatch that does not synchronise the host with the device."""

import time
from typing import Any

import torch


class Watch:
    """Laps of work on a device, the last of which ends with a host sync. On a GPU, events record when the laps before
    it ended: no lap makes the host wait."""

    def __init__(self, device: torch.device | str) -> None:
        modules: dict[str, Any] = {"cuda": torch.cuda, "mps": torch.mps.event}
        self.gpu = modules.get(torch.device(device).type)
        self.events: list[Any] = []
        self.times = [time.perf_counter()]
        if self.gpu:
            self.mark()

    def mark(self) -> None:
        """End a lap."""
        if self.gpu:
            self.events.append(self.gpu.Event(enable_timing=True))
            self.events[-1].record()
        else:
            self.times.append(time.perf_counter())

    def seconds(self) -> list[float]:
        """Seconds of each lap; the last one ends now, after the host has read a result of it."""
        times = [*self.times, time.perf_counter()]
        laps = [a.elapsed_time(b) / 1000 for a, b in zip(self.events, self.events[1:])]
        return [*laps, times[-1] - times[0] - sum(laps)] if self.gpu else [b - a for a, b in zip(times, times[1:])]
