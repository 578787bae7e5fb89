"""`Watch`: a stopwatch that does not synchronise the host with the device."""

import time

import torch


class Watch:
    """Laps of work on a device. On a GPU, CUDA events record the times; the host reads them after the sync that a round
    has anyway."""

    def __init__(self, device: torch.device | str) -> None:
        self.on_gpu = torch.device(device).type == "cuda"
        self.events: list[torch.cuda.Event] = []
        self.times: list[float] = []
        self.mark()

    def mark(self) -> None:
        """End a lap."""
        if self.on_gpu:
            self.events.append(torch.cuda.Event(enable_timing=True))
            self.events[-1].record()
        else:
            self.times.append(time.perf_counter())

    def seconds(self) -> list[float]:
        """Seconds of each lap; the last one ends now."""
        self.mark()
        if self.on_gpu:
            self.events[-1].synchronize()
            return [a.elapsed_time(b) / 1000 for a, b in zip(self.events, self.events[1:])]
        return [b - a for a, b in zip(self.times, self.times[1:])]
