"""The build of the C++ kernels: compiled on first use, kept in torch's compile cache, loaded as operators that a graph
can hold."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import re
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from torch._inductor.runtime.cache_dir_utils import cache_dir

HEAD_WIDTHS = (8, 16, 32, 48, 64, 80, 96, 128, 256)  # as in attention.h
SOURCE = Path(__file__).with_name("kernels.cpp")  # It includes the headers beside it.
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
def load() -> None:
    """Make the operators `torch.ops.native`: linear, attend, stored, probabilities, pick, accept, accept_block.

    Raises OSError or CalledProcessError if no compiler can build them.
    """
    compiler = os.environ.get("CXX", "g++")
    path = library(compiler)
    if not path.exists():
        build(compiler, path)
    ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)  # Graphs are libraries of their own that call its C functions.
    torch.ops.load_library(path)
    torch.set_flush_denormal(False)  # A library built with -ffast-math switches it on, for the whole process.
    register_shapes()


def library(compiler: str) -> Path:
    """The file of the built library. Its name has a hash of everything the build depends on."""
    target = subprocess.run([compiler, "-march=native", "-Q", "--help=target"], capture_output=True).stdout
    known = [part.read_bytes() for part in sorted(SOURCE.parent.glob("*.[ch]*"))]
    known += [target, repr(FLAGS).encode(), torch.__version__.encode()]
    return Path(cache_dir()) / f"kernels-{hashlib.sha256(b''.join(known)).hexdigest()[:16]}.so"


def build(compiler: str, path: Path) -> None:
    """Compile the kernels; the library appears at `path` when it is complete."""
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


@functools.cache
def register_shapes() -> None:
    """Tell torch the shapes of the operators' results, which it needs to trace a graph."""
    for name, shape in SHAPES.items():
        torch.library.register_fake(f"native::{name}", shape)


class CFunctions(dict):
    """{operator: [declaration of its C function]}, read from the text of kernels.cpp.

    An operator cannot be pickled. For torch's cache of compiled graphs, this table is the text it was read from.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        declared = re.finditer(r"^AOTITorchError aoti_torch_cpu_(\w+)\(.*?\)(?= {)", text, re.M | re.S)
        super().__init__({getattr(torch.ops.native, each[1]).default: [each[0]] for each in declared})

    def __reduce__(self) -> tuple[type[CFunctions], tuple[str]]:
        return CFunctions, (self.text,)


def attended(
    query: Tensor, keys: Tensor, values: Tensor, positions: Tensor, kept_keys: Tensor, kept_values: Tensor, scale: float
) -> Tensor:
    """The shape of `attend`'s result."""
    rows, heads, n, width = query.shape
    return query.new_empty(rows, n, heads, width)


SHAPES: dict[str, Callable[..., Tensor]] = {
    "linear": lambda x, packed, bias, width, gelu=False: x.new_empty(*x.shape[:-1], width),
    "attend": attended,
    "stored": lambda x: torch.empty_like(x),
    "probabilities": lambda logits, settings: torch.empty_like(logits),
    "pick": lambda probs, u: torch.empty_like(u, dtype=torch.long),
}
