"""`Watch`: a stopwatch that does not synchronise the host with the device."""

import time

import torch


class Watch:
    """Laps of work on a device, the last of which ends with a host sync. On a GPU, CUDA events record when the laps
    before it ended: no lap makes the host wait."""

    def __init__(self, device: torch.device | str) -> None:
        self.on_gpu = torch.device(device).type == "cuda"
        self.events: list[torch.cuda.Event] = []
        self.times = [time.perf_counter()]
        if self.on_gpu:
            self.mark()

    def mark(self) -> None:
        """End a lap."""
        if self.on_gpu:
            self.events.append(torch.cuda.Event(enable_timing=True))
            self.events[-1].record()
        else:
            self.times.append(time.perf_counter())

    def seconds(self) -> list[float]:
        """Seconds of each lap; the last one ends now, after the host has read a result of it."""
        times = [*self.times, time.perf_counter()]
        laps = [a.elapsed_time(b) / 1000 for a, b in zip(self.events, self.events[1:])]
        return [*laps, times[-1] - times[0] - sum(laps)] if self.on_gpu else [b - a for a, b in zip(times, times[1:])]
