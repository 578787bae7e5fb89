"""Triton's kernel of filters and draws: in Triton's interpreter, if Triton is installed; with TRITON_INTERPRET=0 on a
GPU."""

import importlib.metadata
import importlib.util
import math
import os

import pytest
import torch

from utils import GREEDY, Sampling, pick, probabilities

DEVICE = "cpu" if os.environ["TRITON_INTERPRET"] == "1" else "cuda"  # conftest.py


def reason_without_triton():
    """Why Triton's kernel cannot run here, or ""."""
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    of = [tuple(map(int, importlib.metadata.version(name).split(".")[:2])) for name in ("triton", "numpy")]
    is_old = DEVICE == "cpu" and of[0] < (3, 7) and of[1] >= (2, 4)
    return "the interpreter of this Triton needs an older numpy" if is_old else ""


needs_triton = pytest.mark.skipif(bool(reason_without_triton()), reason=reason_without_triton())

SAMPLINGS = [
    Sampling(1.0, 0, 1.0),
    Sampling(0.85, 0, 0.9),
    Sampling(0.7, 5, 1.0),
    Sampling(1.7, 40, 0.5),
    Sampling(0.3, 1, 0.99),
    Sampling(1.0, 10**6, 0.01),
    GREEDY,
]


def logits_of(size):
    """Of all kinds: any, with ties, with many, two values, equal, one-hot, some impossible, zeros of both signs."""
    x = torch.randn(9, size, generator=torch.Generator().manual_seed(size))
    x[1] = x[1].bfloat16().float()
    x[2] = (x[2] * 2).round() / 2
    x[3] = (x[3] > 1).float() * 3
    x[4] = 0
    x[5, size // 3] = 200
    x[6, 1:] = torch.where(x[6, 1:] > 0.5, x[6, 1:] * 3, -math.inf)
    x[7] = torch.where(x[7] > 0, 0.0, -0.0)
    return x


@needs_triton
@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("size, block", [(61, 16), (1000, 1 << 14)])
def test_the_kernel_agrees_with_the_formulas(monkeypatch, sampling, size, block):
    """Distributions, what the filters keep, and draws, at both ends of u too; a row whole or in parts."""
    from engine import cudaKernels

    monkeypatch.setattr(cudaKernels, "BLOCK", block)
    logits, u = logits_of(size), torch.rand(9, generator=torch.Generator().manual_seed(0))
    u[:2], wanted = torch.tensor([0, 1 - 2**-24]), probabilities(logits, sampling)
    tokens, probs = (x.cpu() for x in cudaKernels.sample(logits.to(DEVICE), sampling, u.to(DEVICE)))
    assert torch.equal(probs > 0, wanted > 0) and torch.equal(tokens, pick(wanted, u))
    torch.testing.assert_close(probs, wanted, rtol=1e-5, atol=1e-8)


@needs_triton
@pytest.mark.parametrize("sampling", [Sampling(0.85, 5, 0.9), Sampling(1.0, 0, 1.0), GREEDY])
@pytest.mark.parametrize("fault", [math.nan, math.inf])
def test_the_kernel_reports_logits_that_are_not_finite(sampling, fault):
    from engine import cudaKernels

    logits = torch.randn(2, 3, 61)
    logits[0, 1, 7], logits[1, 2] = fault, -math.inf
    tokens, probs = (x.cpu() for x in cudaKernels.sample(logits.to(DEVICE), sampling, torch.rand(2, 3).to(DEVICE)))
    bad = torch.tensor([[False, True, False], [False, False, True]])
    assert torch.equal(probs.isnan().all(-1), bad) and torch.equal(tokens == 61, bad)
    assert torch.equal(probs[~bad] > 0, probabilities(logits, sampling)[~bad] > 0)


@needs_triton
def test_the_kernel_reads_rows_that_are_apart():
    from engine import cudaKernels

    logits, u = torch.randn(3, 2, 70)[:, -1, :61], torch.rand(3)
    sampling = Sampling(0.85, 0, 0.9)
    tokens = cudaKernels.sample(logits.to(DEVICE), sampling, u.to(DEVICE))[0].cpu()
    assert torch.equal(tokens, pick(probabilities(logits, sampling), u))
