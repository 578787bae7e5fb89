"""What a measurement was made on: recorded with every run."""

import os
import platform

import numpy
import torch
import transformers


def machine(device):
    """Processor (the GPU's name on a GPU), threads and versions."""
    return {
        "processor": torch.cuda.get_device_name(device) if device.startswith("cuda") else processor_name(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "system": platform.platform(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "numpy": numpy.__version__,
        "cuda": torch.version.cuda,
    }


def processor_name():
    """The CPU's name as Linux tells it; elsewhere what Python knows."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()
