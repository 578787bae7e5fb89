"""Probabilities, drawing, the residual."""

import math

import pytest
import torch
from conftest import refused
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare
from transformers import RepetitionPenaltyLogitsProcessor, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

import utils
from utils import Sampling, nucleus, pick, probabilities, residual, seen_after


def by_transformers(logits, sampling, text):
    """Their processors, in the same order; where equal logits stand at the edge of top-k or top-p, the tokens that they
    drop by the order of a sort and that are as probable as the last they keep come back, as ours does it."""
    flat = logits.reshape(-1, logits.shape[-1])
    if sampling.repetition_penalty != 1:
        flat = RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty)(text, flat.clone())
    flat = TemperatureLogitsWarper(sampling.temperature)(text, flat)
    warpers = [TopKLogitsWarper(sampling.top_k)] if sampling.top_k else []
    for warper in warpers + ([TopPLogitsWarper(sampling.top_p)] if sampling.top_p < 1 else []):
        kept = warper(text, flat.clone())
        flat = flat.masked_fill(flat < kept.masked_fill(kept.isinf(), torch.inf).amin(-1, keepdim=True), -torch.inf)
    return flat.softmax(-1).view(logits.shape)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    st.builds(
        Sampling,
        st.floats(0.1, 5),
        st.one_of(st.just(0), st.integers(1, 80)),
        st.one_of(st.just(1.0), st.floats(0.05, 0.98)),
        st.one_of(st.just(1.0), st.floats(0.5, 2)),
    ),
    st.sampled_from(["random", "flat", "tied", "long-tailed"]),
    st.sampled_from([2, 61, 300, 5000]),
    st.sampled_from([(1,), (5,), (2, 3), (70,)]),  # 70 * 300 are enough for candidates to be picked before sorting
    st.integers(0, 10**6),
)
def test_any_transforms_are_those_of_transformers(sampling, shape, vocabulary, lead, seed):
    torch.manual_seed(seed)
    logits = SHAPES[shape](*lead, vocabulary)
    text = torch.randint(0, vocabulary, (math.prod(lead), 20))
    seen = torch.zeros(len(text), vocabulary, dtype=torch.bool).scatter_(1, text, True).view(logits.shape)
    got, wanted = probabilities(logits, sampling, seen), by_transformers(logits, sampling, text)
    torch.testing.assert_close(got, wanted, atol=1e-6, rtol=1e-4)


def by_full_sort(probs, top_p):
    """Which tokens a nucleus keeps, by sorting everything."""
    ordered = probs.sort(-1, descending=True).values
    completes = (ordered.cumsum(-1) < top_p).sum(-1, keepdim=True).clamp(max=probs.shape[-1] - 1)
    return (probs >= ordered.gather(-1, completes)) & (probs > 0)


SHAPES = {
    "random": lambda *size: 3 * torch.randn(size),
    "flat": lambda *size: 0.1 * torch.randn(size),
    "peaked": lambda *size: 30 * torch.randn(size),
    "uniform": torch.zeros,
    "tied": lambda *size: torch.randint(0, 4, size) * 2.5,
    "long-tailed": lambda *size: -1.1 * torch.rand(size).argsort(-1).add(1.0).log(),
    "mixed": lambda *size: torch.randn(size) * torch.logspace(-2, 2, size[0]).view(-1, *[1] * (len(size) - 1)),
}


@settings(max_examples=150, deadline=None)
@given(
    st.sampled_from(list(SHAPES)),
    st.sampled_from([1, 2, 61, 4096, 50257, 50304]),
    st.sampled_from([(1,), (5,), (2, 3)]),
    st.one_of(st.sampled_from([1e-6, 0.9, 0.95, 0.999, 1 - 1e-6, 1 - 2**-24, 1 - 1e-12]), st.floats(1e-6, 0.99999)),
    st.integers(0, 10**6),
)
def test_a_nucleus_keeps_what_a_full_sort_keeps(shape, vocabulary, lead, top_p, seed):
    torch.manual_seed(seed)
    probs = SHAPES[shape](*lead, vocabulary).softmax(-1)
    before, kept = probs.clone(), nucleus(probs, top_p)
    wanted = by_full_sort(probs, top_p)
    assert torch.equal(kept > 0, wanted) and torch.equal(probs, before) and kept.shape == probs.shape
    alone = probs * wanted
    torch.testing.assert_close(kept, alone / alone.sum(-1, keepdim=True), atol=0, rtol=1e-5)


def test_most_nuclei_are_found_without_sorting_everything(monkeypatch):
    """Those a language model has: else this is slow at a vocabulary of 50,304, not wrong."""
    torch.manual_seed(0)
    least_kept, sizes = utils.least_kept, []
    monkeypatch.setattr(utils, "least_kept", lambda kept, top_p: sizes.append(len(kept)) or least_kept(kept, top_p))
    nucleus(SHAPES["long-tailed"](5, 50304).div(0.85).softmax(-1), 0.9)
    assert max(sizes) < 20_000


def test_by_hand():
    """Greedy is one-hot, equally probable tokens stay or go together, and a nucleus is never empty."""
    assert probabilities(torch.tensor([[1.0, 3.0, 2.0]]), Sampling(temperature=0)).tolist() == [[0, 1, 0]]
    assert nucleus(torch.tensor([[0.4, 0.2, 0.2, 0.2]]), 0.5)[0].tolist() == pytest.approx([0.4, 0.2, 0.2, 0.2])
    assert nucleus(torch.tensor([[0.6, 0.4]]), 1e-300).tolist() == [[1, 0]]


def test_tokens_follow_the_distribution_and_none_has_probability_zero():
    p = torch.tensor([0.0, 0.5, 0.0, 0.125, 0.3, 0.075, 0.0])
    tokens = pick(p.expand(4, 50_000, -1), torch.rand(4, 50_000, generator=torch.Generator().manual_seed(0)))
    assert tokens.shape == (4, 50_000)
    counts = torch.bincount(tokens.flatten(), minlength=7)
    assert counts[p == 0].sum() == 0
    wanted = p[p > 0].double()
    assert chisquare(counts[p > 0], wanted / wanted.sum() * 200_000).pvalue > 1e-4


def test_residual_is_the_normalised_excess_and_falls_back_to_p():
    p, q = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.1, 0.6, 0.3])
    assert residual(p, q).tolist() == [1, 0, 0]
    assert torch.equal(residual(p, p), p)


def test_seen_after_a_block_grows_token_by_token():
    seen = torch.tensor([[True, False, False, False]])
    got = seen_after(seen, torch.tensor([[2, 2, 3]]))
    assert got.int().tolist() == [[[1, 0, 1, 0], [1, 0, 1, 0], [1, 0, 1, 1]]]
    assert seen_after(None, torch.tensor([[1]])) is None


def test_impossible_sampling_is_refused():
    for name, values in {
        "temperature": (-1, math.nan, 1e-38),
        "top_k": (-1, 2.5, math.nan),
        "top_p": (0, 1.1, math.nan),
        "repetition_penalty": (0, 1e-300),
    }.items():
        for value in values:
            with refused(name):
                Sampling(**{name: value})


def test_the_largest_number_drawn_still_picks_a_token():
    """Its product with a sum a little above 1 rounds to the sum."""
    p = torch.zeros(1000, 3)
    p[:, 0], p[:, 1] = 0.5, 0.5 + torch.arange(1000) * 2**-23
    assert (pick(p, torch.full((1000,), 1 - 2**-24)) == 1).all()
