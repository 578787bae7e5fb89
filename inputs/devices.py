"""Devices: which one to use, in which dtype, and how much memory is free on it."""

import re

import psutil
import torch

from inputs.hub import one_line
from utils import UserError


def pick_device(name=None):
    """'cuda' where there is one, else 'cpu'; or the one asked for, if it can be had: no other kind of device is
    synchronised where time is taken."""
    if name is None:
        return "cuda" if torch.cuda.is_available() else "cpu"
    if name == "auto":  # it is `load_model` that may spread a model from there
        return pick_device()
    if not re.fullmatch("cpu|cuda(:[0-9]{1,3})?", name):
        raise UserError(f"device {name!r} cannot be used: use --device cpu, cuda, cuda:1 and so on, or auto")
    if name != "cpu" and not torch.cuda.is_available():
        raise UserError(
            "CUDA was asked for, but torch finds no CUDA device; use --device cpu, or install a CUDA build "
            "of torch and a driver"
        )
    try:
        torch.zeros(1, device=name)
    except (RuntimeError, AssertionError) as error:
        raise UserError(f"device {name!r} cannot be used ({one_line(error)}); use --device cpu") from None
    return name


def pick_dtype(device):
    """The dtype weights are kept in unless one is named: bfloat16 where the device computes in it, else float32."""
    if device.startswith("cuda"):
        return "bfloat16" if torch.cuda.is_bf16_supported() else "float16"
    # Other x86 processors can do bfloat16 too, but only by converting to float32 and back.
    native = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return "bfloat16" if native else "float32"


def available_memory(device):
    """Free bytes on a device."""
    return torch.cuda.mem_get_info(device)[0] if device.startswith("cuda") else psutil.virtual_memory().available


def all_devices():
    """Every GPU, and the processor."""
    return [*(f"cuda:{i}" for i in range(torch.cuda.device_count())), "cpu"]
