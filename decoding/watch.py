"""A stopwatch that does not make the host wait."""

import time

import torch


class Watch:
    """Laps of work on a device. On a GPU the device notes the times, and the host asks for them when it has waited for
    the work anyway."""

    def __init__(self, device):
        self.on_gpu = torch.device(device).type == "cuda"
        self.marks = []
        self.mark()

    def mark(self):
        """A lap ends."""
        if self.on_gpu:
            self.marks.append(torch.cuda.Event(enable_timing=True))
            self.marks[-1].record()
        else:
            self.marks.append(time.perf_counter())

    def seconds(self):
        """Seconds of each lap, the last one ending now."""
        self.mark()
        if self.on_gpu:
            self.marks[-1].synchronize()
            return [a.elapsed_time(b) / 1000 for a, b in zip(self.marks, self.marks[1:])]
        return [b - a for a, b in zip(self.marks, self.marks[1:])]
