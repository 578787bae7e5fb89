"""Attention of a few tokens on a CPU, in C++ (attend.cpp): it reads a 16-bit cache as it is, only the slots filled, and
costs a third of what torch's takes. Built with g++ on first use and kept in torch's compile cache."""

import ctypes
import functools
import hashlib
import os
import subprocess
import tempfile
from pathlib import Path

import torch
from torch._inductor.runtime.cache_dir_utils import cache_dir

WIDTHS = (8, 16, 32, 48, 64, 80, 96, 128, 256)  # of a head, as in attend.cpp
SOURCE = Path(__file__).with_name("attend.cpp")
FLAGS = [
    "-O3",
    "-march=native",
    "-mprefer-vector-width=512",
    "-ffast-math",
    "-std=c++17",
    "-fPIC",
    "-shared",
    "-fopenmp",
]


@functools.cache
def library():
    """The compiled kernel; OSError or CalledProcessError where there is no compiler that can build it."""
    compiler = os.environ.get("CXX", "g++")
    target = subprocess.run([compiler, "-march=native", "-Q", "--help=target"], capture_output=True).stdout
    digest = hashlib.sha256(SOURCE.read_bytes() + target + torch.__version__.encode()).hexdigest()[:16]
    path = Path(cache_dir()) / f"attend-{digest}.so"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        # torch's own OpenMP: a second one would start threads of its own.
        openmp = sorted((Path(torch.__file__).parent / "lib").glob("libgomp*"))[:1]
        handle, draft = tempfile.mkstemp(suffix=".so", dir=path.parent)
        os.close(handle)
        links = ["-nodefaultlibs", *map(str, openmp), "-lmvec", "-lm", "-lstdc++", "-lc", "-lgcc_s"] if openmp else []
        subprocess.run([compiler, *FLAGS, "-o", draft, str(SOURCE), *links], check=True, capture_output=True)
        os.replace(draft, path)
    kernel = ctypes.CDLL(str(path)).attend_slots
    kernel.argtypes = [ctypes.c_void_p] * 5 + [ctypes.c_long] * 7 + [ctypes.c_float, ctypes.c_int]
    return kernel


def attend(query, keys, values, mask, scale):
    """query `[B, H, n, d]`, keys and values `[B, G, capacity, d]` (whole, contiguous), mask bool `[B, 1, n, reach]`;
    float32 `[B, n, H, d]`."""
    query, mask = query.float().contiguous(), mask.contiguous()
    rows, heads, n, width = query.shape
    out = query.new_empty(rows, n, heads, width)
    library()(
        query.data_ptr(),
        keys.data_ptr(),
        values.data_ptr(),
        mask.data_ptr(),
        out.data_ptr(),
        rows,
        heads,
        keys.shape[1],
        n,
        width,
        keys.shape[2],
        mask.shape[-1],
        scale,
        keys.dtype == torch.bfloat16,
    )
    return out


def shape(query, keys, values, mask, scale):
    rows, heads, n, width = query.shape
    return query.new_empty(rows, n, heads, width, dtype=torch.float32)


_library = torch.library.Library("slots", "DEF")
_library.define("attend(Tensor query, Tensor keys, Tensor values, Tensor mask, float scale) -> Tensor")
_library.impl("attend", attend, "CPU")
_library.impl("attend", shape, "Meta")
