"""Contrastive decoding against its definition, its speculative form against it, and mistakes planted in both."""

import math

import pytest
import torch
from conftest import refused
from outcomes import largest_error, small
from test_specSampling import PROMPTS, near

from decoding.verification import block_rule, token_rule
from methods.contrastive import Contrast
from methods.drafters import ModelDrafter
from methods.selfDraft import SelfDrafter
from methods.treeSampling import TreeDrafter, treeSampling
from regrSampling import regrSampling
from specSampling import specSampling
from utils import GREEDY, Sampling

DRAW = Sampling(0.9, 0, 1.0)


def by_definition(prefix, expert, amateur, length, plausibility, temperature):
    """The article's loop in its own order of steps: softmax, logarithm, difference, mask, argmax; no cache."""
    tokens = list(prefix)
    for _ in range(length):
        p = expert.score(torch.tensor([tokens]))[0, -1].softmax(-1)
        q = (amateur.score(torch.tensor([tokens]))[0, -1] / temperature).softmax(-1)
        difference = p.log() - q.log()
        difference[p < plausibility * p.max()] = -torch.inf
        tokens.append(int(difference.argmax()))
    return tokens[len(prefix) :]


@pytest.mark.parametrize("plausibility, temperature", [(0.1, 1.0), (0.5, 1.0), (0.1, 2.5), (1.0, 1.0), (0.0, 0.5)])
def test_the_token_with_the_largest_difference_of_logarithms_wins(pair, plausibility, temperature):
    tokens = regrSampling(PROMPTS, Contrast(*pair, plausibility, temperature), 12, GREEDY)[0]
    assert tokens == [by_definition(prompt, *pair, 12, plausibility, temperature) for prompt in PROMPTS]
    greedy = regrSampling(PROMPTS, pair[0], 12, GREEDY)[0]
    assert (tokens == greedy) == (plausibility == 1.0)  # only the expert's favourite is left


def test_trees_of_guesses_are_refused(pair):
    with refused("does not read trees of guesses"):
        treeSampling(PROMPTS, Contrast(*pair), TreeDrafter(pair[1]), 25)


def test_what_cannot_be_a_contrast_is_refused(pair):
    for wrong in (2.0, 1.0), (math.nan, 1.0), (0.1, 0.0), (0.1, -1.0):
        with refused("plausibility" if wrong[1] == 1 else f"temperature must be at least 0.0001, not {wrong[1]}"):
            Contrast(*pair, *wrong)
    with refused("shares the KV cache of"):
        Contrast(pair[0], SelfDrafter(pair[0], 4).model)


def test_the_speculative_form_writes_the_same_text(pair):
    amateur = near(pair[0], noise=0.1)
    contrast = Contrast(pair[0], amateur)
    wanted = regrSampling(PROMPTS, contrast, 30, GREEDY)[0]
    for gamma in 1, 4, 7:
        tokens, records = specSampling(PROMPTS, contrast, ModelDrafter(amateur), 30, gamma, GREEDY)
        assert tokens == wanted and max(a for r in records for a in r.accepted) >= 1
        assert sum(len(r.committed) for r in records) < 30 * len(PROMPTS)


def error(gamma=2, length=4, verify=token_rule, expert_alone=False):
    """The largest difference between the probability of a text and that of plain contrastive decoding."""
    expert, amateur = small(2)
    contrast = Contrast(expert, amateur, 0.05, 1.3)

    def sample(prefixes):
        target = expert if expert_alone else contrast
        return specSampling(prefixes, target, ModelDrafter(amateur), length, gamma, DRAW, verify=verify)[0]

    return largest_error(sample, contrast, length, DRAW, prefixes=[[1, 2, 0]])


@pytest.mark.parametrize("verify", [token_rule, block_rule])
def test_the_speculative_form_is_distributed_as_the_plain_one(verify):
    """The planted mistake: it verifies against the expert alone, as plain speculative decoding does."""
    assert error(verify=verify) < 1e-6
    assert error(length=3, verify=verify, expert_alone=True) > 1e-2
