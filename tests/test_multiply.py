"""Linear layers and attention with the kernel for each kind of processor, against PyTorch, and how one is chosen."""

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

from decoding.trees.tree import Tree
from engine.kernels import loader
from engine.kernels.packedLinear import SIDE, packed

pytestmark = pytest.mark.usefixtures("kernels")


@pytest.fixture(scope="module", params=loader.KINDS)
def kind(request, kernels):
    """Each kind of kernel in turn; those that cannot run here are skipped."""
    if loader.use(request.param) != request.param:
        pytest.skip(f"no {request.param} here")
    yield request.param
    loader.use()


def multiplied(x, weight, made=None):
    """x times a weight `[out, in]`, by the kernel."""
    return torch.ops.native.linear(x, packed(weight) if made is None else made, len(weight))


def close(found, x, weight):
    """Whether products are as near as float32 sums can be."""
    size = linear(x.double().abs(), weight.double().abs())
    return ((found.double() - linear(x.double(), weight.double())).abs() <= 1e-5 * size).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size, width", [(2, 1), (30, 33), (64, 64), (94, 40), (2560, 48)])
def test_a_linear_layer_of_every_width_of_1_to_64_tokens(kind, dtype, size, width):
    generator = torch.Generator().manual_seed(size)
    weight = torch.randn(width, size, generator=generator).to(dtype)
    for tokens in range(1, 65):
        x = torch.randn(tokens, size, generator=generator).to(dtype)
        found = multiplied(x, weight)
        assert found.dtype == torch.float32 and found.shape == (tokens, width) and close(found, x, weight), tokens


@settings(deadline=None)
@given(st.integers(1, 300), st.integers(1, 1500), st.integers(1, 70), st.booleans(), st.integers(0, 10**6))
def test_a_linear_layer_of_any_size(kind, tokens, half, width, short, seed):
    dtype, generator = torch.bfloat16 if short else torch.float32, torch.Generator().manual_seed(seed)
    weight = torch.randn(width, 2 * half, generator=generator).to(dtype)
    x = torch.randn(tokens, 2 * half, generator=generator).to(dtype)
    assert close(multiplied(x, weight), x, weight)


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
        weight = torch.randn(64, size).to(dtype)
        made = at_the_end_of_memory(packed(weight))
        for tokens in 1, 2, 16, 17, 40, 64:
            assert multiplied(torch.randn(tokens, size).to(dtype), weight, made).isfinite().all()


def test_a_wrong_sum_is_seen(kind):
    """The mistake that `close` is for: a product left out, of as many as there are."""
    weight, x = torch.randn(8, 1024), torch.randn(3, 1024)
    assert close(multiplied(x, weight), x, weight)
    wrong = weight.clone()
    wrong[:, 700] = 0
    assert not close(multiplied(x, wrong), x, weight)


def test_rows_are_packed_in_blocks_with_16_bit_numbers_in_pairs():
    weight = torch.arange(40 * 6.0).view(40, 6)
    for dtype, pair in (torch.float32, 1), (torch.bfloat16, 2):
        made = packed(weight.to(dtype))
        assert made.shape == (2, 6 // pair, SIDE, pair)
        for row, column in (0, 0), (31, 5), (32, 1), (39, 4):
            assert made[row // SIDE, column // pair, row % SIDE, column % pair] == weight.to(dtype)[row, column]
        assert not made[1, :, 8:].any()


# Attention.


def attended(queries, keys, values, at, root=None, ancestors=None):
    """Attention by torch, in float32; arguments and result are those of the operator `attend`, but for the scale."""
    slots = torch.arange(keys.shape[2])
    mask = slots <= at[..., None]
    if root is not None:
        after = slots - root[:, None]
        chosen = (ancestors[:, None] >> after.clamp(0, 62)[:, None]) & 1 > 0
        mask &= (after <= 0)[:, None] | chosen
    shared = queries.shape[2] // keys.shape[1]
    keys, values = (x.float().nan_to_num().repeat_interleave(shared, 1) for x in (keys, values))
    given = queries.float().transpose(1, 2), keys, values, mask[:, None]
    return scaled_dot_product_attention(*given).transpose(1, 2)


def states(dtype, size, rows, heads, groups, n, capacity, reach):
    """Queries, keys and values, of which those from `reach` on are nan, at the end of memory."""
    generator = torch.Generator().manual_seed(size)
    queries = 3 * torch.randn(rows, n, heads, size, generator=generator)
    kept = torch.randn(2, rows, groups, capacity, size, generator=generator)
    kept[:, :, :, reach:] = torch.nan
    return queries.to(dtype), *(at_the_end_of_memory(each.to(dtype)) for each in kept)


WIDTHS = [2, 6, 8, 16, 32, 48, 64, 80, 96, 128, 130, 160, 256]
ERRORS = {torch.float32: 2e-5, torch.bfloat16: 0.02}


@pytest.mark.parametrize("dtype", ERRORS)
@pytest.mark.parametrize("size", WIDTHS)
def test_attention_of_few_and_many_tokens_is_torchs(kind, dtype, size):
    """In rows of different lengths, at positions in order and in none, where heads share keys and where they do not."""
    generator = torch.Generator().manual_seed(size)
    for n in 1, 2, 3, 4, 5, 6, 9, 11, 12, 13, 16, 37, 65:
        for rows, heads, groups, before, free in (1, 2, 2, 0, 0), (2, 4, 2, 64, 7), (3, 3, 1, 21, 0):
            reach = before + n
            at = torch.arange(n) + torch.tensor([before, before // 2, 0])[:rows, None]
            if n % 2:
                at[-1] = torch.randperm(reach, generator=generator)[:n]
            at[0, 0] = reach - 1  # `reach` is what is read.
            given = *states(dtype, size, rows, heads, groups, n, reach + free, reach), at
            found = torch.ops.native.attend(*given, None, None, size**-0.5)
            assert found.dtype == dtype
            torch.testing.assert_close(found.float(), attended(*given), atol=ERRORS[dtype], rtol=ERRORS[dtype])


@pytest.mark.parametrize("dtype", ERRORS)
@pytest.mark.parametrize("size", [6, 48, 256])
@pytest.mark.parametrize("tree", ["2", "3/2,1,0/1,2,0", "2,2,2", "62", "2,2,2,2,2"])
def test_nodes_of_a_tree_attend_to_their_ancestors(kind, dtype, size, tree):
    tree, root = Tree.of(tree), torch.tensor([0, 31, 80])
    every, ancestors = torch.arange(tree.size + 1), torch.tensor(tree.ancestors)
    for nodes in every, torch.tensor(tree.levels[1]), torch.tensor(tree.levels[-1]):
        at = root[:, None] + nodes
        given = *states(dtype, size, 3, 4, 2, len(nodes), 150, int(at.max()) + 1), at, root
        found = torch.ops.native.attend(*given, ancestors[nodes], size**-0.5)
        wanted = attended(*given, ancestors[nodes])
        torch.testing.assert_close(found.float(), wanted, atol=ERRORS[dtype], rtol=ERRORS[dtype])


@pytest.mark.parametrize("n", [4, 20])
def test_wrong_attention_is_seen(kind, n):
    """By the comparison above: a slot too many or too few, another group, an ancestor, the scale."""
    at, tree = torch.arange(n)[None] + 9, (torch.tensor([9]), torch.tensor([1 | 1 << i for i in range(n)]))
    queries, keys, values = states(torch.float32, 48, 1, 4, 2, n, 40, 40)

    def right(found, *places):
        wanted = attended(queries, keys, values, at, *places)
        return torch.allclose(found, wanted, atol=2e-5, rtol=2e-5)

    attend, scale = torch.ops.native.attend, 48**-0.5
    assert right(attend(queries, keys, values, at, None, None, scale))
    assert right(attend(queries, keys, values, at, *tree, scale), *tree)
    for wrong in (at - 1, keys, values), (at + 1, keys, values), (at, keys.flip(1), values), (at, keys, values.flip(1)):
        assert not right(attend(queries, *wrong[1:], wrong[0], None, None, scale))
    assert not right(attend(queries, keys, values, at, None, None, 0.9 * scale))
    for root, masks in (tree[0] - 1, tree[1]), (tree[0], tree[1] | 2), (None, None):
        assert not right(attend(queries, keys, values, at, root, masks, scale), *tree)


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
        ("most_codes", ctypes.c_long),
        ("part_floats", ctypes.c_long),
        ("part_bf16", ctypes.c_long),
        ("floats", ctypes.CFUNCTYPE(None, ctypes.POINTER(Job))),
        ("bf16s", ctypes.CFUNCTYPE(None, ctypes.POINTER(Job))),
        ("codes", ctypes.c_void_p),
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
        block = at_the_end_of_memory(packed(weight))
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
    for name in "kernels.cpp", "decoder.cpp":
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
