"""What a measurement was made on, recorded with every run; and a stopwatch that does not make the host wait."""

import os
import platform
import time

import numpy
import torch
import transformers


def machine(device):
    """Processor (the GPU's name on a GPU), threads and versions."""
    return {"processor": torch.cuda.get_device_name(device) if device.startswith("cuda") else processor_name(),
            "cores": os.cpu_count(), "threads": torch.get_num_threads(), "system": platform.platform(),
            "python": platform.python_version(), "torch": torch.__version__, "transformers": transformers.__version__,
            "numpy": numpy.__version__, "cuda": torch.version.cuda}


def processor_name():
    """The CPU's name as Linux tells it; elsewhere what Python knows."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


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
