"""The loop of linear layers for each kind of processor, and how one is chosen. (Whole models: test_cpuModel.py.)"""

import ctypes
import hashlib
import mmap
import platform
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from conftest import ROOT
from helpers import at_the_end_of_memory, random_codes, use_kernel
from torch.nn.functional import linear

from engine.kernels import loader, packedLinear
from engine.kernels.packedLinear import HUGE, SIDE, on_huge_pages, packed, packed_codes
from engine.quantised import BITS, GROUP

pytestmark = pytest.mark.usefixtures("kernels")


def structure(title, /, **fields):
    """A structure of multiply.h."""
    return type(title, (ctypes.Structure,), {"_fields_": list(fields.items())})


NUMBER, POINTER = ctypes.c_long, ctypes.c_void_p
Job = structure(
    "Job", tokens=NUMBER, x=POINTER, stride=NUMBER, block=POINTER, size=NUMBER, sums=POINTER, apart=NUMBER,
    add=ctypes.c_bool, ahead=NUMBER, pace=NUMBER, lines=ctypes.c_int,
)  # fmt: skip
CodesJob = structure(
    "CodesJob", tokens=NUMBER, x=POINTER, groups=POINTER, block=POINTER, count=NUMBER, bits=NUMBER, sums=POINTER,
)  # fmt: skip
LOOP, CODES_LOOP = (ctypes.CFUNCTYPE(None, ctypes.POINTER(kind)) for kind in (Job, CodesJob))
Multiply = structure(
    "Multiply", name=ctypes.c_char_p, most_floats=NUMBER, most_bf16=NUMBER, most_codes=NUMBER, part_floats=NUMBER,
    part_bf16=NUMBER, floats=LOOP, bf16s=LOOP, codes=CODES_LOOP, done=ctypes.CFUNCTYPE(None),
)  # fmt: skip


@pytest.fixture(scope="module", params=[*loader.KINDS, "tiles"])
def multiply(request, kernels, tmp_path_factory):
    """The `Multiply` of each kind of processor that runs here, and that for AMX on tiles made of software."""
    if request.param != "tiles":
        used = use_kernel(request.param)
        use_kernel()
        if used != request.param:
            pytest.skip(f"no {request.param} here")
        return Multiply.in_dll(loader.load(), f"of_{used}")
    if platform.machine() != "x86_64":
        pytest.skip("AMX is an extension of x86")
    made = tmp_path_factory.mktemp("tiles") / "tiles.so"
    source, software = loader.FOLDER / "multiply.cpp", ROOT / "tests" / "softwareTiles.h"
    named = ["-DKIND=of_amx", '-DNAME="amx"', "-D__AMX_BF16__", "-include", software]
    subprocess.run(["g++", *loader.FLAGS, *named, "-shared", "-o", made, source], check=True)
    library = ctypes.CDLL(str(made))
    torch.set_flush_denormal(False)  # As the loader does.
    return Multiply.in_dll(library, "of_amx")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [2, 30, 33, 62, 64, 100, 2080])
def test_a_block_is_multiplied_by_any_number_of_tokens(multiply, dtype, size):
    """Of a job. Numbers beside those that it may read are nan, and reading behind the block is a fault."""
    short = dtype == torch.bfloat16  # Their numbers lie in pairs.
    size -= short and size % 2
    run, most = (multiply.bf16s, multiply.most_bf16) if short else (multiply.floats, multiply.most_floats)
    generator = torch.Generator().manual_seed(size)
    for tokens in range(1, most + 1):
        weight, add = torch.randn(SIDE, size, generator=generator).to(dtype), bool(tokens & 2)
        block = at_the_end_of_memory(packed(weight))
        x = torch.full((tokens + 20, size + 6), torch.nan).to(dtype)
        x[:tokens, :size] = torch.randn(tokens, size, generator=generator)
        sums = torch.full((tokens + 20, SIDE + 8), 7.0)
        job = Job(tokens, x.data_ptr(), size + 6, block.data_ptr(), size, sums.data_ptr(), SIDE + 8, add, 0, 128, 2)
        run(ctypes.byref(job))
        found, x = sums[:tokens, :SIDE].double() - 7 * add, x[:tokens, :size].double()
        wrong = weight.double()
        wrong[:, size // 2] = 0  # The mistake that the comparison is for: a product left out.
        error, bound = (found - linear(x, weight.double())).abs(), 1e-5 * (linear(x.abs(), weight.double().abs()) + 7)
        assert (error <= bound).all() and not ((found - linear(x, wrong)).abs() <= bound).all()
        sums[:tokens, :SIDE] = 7
        assert (sums == 7).all()
    multiply.done()


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("groups", [1, 3, 80])
def test_a_block_of_few_bits_is_multiplied_by_any_number_of_tokens(multiply, bits, groups):
    weight = random_codes(SIDE, size := groups * GROUP, bits)
    weight.codes[:, :GROUP] = 2**bits - 1  # Where x is 127 or -127 too, sums in 16 bits are closest to overflow.
    right = at_the_end_of_memory(packed_codes(*weight))
    wrong = right.clone()
    # A bit of a weight, the highest beyond 4 bits.
    wrong[0, 0, 64 + (4 < bits < 8) * 4 * 128] ^= 128 if bits == 8 else 1
    generator = torch.Generator().manual_seed(size)
    for tokens in range(1, multiply.most_codes + 1):
        x = torch.randint(-127, 128, (tokens, size), dtype=torch.int8, generator=generator)
        x[:, :GROUP] = 127 * (-1) ** tokens
        scales = torch.rand(tokens, groups, generator=generator)
        in_groups = x.unflatten(1, (groups, GROUP))
        scaled, of_x = (in_groups * scales[..., None]).flatten(1).double(), in_groups.sum(-1, dtype=torch.int32)
        side_by_side = in_groups.transpose(0, 1).contiguous()  # [groups, tokens, GROUP]
        starts = (-of_x << (bits - 1)).view(torch.float32)
        scales_and_starts = torch.stack([scales, starts], -1).transpose(0, 1).contiguous()  # [groups, tokens, 2]
        for block in right, wrong:
            sums = torch.full((tokens + 1, SIDE), 7.0)
            inputs = (each.data_ptr() for each in (side_by_side, scales_and_starts, block))
            job = CodesJob(tokens, *inputs, groups, bits, sums.data_ptr())
            multiply.codes(ctypes.byref(job))
            error = (sums[:tokens] - linear(scaled, weight.weight().double())).abs()
            bound = 1e-6 * linear(scaled.abs(), weight.weight().double().abs())
            assert (error <= bound).all() == (block is right) and (sums[tokens:] == 7).all()


@pytest.fixture
def parts(tmp_path, monkeypatch):
    """`loader.build` of all but the operators of torch, which take long to compile."""
    for name in "multiply.h", "multiply.cpp", "choose.cpp":
        shutil.copy(loader.FOLDER / name, tmp_path)
    for name in "kernels.cpp", "decoder.cpp":
        (tmp_path / name).write_text("")
    monkeypatch.setattr(loader, "FOLDER", tmp_path)
    monkeypatch.setattr(loader, "FLAGS", ["-O0", "-std=c++20", "-fPIC"])

    def build(kinds):
        monkeypatch.setattr(loader, "KINDS", kinds)
        path = tmp_path / f"{len(list(tmp_path.iterdir()))}.so"
        loader.build_library("g++", [], path)
        assert loader.is_complete(path)
        return loader.typed(ctypes.CDLL(str(path)))

    return build


def test_what_a_compiler_cannot_build_is_left_out_with_a_line(parts):
    """As one that is too old for the flags. A kind that is not there changes nothing."""
    best = use_kernel()
    assert use_kernel("no such kind") == best == use_kernel()
    if best == "plain":
        pytest.skip("there is nothing better than the plain kernel here")
    assert not any(f"compiler cannot build {best}" in line for line in loader.missing(loader.load()))
    made = parts({best: ["-mno-such-flag"], "plain": []})
    assert made.use_kernel(None) == b"plain"
    assert loader.missing(made) == [f"linear layers use the kernel plain, because the compiler cannot build {best}"]


def test_what_the_operating_system_refuses_is_left_out_with_a_line(parts):
    """On a processor with AMX, one that another kernel of this machine plays."""
    text = (loader.FOLDER / "choose.cpp").read_text()
    pretended = text.replace('if (is("plain"))', 'if (is("plain") || is("amx"))')
    pretended = pretended.replace("return !syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, TILE_DATA);", "return false;")
    assert pretended.count("return false;") > text.count("return false;")
    (loader.FOLDER / "choose.cpp").write_text(pretended)
    made = parts({"amx": [], "plain": []})
    assert made.use_kernel(None) == b"plain"
    assert loader.missing(made) == ["linear layers use the kernel plain, because the operating system refuses amx"]


def test_a_library_that_was_cut_short_is_not_complete(tmp_path):
    library, digest = tmp_path / "kernels.so", tmp_path / "kernels.sha256"
    library.write_bytes(b"library")
    assert not loader.is_complete(library)
    digest.write_text(hashlib.sha256(b"library").hexdigest())
    assert loader.is_complete(library)
    library.write_bytes(b"lib")
    assert not loader.is_complete(library)


# Memory on huge pages.

MODE = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def is_advised(tensor):
    """Whether the kernel was asked for huge pages for the mapping that holds the tensor's middle (`hg` of VmFlags)."""
    middle = tensor.data_ptr() + tensor.nbytes // 2
    for mapping in re.split(r"(?m)^(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text())[1:]:
        low, high = (int(each, 16) for each in mapping.split()[0].split("-"))
        if low <= middle < high:
            return " hg" in mapping
    raise AssertionError("the tensor is in no mapping")


@pytest.mark.skipif(
    sys.platform != "linux" or not MODE.exists() or "[madvise]" not in MODE.read_text(),
    reason="no huge pages to ask for",
)
def test_packed_weights_are_on_huge_pages(monkeypatch):
    monkeypatch.setattr(packedLinear._piece, "rest", torch.empty(0, dtype=torch.uint8))  # Its end is on small pages.
    # Not of torch, whose memory may be a part of the heap that was advised for weights freed since.
    fresh = mmap.mmap(-1, 16 * HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    plain, small = torch.frombuffer(fresh, dtype=torch.uint8), on_huge_pages([3, 5], torch.float32)
    large = on_huge_pages([16, HUGE], torch.bfloat16)
    assert is_advised(large.fill_(1)) and is_advised(small.fill_(1)) and not is_advised(plain)


def test_packed_weights_have_memory_of_their_own():
    """They are asked for by several threads, in inference mode and outside."""
    sizes = (0,), (3, 5), (HUGE + 1,), (2, 7), (2, HUGE)

    def tensors(number):
        with torch.inference_mode(number % 2 == 0):
            return [on_huge_pages(size, dtype) for size in sizes for dtype in (torch.uint8, torch.float32)]

    with ThreadPoolExecutor(4) as pool:
        every = [tensor for tensors in pool.map(tensors, range(4)) for tensor in tensors]
    for number, tensor in enumerate(every):
        tensor.fill_(number)
    assert all((tensor == number).all() for number, tensor in enumerate(every))
    assert [tensor.shape for tensor in every[::2]] == [*sizes] * 4
