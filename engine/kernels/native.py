"""Kernels of our own for a CPU (kernels.cpp), as operators that a graph can hold: built with g++ on first use, kept in
torch's compile cache."""

import ctypes
import functools
import hashlib
import os
import re
import subprocess
import tempfile
from pathlib import Path

import torch
from torch._inductor.runtime.cache_dir_utils import cache_dir

import utils

WIDTHS = (8, 16, 32, 48, 64, 80, 96, 128, 256)  # of a head, as in kernels.cpp
SOURCE = Path(__file__).with_name("kernels.cpp")  # with the headers beside it
TORCH = Path(torch.__file__).parent
FLAGS = [
    "-O3",
    "-march=native",
    "-mprefer-vector-width=512",
    "-ffast-math",
    "-std=c++20",
    "-fPIC",
    "-shared",
    "-fopenmp",
    "-DAT_PARALLEL_OPENMP=1",
    f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
]


@functools.cache
def load():
    """Make the operators `torch.ops.native`: linear, attend, stored, probabilities, pick, accept, accept_block.

    Raises OSError or CalledProcessError where no compiler can build them."""
    compiler = os.environ.get("CXX", "g++")
    target = subprocess.run([compiler, "-march=native", "-Q", "--help=target"], capture_output=True).stdout
    known = [part.read_bytes() for part in sorted(SOURCE.parent.glob("*.[ch]*"))]
    known += [target, repr(FLAGS).encode(), torch.__version__.encode()]
    path = Path(cache_dir()) / f"kernels-{hashlib.sha256(b''.join(known)).hexdigest()[:16]}.so"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, draft = tempfile.mkstemp(suffix=".so", dir=path.parent)
        os.close(handle)
        includes = [f"-I{TORCH / 'include'}", f"-I{TORCH / 'include/torch/csrc/api/include'}"]
        # torch's own OpenMP: a second one would start threads of its own.
        openmp = sorted((TORCH / "lib").glob("libgomp*"))[:1]
        links = ["-nodefaultlibs", *map(str, openmp), "-lmvec", "-lm", "-lstdc++", "-lc", "-lgcc_s"] if openmp else []
        links += [f"-L{TORCH / 'lib'}", "-ltorch_cpu", "-lc10"]
        subprocess.run([compiler, *FLAGS, *includes, "-o", draft, str(SOURCE), *links], check=True, capture_output=True)
        os.replace(draft, path)
    ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)  # graphs are libraries of their own, and call its C functions
    torch.ops.load_library(path)
    torch.set_flush_denormal(False)  # -ffast-math has a library switch it on, for the whole process
    if utils.kernels is None:
        for name, shape in SHAPES.items():
            torch.library.register_fake(f"native::{name}", shape)
    utils.kernels = torch.ops.native


class CFunctions(dict):
    """{operator: [how the C function of the same work is declared]}, read from the text of kernels.cpp. To a cache of
    compiled graphs it is that text: an operator itself cannot be pickled."""

    def __init__(self, text):
        self.text = text
        declared = re.finditer(r"^AOTITorchError aoti_torch_cpu_(\w+)\(.*?\)(?= {)", text, re.M | re.S)
        super().__init__({getattr(torch.ops.native, each[1]).default: [each[0]] for each in declared})

    def __reduce__(self):
        return CFunctions, (self.text,)


def attended(query, keys, values, positions, kept_keys, kept_values, scale):
    rows, heads, n, width = query.shape
    return query.new_empty(rows, n, heads, width)


SHAPES = {  # of the results, for a graph in the making
    "linear": lambda x, packed, bias, width, gelu=False: x.new_empty(*x.shape[:-1], width),
    "attend": attended,
    "stored": lambda x: torch.empty_like(x),
    "probabilities": lambda logits, settings: torch.empty_like(logits),
    "pick": lambda probs, u: torch.empty_like(u, dtype=torch.long),
}
