"""What a GPU computes by fewer kernels: forwards that torch.compile joins, and Triton's kernel of filters and draws.

The kernel runs in Triton's interpreter, if Triton is installed; with TRITON_INTERPRET=0 on a GPU.
"""

import importlib.metadata
import importlib.util
import math
import os
import sys

import helpers
import pytest
import softwareCuda
import torch
from test_specSampling import PROMPTS, near
from torch._dynamo.exc import FailOnRecompileLimitHit
from torch._dynamo.testing import CompileCounterWithBackend

from engine.compiling import compiled
from engine.cudaModel import CudaModel
from methods.drafters import ModelDrafter
from regrSampling import regrSampling
from specSampling import specSampling
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

# torch.compile.


@pytest.fixture
def gpu():
    with softwareCuda.machine() as machine:
        yield machine


def captured(model):
    model.model.to("cuda")
    return compiled(type(model)(model.model, model.vocabulary, model.name))


@pytest.mark.parametrize(
    "backend", ["eager", pytest.param("inductor", marks=pytest.mark.skipif(not helpers.FULL, reason="FULL=1"))]
)
@torch.inference_mode()
def test_a_forward_compiles_without_breaks(backend):
    """On a CPU. The shapes of rounds, and a new KV cache, are symbols in the end: they need few compilations."""
    torch._dynamo.reset()  # Compilations for other tests count against its limit.
    counter = CompileCounterWithBackend(backend)
    eager, model = helpers.tiny(), helpers.tiny()
    model.network = lambda tokens: torch.compile(model.model, fullgraph=True, backend=counter)
    tokens = torch.tensor([[5, 9, 2, 11, 30, 7, 1]])
    for capacity in 64, 128:
        for each in eager, model:
            each.reads_filled = False  # as on a GPU
            each.reserve(1, capacity)
        for first, n in (0, 7), (7, 1), (8, 5), (9, 2), (11, 3), (14, 4), (18, 1):
            positions = torch.arange(first, first + n)[None]
            wanted, found = (each.forward(tokens[:, :n], positions) for each in (eager, model))
            torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)
    assert counter.frame_count < 9


def test_a_step_is_captured_with_its_compiled_forward(gpu, monkeypatch):
    """Short blocks are; a prompt is not. The text is the CPU's, and what was written twice counts once."""
    widths = []

    def compile(model, fullgraph):
        assert fullgraph

        def fused(**inputs):
            widths.append(inputs["input_ids"].shape[1])
            return model(**inputs)

        return fused

    monkeypatch.setattr(torch, "compile", compile)
    target, draft = captured(helpers.tiny()), captured(near(helpers.tiny(), noise=0.1))
    text = specSampling(PROMPTS[:1], target, ModelDrafter(draft), 30, 4, GREEDY)[0]
    assert text == regrSampling(PROMPTS[:1], helpers.tiny(), 30, GREEDY)[0]
    assert {1, 2, 5} <= set(widths) <= {1, 2, 3, 4, 5} and gpu.captures == len(target.graphs) + len(draft.graphs)
    before = len(widths)
    specSampling(PROMPTS[:1], target, ModelDrafter(draft), 30, 4, GREEDY)
    assert len(widths) == before  # Replays compute no Python.


def fails_with(error):
    def compiled(model, fullgraph):
        def fails(**inputs):
            raise error("no such\noperator")

        return fails

    return compiled


def computes_something_else(model, fullgraph):
    """The planted mistake of a compiler."""
    return lambda input_ids, **inputs: model(input_ids=input_ids * 0, **inputs)


@pytest.mark.parametrize(
    "compiler, reason",
    [
        (fails_with(RuntimeError), "no such operator"),
        (fails_with(FailOnRecompileLimitHit), "no such operator"),
        (computes_something_else, "compiled, it computes something else"),
    ],
)
def test_a_model_that_cannot_be_compiled_is_captured_as_it_is(gpu, monkeypatch, capsys, compiler, reason):
    """One line names the model, the step and the reason."""
    monkeypatch.setattr(torch, "compile", compiler)
    target = captured(helpers.tiny())
    text = regrSampling(PROMPTS[:1], target, 30, GREEDY)[0]
    assert text == regrSampling(PROMPTS[:1], helpers.tiny(), 30, GREEDY)[0]
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"{target.name}: the step draw") and line.endswith(f"torch.compile ({reason})")
    assert target.graphs and not target.refused


def test_a_kernel_that_fails_is_replaced_by_the_formulas(gpu, monkeypatch, capsys):
    monkeypatch.setattr(CudaModel, "has_kernel", True)
    monkeypatch.setitem(sys.modules, "engine.cudaKernels", None)  # as if Triton could not be imported
    target = captured(helpers.tiny())
    text = regrSampling(PROMPTS[:1], target, 30, GREEDY)[0]
    assert text == regrSampling(PROMPTS[:1], helpers.tiny(), 30, GREEDY)[0]
    (line,) = capsys.readouterr().err.splitlines()
    assert "without Triton's kernel" in line and not CudaModel.has_kernel and target.graphs


def test_one_mask_serves_all_layers(gpu):
    """Numbers in the model's dtype, aligned: CUDA's attention makes none in any layer."""
    target = captured(helpers.tiny(layers=3))
    regrSampling(PROMPTS[:1], target, 30, GREEDY)
    for graph in target.graphs.values():
        calls = [args for op, args, *_ in graph.graph.tape if "scaled_dot_product_attention" in str(op)]
        assert len(calls) == 3 and len({args[3].data_ptr() for args in calls}) == 1
        assert calls[0][3].dtype == torch.float32 and calls[0][3].shape[-1] % 64 == 0


# Triton's kernel.

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
