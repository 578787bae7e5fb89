"""The kernels of sampling and verification give the same numbers as the PyTorch code that they replace. (For those of
linear layers and attention see test_multiply.py, for whole models test_cpuModel.py.)"""

import os
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from decoding.tree import Tree
from decoding.treeRules import top_down_rule, traversal_rule
from decoding.verification import block_rule, token_rule
from engine.cachedModel import CachedModel
from engine.cpuModel import CpuModel
from engine.kernels import loader
from utils import GREEDY, Sampling, pick

# What these models make of logits does not depend on their weights.
PYTORCH, KERNELS = CachedModel.__new__(CachedModel), CpuModel.__new__(CpuModel)

pytestmark = pytest.mark.usefixtures("kernels")


def both(work):
    """What `work(model)` returns with the kernels, and with the functions of utils.py and verification.py."""
    return work(KERNELS), work(PYTORCH)


SAMPLINGS = (Sampling(), Sampling(1.0, 0, 1.0), Sampling(0.7, 50, 0.95), Sampling(1.3, 7, 1.0), Sampling(0.2), GREEDY)


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("shape", [(1, 61), (5, 4096), (2, 3, 700), (3, 50304)])
def test_probabilities(sampling, shape):
    generator = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(shape, generator=generator)
    logits[..., 5] = -torch.inf
    found, wanted = both(lambda model: model.probabilities(logits, sampling))
    torch.testing.assert_close(found, wanted, atol=1e-6, rtol=1e-5)
    assert torch.equal(found > 0, wanted > 0)


@settings(deadline=None)
@given(st.integers(0, 10**6), st.integers(2, 200), st.sampled_from(SAMPLINGS))
def test_probabilities_with_ties(seed, size, sampling):
    """Few different values: tokens as probable as the last one kept are kept too."""
    logits = torch.randint(0, 4, (2, size), generator=torch.Generator().manual_seed(seed)).float()
    result, wanted = both(
        lambda model: model.probabilities(logits, Sampling(sampling.temperature, sampling.top_k, 1.0))
    )
    torch.testing.assert_close(result, wanted, atol=1e-6, rtol=1e-5)
    result, _ = both(lambda model: model.probabilities(logits, sampling))
    for row, value in ((r, v) for r in range(2) for v in logits[r].unique()):
        assert sampling == GREEDY or result[row][logits[row] == value].unique().numel() == 1


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_what_is_no_number_is_not_hidden(sampling):
    logits = torch.randn(4, 100)
    logits[1, 3], logits[2, 3], logits[3] = torch.nan, torch.inf, -torch.inf
    for p in both(lambda model: model.probabilities(logits, sampling)):
        assert p[0].isfinite().all() and p[1:].isnan().all()


@pytest.mark.parametrize("size", [1, 7, 64, 65, 4096])
def test_pick(size):
    generator = torch.Generator().manual_seed(0)
    p = torch.rand(500, size, generator=generator) * (torch.rand(500, size, generator=generator) < 0.4)
    p[:, -1] += p.sum(-1) == 0
    u = torch.rand(500, generator=generator)
    u[:3] = torch.tensor([0.0, 1 - 2**-24, 0.5])
    found, wanted = both(lambda model: model.pick(p, u))
    assert (found == wanted).float().mean() > 0.99  # If u falls on a border, rounding decides.
    assert (p.gather(1, found[:, None]) > 0).all()


TREES = [Tree.of(shape) for shape in ("1,1,1", "3", "2,2", "3,2,1", "3/2,1,0", "2/1,2/0,3,1")]
RULES = [(rule, Tree.chain(gamma)) for rule in (token_rule, block_rule) for gamma in range(5)]
RULES += [(rule, tree) for rule in (traversal_rule, top_down_rule) for tree in TREES]


@settings(deadline=None, max_examples=150)
@given(st.sampled_from(RULES), st.integers(0, 10**6), st.integers(2, 40))
def test_the_rules(case, seed, size):
    (rule, tree), generator = case, torch.Generator().manual_seed(seed)
    p = torch.rand(4, tree.size + 1, size, generator=generator) ** 8
    p = p / p.sum(-1, keepdim=True)
    drafts, q = torch.empty(4, tree.size, dtype=torch.long), torch.empty(4, tree.size, size)
    for children in filter(None, tree.children):
        law = torch.rand(4, 1, size, generator=generator) ** 3 * (torch.rand(4, 1, size, generator=generator) < 0.8)
        law[:, :, 0] += law.sum(-1) == 0
        law = (law + 3 * p[:, tree.parents[children[0] - 1], None]) / (law.sum(-1, keepdim=True) + 3)
        u = torch.rand(4, 1, len(children), generator=generator)
        at = [child - 1 for child in children]
        drafts[:, at], q[:, at] = PYTORCH.siblings(law, u, (len(children),))
    q[1, tree.size // 2 :] = 0  # This row has fewer guesses than the others.
    of_chains = rule in (token_rule, block_rule)
    if of_chains:
        p[1, tree.size // 2 + 1 :] = 0  # Beyond them, nothing was computed.
        p[2, : tree.size] = q[2]
    u = torch.rand(4, tree.size + 1, generator=generator)
    assert KERNELS.rule(rule) is not rule
    found, wanted = both(lambda model: model.rule(rule)(p, q, drafts, u, *([] if of_chains else [tree])))
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(found, wanted))


@pytest.mark.parametrize("counts", [(3,), (1, 1), (2, 0, 4)])
def test_siblings(counts):
    generator = torch.Generator().manual_seed(0)
    q = torch.rand(50, len(counts), 700, generator=generator) ** 4
    q[:10] *= torch.rand(10, len(counts), 700, generator=generator) < 0.003  # About two tokens are left.
    q[..., 5] += q.sum(-1) == 0
    q = q / q.sum(-1, keepdim=True)
    q[20, -1] = torch.nan
    u = torch.rand(50, len(counts), 4, generator=generator)
    found, wanted = both(lambda model: model.siblings(q, u, counts))
    same = (found[0] == wanted[0]).all(1)
    assert same.float().mean() > 0.97  # If u falls on a border, rounding decides.
    torch.testing.assert_close(found[1][same], wanted[1][same], equal_nan=True)
    assert found[0].shape == (50, sum(counts)) and found[0][20, -1] == 700


@pytest.mark.parametrize("size", [61, 700])
def test_from_nan_comes_no_token(size):
    """If p is nan, the token is V, after the guesses before it. A guess from a q of nan is never accepted: the target
    draws the token there."""
    generator = torch.Generator().manual_seed(0)
    p = torch.rand(3, 4, size, generator=generator).softmax(-1)
    q = p[:, :3].clone()  # Every guess would be accepted.
    drafts = pick(q, torch.rand(q.shape[:-1], generator=generator))
    p[0, 2], q[1, 1] = torch.nan, torch.nan
    u = torch.rand(3, 4, generator=generator)
    for accepted, token in both(lambda model: model.rule(token_rule)(p, q, drafts, u)):
        assert accepted.tolist() == [2, 1, 3] and token[0] == size and (token[1:] < size).all()
    # The block rule looks a place ahead.
    for accepted, token in both(lambda model: model.rule(block_rule)(p, q, drafts, u)):
        assert accepted.tolist() == [1, 0, 3] and (token < size).all()
    for accepted, token in both(lambda model: model.rule(block_rule)(p[:, 2:], q[:, 2:], drafts[:, 2:], u[:, 2:])):
        assert accepted[0] == 0 and token[0] == size
    for token in both(lambda model: model.pick(p[0, 1:3], torch.tensor([0.5, 0.5]))):
        assert token[0] < size and token[1] == size
    for wrong in -1, size:
        for verify in token_rule, block_rule:
            with pytest.raises(IndexError, match=f"there is no token {wrong} to verify"):
                KERNELS.rule(verify)(p, q, drafts.index_fill(1, torch.tensor([0]), wrong), u)
    p, q = torch.full((3, 5, 4), 0.25), torch.full((3, 4, 4), 0.25)
    p[0], p[1, 1], q[2, 0] = torch.nan, torch.nan, torch.nan
    in_tree = p, q, torch.arange(4).expand(3, 4), torch.full((3, 5), 0.5), Tree.of("2/1,1")
    for rule in traversal_rule, top_down_rule:
        for accepted, path, token in both(lambda model: model.rule(rule)(*in_tree)):
            assert accepted.tolist() == [0, 1, 2] and path.tolist() == [[0, 0], [1, 0], [2, 4]]
            assert token.tolist()[:2] == [4, 4] and token[2] < 4


def test_the_smallest_numbers_stay_what_they_are():
    """A library that is linked with -ffast-math makes the whole process flush denormal numbers to 0: the kernels are
    only compiled with it."""
    assert 5e-324 * float("1") > 0 and bool(torch.tensor(1e-45) > 0)


TOGETHER = r"""
#include "team.h"
#include <chrono>
#include <cstdio>
int main(int words, char**) {
    // A thread is late at the barriers of a function. In the first function all work for longer than the other waits.
    if (words == 3) {
        for (long call = 0; call < 37; call++)
            together(true, [&](const Member& member) {
                if (!member.number) std::printf("%ld ", member.of);
                for (long k = 0; call < 2 && k < Crew::STALLS; k++) {
                    long work = call == 0 ? 80 : 0, late = member.number ? 40 : 0;
                    std::this_thread::sleep_for(std::chrono::milliseconds(work + late));
                    member.wait();
                }
            });
        return 0;
    }
    if (words == 4) {  // Four threads always stall, two never.
        Crew crew;
        for (long call = 0; call < 230; call++) {
            const long of = crew.size(4);
            if (of == 4) std::printf("%ld ", call);
            crew.ran(of, 4, of == 4 ? Crew::STALLS : 0, 51, 100);
        }
        std::printf("%ld ", crew.size(1));
        return 0;
    }
    const long rounds = 60, count = 1003;
    static std::atomic<long> seen[count], in_pairs[count], reached[64], early, members;
    together(words != 2, [&](const Member& member) {
        auto [first, last] = member.part(count);
        for (long i = first; i < last; i++) seen[i]++;
        auto [even, end] = member.part(count, 2);
        for (long i = even; i < end; i++) in_pairs[i] += even % 2 ? 100 : 1;
        members++;
        for (long round = 1; round <= rounds; round++) {
            reached[member.number] = round;
            if (words != 5) member.wait();
            for (long k = 0; k < member.of; k++) early += reached[k] < round;
            if (words != 5) member.wait();
        }
    });
    long once = 0;
    for (long i = 0; i < count; i++) once += seen[i] == 1 && in_pairs[i] == 1;
    std::printf("%ld %ld %ld", once, long(members), long(early));
}
"""


@pytest.fixture
def together(tmp_path):
    """A function that compiles the program above with some flags and runs it with three threads, then with one that is
    alone: the numbers of which each thread had its part, how many threads there were, and how often one went on before
    the others had come. Then with two, of which one is late: how many threads run each of 37 functions. Then, when four
    that always stall are tried again, and how many run where there is one. Last with three that do not wait."""
    compiler, source = os.environ.get("CXX", "g++"), tmp_path / "together.cpp"
    source.write_text(TOGETHER)

    def run(*flags, programs=3):
        command = [compiler, "-std=c++20", "-O1", f"-I{loader.FOLDER}", str(source), *flags]
        subprocess.run([*command, "-o", str(tmp_path / "together")], check=True)
        said = []
        for line in ["3", "3 alone", "2 with stalls", "1 of a crew", "3 of which none waits"][:programs]:
            threads, *words = line.split()
            environment = os.environ | {"OMP_NUM_THREADS": threads}
            said.append([*map(int, subprocess.check_output([tmp_path / "together", *words], env=environment).split())])
        return said

    return run


@pytest.mark.skipif(sys.platform != "linux" or os.cpu_count() == 1, reason="GNU's OpenMP library, and two cores")
def test_threads_of_torch_run_together_without_pragmas(together):
    (library,) = loader.openmp_of_torch()
    flags = ["-DGNU_OPENMP", library, f"-Wl,-rpath,{loader.TORCH / 'lib'}"]
    *parts, late, crew, (_, members, early) = together(*flags, programs=5)
    assert parts == [[1003, 3, 0], [1003, 1, 0]] and late[:35] == [2, 2, *[1] * 32, 2]
    assert crew == [0, 33, 98, 227, 1]  # after 32, 64 and 128 functions of two
    assert members == 3 and early > 0  # The mistake that the check is for.


def test_threads_run_together_with_openmp_and_one_thread_without(together):
    if loader.accepts(os.environ.get("CXX", "g++"), ["-fopenmp"], "#include <omp.h>"):
        *parts, late = together("-fopenmp")
        assert parts == [[1003, 3, 0], [1003, 1, 0]] and (late[:35] == [2, 2, *[1] * 32, 2] or os.cpu_count() == 1)
    assert together() == [*[[1003, 1, 0]] * 2, [1] * 37]


def test_what_a_compiler_has_of_openmp(monkeypatch):
    monkeypatch.setattr(loader, "openmp_of_torch", lambda: ["/lib/libgomp.so"])
    for name, kinds in {"clang": ["-DGNU_OPENMP"], "gcc": ["-fopenmp"]}.items():
        monkeypatch.setattr(loader, "accepts", lambda _, flags, text="", name=name: bool(flags) or name == "gcc")
        assert [flag for flag in loader.torch_flags(name) if "OPENMP" in flag.upper()] == kinds
    monkeypatch.setattr(loader, "openmp_of_torch", lambda: ["/lib/libomp.dylib"])
    monkeypatch.setattr(loader, "accepts", lambda _, flags, text="": bool(flags))
    assert "-fopenmp" in loader.torch_flags("clang")
