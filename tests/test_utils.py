"""Probabilities, drawing, the residual."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare
from transformers import (
    LogitsProcessorList,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

import utils
from utils import Sampling, UserError, draw, nucleus, pick, probabilities, residual, seen_after


@pytest.mark.parametrize("vocabulary", [50, 5000])
@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(1.0, 0, 1.0),
        Sampling(0.7, 0, 1.0),
        Sampling(1.0, 7, 1.0),
        Sampling(1.0, 0, 0.8),
        Sampling(0.85, 0, 0.9),
        Sampling(1.3, 20, 0.5, 1.2),
        Sampling(0.5, 3, 0.95, 0.7),
        Sampling(3.0, 0, 0.999),
    ],
)
def test_probabilities_equal_those_of_transformers_processors(sampling, vocabulary):
    torch.manual_seed(0)
    logits, text = 3 * torch.randn(4, vocabulary), torch.randint(0, vocabulary, (4, 20))
    steps = [
        RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty),
        TemperatureLogitsWarper(sampling.temperature),
    ]
    steps += [TopKLogitsWarper(sampling.top_k)] if sampling.top_k else []
    steps += [TopPLogitsWarper(sampling.top_p)] if sampling.top_p < 1 else []
    wanted = LogitsProcessorList(steps)(text, logits.clone()).softmax(-1)
    seen = torch.zeros(4, vocabulary, dtype=torch.bool).scatter_(1, text, True)
    torch.testing.assert_close(probabilities(logits, sampling, seen), wanted, atol=1e-6, rtol=1e-4)


def by_transformers(logits, sampling, text):
    """Their processors in the same order; where equal logits stand at the edge of top-k or top-p, the tokens that they
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
    st.sampled_from([2, 61, 300]),
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


def test_greedy_is_one_hot_at_the_largest_logit():
    p = probabilities(torch.tensor([[1.0, 3.0, 2.0]]), Sampling(temperature=0))
    assert p.tolist() == [[0, 1, 0]]


@pytest.mark.parametrize("vocabulary", [3, 1000])
def test_a_nucleus_is_the_smallest_set_that_holds_top_p(vocabulary):
    probs = torch.rand(5, 2, vocabulary).pow(4).softmax(-1)
    kept = nucleus(probs, 0.9) > 0
    ordered = probs.sort(-1, descending=True).values.double().cumsum(-1)
    assert torch.equal(kept.sum(-1), (ordered < 0.9).sum(-1) + 1)
    assert (probs.where(kept, torch.inf).amin(-1) >= probs.where(~kept, 0).amax(-1)).all()


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


@pytest.mark.parametrize("bound", [1e-2, 1e-4, 1e-8])
@pytest.mark.parametrize("shape", SHAPES)
def test_candidates_give_the_nucleus_or_nothing(shape, bound):
    torch.manual_seed(0)
    probs = SHAPES[shape](4, 300).softmax(-1)
    for top_p in 0.2, 0.9, 0.999:
        kept = utils.nucleus_above(probs, top_p, bound)
        holds = (probs.where(probs >= bound, 0).sum(-1) >= top_p).all()
        assert (kept is not None) == holds
        if holds:
            assert torch.equal(kept > 0, by_full_sort(probs, top_p))


def test_most_nuclei_are_found_without_sorting_everything(monkeypatch):
    """Those a language model has: else this is slow at a vocabulary of 50,304, not wrong."""
    torch.manual_seed(0)
    probs = SHAPES["long-tailed"](5, 50304).div(0.85).softmax(-1)
    monkeypatch.setattr(
        utils,
        "least_kept",
        lambda ordered, top_p, f=utils.least_kept: (
            f(ordered, top_p) if ordered.shape[-1] < 20_000 else pytest.fail("all were sorted")
        ),
    )
    nucleus(probs, 0.9)


def test_equally_probable_tokens_stay_or_go_together():
    assert nucleus(torch.tensor([[0.4, 0.2, 0.2, 0.2]]), 0.5).tolist() == [
        [pytest.approx(v) for v in (0.4, 0.2, 0.2, 0.2)]
    ]


@pytest.mark.parametrize("k", [1, 2, 7, 60])
def test_top_k_keeps_the_k_largest_and_what_equals_the_last(k):
    logits = torch.randint(0, 30, (2, 3, 61)).float()
    kept = probabilities(logits, Sampling(1.0, k, 1.0)) > 0
    assert torch.equal(kept, logits >= logits.sort(-1, descending=True).values[..., k - 1 : k])


def test_a_nucleus_is_never_empty():
    assert nucleus(torch.tensor([[0.6, 0.4]]), 1e-300).tolist() == [[1, 0]]


def test_draw_follows_the_distribution_and_never_draws_what_has_probability_zero():
    p = torch.tensor([0.0, 0.5, 0.0, 0.125, 0.3, 0.075, 0.0])
    tokens = draw(p.expand(200_000, -1), torch.Generator().manual_seed(0))
    counts = torch.bincount(tokens, minlength=7)
    assert counts[p == 0].sum() == 0
    wanted = p[p > 0].double()
    assert chisquare(counts[p > 0], wanted / wanted.sum() * 200_000).pvalue > 1e-4


def test_draw_keeps_leading_shape_and_follows_its_generator():
    p = torch.rand(3, 4, 9)
    again = [draw(p, torch.Generator().manual_seed(5)) for _ in range(2)]
    assert again[0].shape == (3, 4) and torch.equal(*again)


def test_residual_is_the_normalised_excess_and_falls_back_to_p():
    p, q = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.1, 0.6, 0.3])
    assert residual(p, q).tolist() == [1, 0, 0]
    assert torch.equal(residual(p, p), p)


def test_seen_after_a_block_grows_token_by_token():
    seen = torch.tensor([[True, False, False, False]])
    got = seen_after(seen, torch.tensor([[2, 2, 3]]))
    assert got.int().tolist() == [[[1, 0, 1, 0], [1, 0, 1, 0], [1, 0, 1, 1]]]
    assert seen_after(None, torch.tensor([[1]])) is None


@pytest.mark.parametrize(
    "bad",
    [
        {"temperature": -1},
        {"temperature": float("nan")},
        {"top_k": -1},
        {"top_p": 0},
        {"top_p": 1.1},
        {"top_p": float("nan")},
        {"repetition_penalty": 0},
        {"temperature": 1e-38},
        {"repetition_penalty": 1e-300},
    ],
)
def test_impossible_sampling_is_refused(bad):
    with pytest.raises(UserError, match=list(bad)[0]):
        Sampling(**bad)


def test_the_largest_number_drawn_still_picks_a_token():
    """Its product with a sum a little above 1 rounds to the sum."""
    p = torch.zeros(1000, 3)
    p[:, 0], p[:, 1] = 0.5, 0.5 + torch.arange(1000) * 2**-23
    assert (pick(p, torch.full((1000,), 1 - 2**-24)) == 1).all()
