"""`machine`: the processor and the library versions that a measurement was made with. Every run records them."""

import os
import platform
from typing import Any

import numpy
import torch
import transformers


def machine(device: str) -> dict[str, Any]:
    """The processor (on a GPU, the GPU), the threads, and the versions."""
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


def processor_name() -> str:
    """The name of the CPU: from Linux's /proc/cpuinfo, or what Python knows if there is none."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()
