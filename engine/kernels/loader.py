"""The build of the C++ kernels: compiled on first use, kept where torch keeps extensions, loaded as operators."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import itertools
import os
import platform
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from filelock import FileLock

FOLDER = Path(__file__).parent
TORCH = Path(torch.__file__).parent
FLAGS = ["-O3", "-ffast-math", "-std=c++20", "-fPIC"]
AVX512 = ["-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mfma"]
KINDS = {  # of processors, best first, with the flags that multiply.cpp is compiled with for them
    "amx": [*AVX512, "-mavx512bf16", "-mavx512vnni", "-mamx-tile", "-mamx-bf16"],
    "avx512bf16": [*AVX512, "-mavx512bf16", "-mavx512vnni"],
    "avx512vnni": [*AVX512, "-mavx512vnni"],
    "avx512": AVX512,
    "avx2": ["-mavx2", "-mfma"],
    "plain": [],
}


@functools.cache
def load() -> ctypes.CDLL:
    """Make the operators `torch.ops.native` that kernels.cpp defines.

    Returns the library. Linear layers use the best kernel of KINDS that the processor, the compiler and the operating
    system allow. Prints a line if that is not the best one of the processor. Raises OSError or CalledProcessError if
    no compiler can build the kernels.
    """
    compiler = os.environ.get("CXX", "g++")
    all_instructions = ("-march=native", "-mcpu=native", "-mprefer-vector-width=512")
    native = [flag for flag in all_instructions if accepts(compiler, [flag])]
    # The library's name has a hash of everything the build depends on.
    macros = subprocess.run([compiler, *native, "-E", "-dM", "-x", "c++", os.devnull], capture_output=True).stdout
    known = [part.read_bytes() for part in sorted(FOLDER.glob("*.[ch]*"))]
    known += [macros, repr(native).encode(), Path(__file__).read_bytes(), torch.__version__.encode()]
    path = cache_folder() / f"kernels-{hashlib.sha256(b''.join(known)).hexdigest()[:16]}.so"
    path.parent.mkdir(parents=True, exist_ok=True)
    if not is_complete(path):  # A complete one may be in a folder that this user cannot write.
        with FileLock(path.with_suffix(".lock")):  # Processes that start together build it once.
            if not is_complete(path):
                print("Building the kernels for this processor, once: this takes about a minute.", file=sys.stderr)
                build_library(compiler, native, path)
    kernels = typed(ctypes.CDLL(str(path)))
    torch.ops.load_library(path)
    for line in missing(kernels):
        print(line, file=sys.stderr)
    return kernels


def is_complete(path: Path) -> bool:
    """Whether a built library is complete: loading a truncated one kills the process."""
    try:
        return path.with_suffix(".sha256").read_text() == hashlib.sha256(path.read_bytes()).hexdigest()
    except (OSError, ValueError):
        return False


def cache_folder() -> Path:
    """Where built kernels are kept: the folder that torch uses for extensions."""
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get("TORCH_EXTENSIONS_DIR") or Path(home) / "torch_extensions")


def typed(dll: ctypes.CDLL) -> ctypes.CDLL:
    """The library, with the types of its C functions."""
    dll.use_kernel.restype, dll.processor_has.restype, dll.is_built.restype = ctypes.c_char_p, *[ctypes.c_bool] * 2
    return dll


def missing(dll: ctypes.CDLL) -> list[str]:
    """A line for each kind of kernel that the processor has and that is better than the best one available."""
    best, lines = dll.use_kernel(None).decode(), []
    for kind in itertools.takewhile(lambda kind: kind != best, KINDS):
        if dll.processor_has(kind.encode()):
            who = "operating system refuses" if dll.is_built(kind.encode()) else "compiler cannot build"
            lines.append(f"linear layers use the kernel {best}, because the {who} {kind}")
    return lines


def accepts(compiler: str, flags: list[str], text: str = "") -> bool:
    """Whether the compiler compiles `text` with these flags. Raises OSError if there is no such compiler."""
    command = [compiler, "-Werror", *flags, "-fsyntax-only", "-x", "c++", "-"]
    return not subprocess.run(command, input=text.encode(), capture_output=True).returncode


def build_library(compiler: str, native: list[str], path: Path) -> None:
    """Compile the kernels; the library appears at `path` when it is complete.

    multiply.cpp is compiled once for each of KINDS. A kind that the compiler cannot build is left out.
    """
    with tempfile.TemporaryDirectory(dir=path.parent) as folder, ThreadPoolExecutor() as pool:

        def compile_part(source: str, name: str, flags: list[str]) -> str:
            command = [compiler, *FLAGS, *flags, "-c", "-o", f"{folder}/{name}.o", str(FOLDER / source)]
            subprocess.run(command, check=True, capture_output=True)
            return f"{folder}/{name}.o"

        with_torch = [*native, *torch_flags(compiler)]
        main = [pool.submit(compile_part, f"{name}.cpp", name, with_torch) for name in ("decoder", "kernels")]
        of_kinds = {kind: [f"-DKIND=of_{kind}", f'-DNAME="{kind}"', *flags] for kind, flags in KINDS.items()}
        kinds = {kind: pool.submit(compile_part, "multiply.cpp", kind, flags) for kind, flags in of_kinds.items()}
        parts = [part.result() for part in main]
        for kind in [kind for kind, part in kinds.items() if part.exception()]:  # Beside the others, memory may end.
            again = kinds[kind] = pool.submit(compile_part, "multiply.cpp", kind, of_kinds[kind])
            if kind != "plain" and again.exception():
                del kinds[kind]
        listed = "".join(f" USE(of_{kind})" for kind in kinds)
        parts.append(compile_part("choose.cpp", "choose", [f"-DKINDS(USE)={listed}"]))
        parts += [part.result() for part in kinds.values()]
        # torch's own OpenMP library alone: a second one would start threads of its own.
        openmp, libraries = openmp_of_torch(), [f"-L{TORCH / 'lib'}", "-ltorch_cpu", "-lc10"]
        if openmp and sys.platform != "darwin":
            vector_functions = ["-lmvec"] if platform.machine() == "x86_64" else []
            openmp = ["-nodefaultlibs", *openmp, *vector_functions, "-lm", "-lstdc++", "-lc", "-lgcc_s"]
        draft = f"{folder}/{path.name}"
        command = [compiler, "-shared", "-o", draft, *parts, *openmp, *libraries]
        subprocess.run(command, check=True, capture_output=True)
        path.with_suffix(".sha256").write_text(hashlib.sha256(Path(draft).read_bytes()).hexdigest())
        os.replace(draft, path)


def torch_flags(compiler: str) -> list[str]:
    """The flags for a source that includes torch's headers. Without OpenMP its loops run on one thread."""
    openmp = ["-fopenmp"] if accepts(compiler, ["-fopenmp"], "#include <omp.h>") else []
    if "gomp" in "".join(openmp_of_torch()) and not accepts(compiler, [], "#ifdef __clang__\n#error\n#endif"):
        openmp = ["-DGNU_OPENMP"]  # team.h
    abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"
    includes = [f"-I{TORCH / 'include'}", f"-I{TORCH / 'include/torch/csrc/api/include'}"]
    return [*openmp, abi, *includes]


def openmp_of_torch() -> list[str]:
    """The OpenMP library that torch brings; empty if it brings none."""
    return list(map(str, [*(TORCH / "lib").glob("libgomp*"), *(TORCH / "lib").glob("lib?omp.dylib")]))[:1]
