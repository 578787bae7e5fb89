"""Devices: which one is used, in which dtype, and how much memory is free on it."""

import gc
import re
import shutil
import sys
from contextlib import suppress
from pathlib import Path

import psutil
import torch

from inputs.commandLine import one_line
from utils import UserError

CONTAINER = Path("/sys/fs/cgroup")  # where a container sees the limits of its control group


def pick_device(name: str | None = None) -> str:
    """The device to use: `name`, or CUDA if there is a GPU, else the CPU. A GPU with a number becomes torch's current
    one. Raises UserError for a kind of device with which the clock cannot synchronise."""
    if name in (None, "auto"):  # With "auto", `load_model` may spread a model over several devices.
        name = "cuda" if torch.cuda.is_available() else "cpu"
        if name == "cpu" and shutil.which("nvidia-smi"):
            why = f"torch {torch.__version__} cannot use this computer's NVIDIA GPU; see docs/troubleshooting.md"
            print(f"The CPU is used: {why}", file=sys.stderr)
    check_device(name)
    if name.startswith("cuda:"):
        torch.cuda.set_device(name)  # Streams and events are made on the current device.
    return name


def check_device(name: str) -> None:
    """Raise UserError unless torch can compute on the device `name`."""
    if not re.fullmatch("cpu|mps|cuda(:[0-9]{1,3})?", name):
        raise UserError(f"device {name!r} cannot be used: use --device cpu, cuda, cuda:1 and so on, mps, or auto")
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise UserError(
            "CUDA was requested, but torch finds no CUDA device; use --device cpu, or install a CUDA build "
            "of torch and a driver"
        )
    try:
        torch.ones(1, device=name).add_(1)  # A kernel: torch may have none for this GPU.
    except (RuntimeError, AssertionError) as error:
        raise UserError(f"device {name!r} cannot be used ({one_line(error)}); use cpu") from None


def pick_dtype(device: str, by_kernels: bool = False) -> str:
    """The default dtype of weights: bfloat16 if the device computes in it, else float16 on a GPU and float32 on a
    CPU. by_kernels: a CPU's layers are computed by our kernels, which read half the bytes in bfloat16 on any CPU."""
    if device == "mps":
        return "float16"
    if device.startswith("cuda"):
        # Older GPUs emulate bfloat16, slowly.
        return "bfloat16" if torch.cuda.is_bf16_supported(including_emulation=False) else "float16"
    # Other x86 processors compute in bfloat16 only by converting to float32 and back.
    native = by_kernels or torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return "bfloat16" if native else "float32"


def available_memory(device: str) -> int:
    """Free bytes on a device, with what torch keeps of tensors that are gone."""
    if not device.startswith("cuda"):
        free = psutil.virtual_memory().available  # of the computer; a container may have less
        with suppress(OSError, ValueError):  # Without a limit there is no such file, or it says "max".
            limit, used = (int((CONTAINER / f"memory.{name}").read_text()) for name in ("max", "current"))
            held = dict(line.split() for line in (CONTAINER / "memory.stat").read_text().splitlines())
            free = min(free, limit - used + int(held["inactive_file"]))  # The cache of files makes room.
        return free
    gc.collect()
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info(device)[0]
