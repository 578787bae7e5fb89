"""The kernel of linear layers for each kind of processor, against PyTorch in float64, and how one is chosen."""

import ctypes
import mmap
import platform
import shutil
import subprocess

import pytest
import torch
from conftest import ROOT
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import linear, scaled_dot_product_attention

from engine.kernels import loader
from engine.kernels.packedLinear import PackedLinear

SIDE = 32


pytestmark = pytest.mark.usefixtures("kernels")


@pytest.fixture(scope="module", params=loader.KINDS)
def kind(request, kernels):
    """Each kind of kernel in turn; those that cannot run here are skipped."""
    if loader.use(request.param) != request.param:
        pytest.skip(f"no {request.param} here")
    yield request.param
    loader.use()


def close(found, wanted, x, weight, dtype):
    """Whether products are as near as float32 sums, rounded to `dtype`, can be."""
    size = linear(x.double().abs(), weight.double().abs())
    return ((found.double() - wanted).abs() <= 1e-5 * size + (2**-8 * wanted.abs() if dtype.itemsize == 2 else 0)).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size, width", [(2, 1), (30, 33), (64, 64), (94, 40), (2560, 48)])
def test_a_linear_layer_of_every_width_of_1_to_64_tokens(kind, dtype, size, width):
    generator = torch.Generator().manual_seed(size)
    weight = torch.randn(width, size, generator=generator).to(dtype)
    bias = torch.randn(width, generator=generator).to(dtype)
    layer = PackedLinear(weight, bias)
    for tokens in range(1, 65):
        x = torch.randn(tokens, size, generator=generator).to(dtype)
        assert close(layer(x), linear(x.double(), weight.double(), bias.double()), x, weight, dtype), tokens


@settings(deadline=None)
@given(st.integers(1, 300), st.integers(1, 1500), st.integers(1, 70), st.booleans(), st.integers(0, 10**6))
def test_a_linear_layer_of_any_size(kind, tokens, half, width, short, seed):
    dtype, generator = torch.bfloat16 if short else torch.float32, torch.Generator().manual_seed(seed)
    weight = torch.randn(width, 2 * half, generator=generator).to(dtype)
    x = torch.randn(tokens, 2 * half, generator=generator).to(dtype)
    assert close(PackedLinear(weight, None)(x), linear(x.double(), weight.double()), x, weight, dtype)


def at_the_end_of_memory(tensor):
    """A copy of a tensor, behind which reading is a fault."""
    room = -(-tensor.nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
    memory = mmap.mmap(-1, room + mmap.PAGESIZE)
    copy = torch.frombuffer(memory, dtype=tensor.dtype, count=tensor.numel(), offset=room - tensor.nbytes)
    behind = copy.data_ptr() + copy.nbytes
    assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(behind), ctypes.c_size_t(mmap.PAGESIZE), 0) == 0
    return copy.copy_(tensor.flatten()).view(tensor.shape)


@pytest.mark.parametrize("size", [32, 62, 96, 2080])
def test_nothing_behind_a_weight_is_read(kind, size):
    for dtype in torch.float32, torch.bfloat16:
        layer = PackedLinear(torch.randn(64, size).to(dtype), None)
        layer.packed = at_the_end_of_memory(layer.packed)
        for tokens in 1, 2, 16, 17, 40, 64:
            assert layer(torch.randn(tokens, size).to(dtype)).isfinite().all()


def test_a_wrong_sum_is_seen(kind):
    """The mistake that `close` is for: a product left out, of as many as there are."""
    weight, x = torch.randn(8, 1024), torch.randn(3, 1024)
    wanted = linear(x.double(), weight.double())
    assert close(PackedLinear(weight, None)(x), wanted, x, weight, torch.float32)
    weight[:, 700] = 0
    assert not close(PackedLinear(weight, None)(x), wanted, x, weight, torch.float32)


@pytest.mark.parametrize("size", loader.HEAD_WIDTHS)
@pytest.mark.parametrize("dtype, error", [(torch.float32, 2e-5), (torch.bfloat16, 0.02)])
@pytest.mark.parametrize("heads, groups, tokens, before", [(2, 2, 16, 0), (3, 1, 37, 21), (4, 2, 65, 64)])
def test_attention_over_a_chunk_is_torchs(kind, dtype, error, size, heads, groups, tokens, before):
    """In rows of different lengths, from slots that hold stale numbers behind the last position."""
    generator, rows, reach = torch.Generator().manual_seed(size), 2, before + tokens

    def states(heads):
        return torch.randn(rows, heads, tokens, size, generator=generator).to(dtype)

    query, new = 3 * states(heads), (states(groups), states(groups))
    kept = [torch.randn(rows, groups, reach + 9, size, generator=generator).to(dtype) for _ in range(2)]
    positions = torch.arange(tokens) + torch.tensor([[before], [before // 2]])
    wanted = [each.clone() for each in kept]
    for row in range(rows):
        for whole, states_of in zip(wanted, new):
            whole[row, :, positions[row]] = states_of[row]
    found = torch.ops.native.attend(query, *new, positions, *kept, size**-0.5).transpose(1, 2)
    assert all(torch.equal(a, b) for a, b in zip(kept, wanted))
    keys, values = (whole[:, :, :reach].float().repeat_interleave(heads // groups, 1) for whole in wanted)
    mask = torch.arange(reach) <= positions[:, None, :, None]
    expected = scaled_dot_product_attention(query.float(), keys, values, mask)
    torch.testing.assert_close(found.float(), expected, atol=error, rtol=error)


class Job(ctypes.Structure):
    """`Job` of multiply.h."""

    _fields_ = [
        ("tokens", ctypes.c_long),
        ("x", ctypes.c_void_p),
        ("stride", ctypes.c_long),
        ("block", ctypes.c_void_p),
        ("size", ctypes.c_long),
        ("sums", ctypes.c_void_p),
        ("apart", ctypes.c_long),
        ("add", ctypes.c_bool),
        ("ahead", ctypes.c_long),
        ("pace", ctypes.c_long),
        ("lines", ctypes.c_int),
    ]


class Multiply(ctypes.Structure):
    """`Multiply` of multiply.h."""

    _fields_ = [
        ("name", ctypes.c_char_p),
        ("most_floats", ctypes.c_long),
        ("most_bf16", ctypes.c_long),
        ("part_floats", ctypes.c_long),
        ("part_bf16", ctypes.c_long),
        ("floats", ctypes.CFUNCTYPE(None, ctypes.POINTER(Job))),
        ("bf16s", ctypes.CFUNCTYPE(None, ctypes.POINTER(Job))),
        ("done", ctypes.CFUNCTYPE(None)),
    ]


@pytest.fixture(scope="module")
def tiles(tmp_path_factory):
    """The kernel for AMX, on tiles made of software."""
    if platform.machine() != "x86_64":
        pytest.skip("AMX is an extension of x86")
    made = tmp_path_factory.mktemp("tiles") / "tiles.so"
    source, software = loader.FOLDER / "multiply.cpp", ROOT / "tests" / "softwareTiles.h"
    named = ["-DKIND=of_amx", '-DNAME="amx"', "-D__AMX_BF16__", "-include", software]
    subprocess.run(["g++", *loader.FLAGS, *named, "-shared", "-o", made, source], check=True)
    library = ctypes.CDLL(str(made))
    torch.set_flush_denormal(False)  # As the loader does.
    return Multiply.in_dll(library, "of_amx")


@pytest.mark.parametrize("size", [2, 30, 32, 62, 64, 100, 160])
@pytest.mark.parametrize("add", [False, True])
def test_amx_tiles_multiply_as_they_should(tiles, size, add):
    """At every number of tokens of a job. Numbers beyond those that it may read are nan."""
    generator = torch.Generator().manual_seed(size)
    for tokens in range(1, tiles.most_bf16 + 1):
        weight = torch.randn(SIDE, size, generator=generator).bfloat16()
        block = at_the_end_of_memory(PackedLinear(weight, None).packed)
        x = torch.full((tokens + 20, size + 6), torch.nan).bfloat16()
        x[:tokens, :size] = torch.randn(tokens, size, generator=generator)
        sums = torch.full((tokens + 20, SIDE + 8), 7.0)
        job = Job(tokens, x.data_ptr(), size + 6, block.data_ptr(), size, sums.data_ptr(), SIDE + 8, add, 0, 128, 2)
        tiles.bf16s(ctypes.byref(job))
        wanted = linear(x[:tokens, :size].float(), weight.float()) + 7 * add
        torch.testing.assert_close(sums[:tokens, :SIDE], wanted, atol=1e-4, rtol=1e-4)
        sums[:tokens, :SIDE] = 7
        assert (sums == 7).all()
    tiles.done()


@pytest.fixture
def parts(tmp_path, monkeypatch):
    """`loader.build` of all but the operators of torch, which take long to compile."""
    for name in "multiply.h", "multiply.cpp", "choose.cpp":
        shutil.copy(loader.FOLDER / name, tmp_path)
    for name in "kernels.cpp", "attention.cpp":
        (tmp_path / name).write_text("")
    monkeypatch.setattr(loader, "FOLDER", tmp_path)

    def build(kinds):
        monkeypatch.setattr(loader, "KINDS", kinds)
        path = tmp_path / f"{len(list(tmp_path.iterdir()))}.so"
        loader.build("g++", [], path)
        library = loader.typed(ctypes.CDLL(str(path)))
        torch.set_flush_denormal(False)  # As the loader does.
        return library

    return build


def test_what_a_compiler_cannot_build_is_left_out_with_a_line(parts):
    """As one that is too old for the flags."""
    best = loader.use()
    if best == "plain":
        pytest.skip("there is nothing better than the plain kernel here")
    flags = loader.KINDS[best]
    made = parts({best: ["-mno-such-flag"], "plain": []})
    assert made.use_kernel(None) == b"plain"
    assert loader.missing(made) == [f"linear layers use the kernel plain, because the compiler cannot build {best}"]
    made = parts({best: flags, "plain": []})
    assert made.use_kernel(None).decode() == best and not loader.missing(made)


def test_what_the_operating_system_refuses_is_left_out_with_a_line(parts, monkeypatch):
    """On a processor with AMX, one that another kernel of this machine plays."""
    text = (loader.FOLDER / "choose.cpp").read_text()
    pretended = text.replace('if (is("plain"))', 'if (is("plain") || is("amx"))')
    pretended = pretended.replace("return !syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, TILE_DATA);", "return false;")
    assert pretended.count("return false;") > text.count("return false;")
    (loader.FOLDER / "choose.cpp").write_text(pretended)
    made = parts({"amx": [], "plain": []})
    assert made.use_kernel(None) == b"plain"
    assert loader.missing(made) == ["linear layers use the kernel plain, because the operating system refuses amx"]


def test_a_kind_that_is_not_there_changes_nothing():
    best = loader.use()
    assert loader.use("no such kind") == best == loader.use()
