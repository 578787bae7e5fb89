"""Every lossless method: greedy equality, the exact distribution of its texts, and a mistake planted in each."""

import copy
from functools import partial

import helpers
import pytest
import torch
from mistakes import always_accept, block_without_what_may_follow, drop_the_unsure
from outcomes import FREE, largest_error, small, speculative_error
from test_specSampling import PROMPTS, near

from decoding.drafter import Fixed, Guesses
from decoding.lengthRules import Additive, CostAware, DraftConfidence, TargetConfidence
from decoding.tree import Places, Tree
from decoding.verification import block_rule, token_rule
from engine.cachedModel import UncachedModel
from methods import cascade as cascades
from methods.cascade import CascadeDrafter
from methods.drafters import ModelDrafter
from methods.lookup import LookupDrafter, LookupFirst
from regrSampling import regrSampling
from specSampling import specSampling
from utils import GREEDY, Sampling


def model(*models):
    return ModelDrafter(models[0])


def cascade(*models, verify=token_rule, length=None):
    """As deep as there are models: the last one guesses for the one before, and so on."""
    drafter = ModelDrafter(models[-1])
    for each in reversed(models[:-1]):
        drafter = CascadeDrafter(each, drafter, length or Fixed(2), verify)
    return drafter


def lookup(*models):
    return LookupDrafter(models[0].vocabulary, worth=0)


def lookup_first(*models, ngram=1, other=model):
    return LookupFirst(LookupDrafter(models[0].vocabulary, ngram, worth=0), other(*models))


def lookup_first_in_a_cascade(*models):
    return CascadeDrafter(models[0], lookup_first(models[1], ngram=2), Additive(2))


class GuessingAtFirst(CostAware):
    """The rule begins without guesses. Here texts are too short for that."""

    def search_for(self, rows):
        if rows not in self.searches:
            super().search_for(rows).opening = self.shapes[2:4]
        return self.searches[rows]


# name: drafter of the smaller models, how many of them, draft-length rule, verification
METHODS = {
    "additive": (model, 1, Additive(1), token_rule),
    "draftConfidence": (model, 1, DraftConfidence(4, 0.4), token_rule),
    "targetConfidence": (model, 1, TargetConfidence(3, 0.4), token_rule),
    "costAware": (model, 1, GuessingAtFirst(4), token_rule),
    "block": (model, 1, 3, block_rule),
    "block, draftConfidence": (model, 1, DraftConfidence(4, 0.4), block_rule),
    "lookup": (lookup, 1, 3, token_rule),
    "lookup where it pays": (lambda *m: LookupDrafter(m[0].vocabulary), 1, 3, token_rule),
    "lookupFirst": (lookup_first, 1, 3, token_rule),
    "lookupFirst, draftConfidence": (lookup_first, 1, DraftConfidence(4, 0.4), token_rule),
    "lookupFirst, block": (lookup_first, 1, 3, block_rule),
    "lookup in a cascade": (lambda *m: CascadeDrafter(m[0], lookup(*m), Fixed(2)), 1, 3, token_rule),
    "lookupFirst in a cascade": (lookup_first_in_a_cascade, 2, 3, token_rule),
    "lookupFirst with a cascade": (partial(lookup_first, ngram=2, other=cascade), 2, 3, token_rule),
    "cascade of 3": (cascade, 2, 3, token_rule),
    "cascade of 4": (cascade, 3, 3, token_rule),
    "cascade, block": (partial(cascade, verify=block_rule), 2, 4, block_rule),
    "cascade, targetConfidence": (partial(cascade, length=Additive(1)), 2, TargetConfidence(3, 0.4), token_rule),
}


@pytest.fixture(scope="module")
def greedy():
    """A target, and its greedy texts."""
    target = helpers.tiny()
    return target, regrSampling(PROMPTS, target, 24, GREEDY)[0]


@pytest.mark.parametrize("name", METHODS)
def test_greedy_rows_equal_plain_greedy(name, greedy):
    (make, count, gamma, verify), (target, wanted) = METHODS[name], greedy
    smaller = [near(target, noise=0.08 * (i + 1), seed=i) for i in range(count)]
    spec, records = specSampling(PROMPTS, target, make(*smaller), 24, copy.deepcopy(gamma), GREEDY, verify=verify)
    assert spec == wanted
    accepted = {a for r in records for a in r.accepted[1:]}
    assert max(accepted) >= (2 if "lookup" not in name else 0)


def error(make, count, gamma, verify, length=4, **where):
    """The largest difference between the probability of a text and the target's."""
    return speculative_error(
        lambda target, *smaller: make(*smaller), gamma, verify, length=length, smaller=count, **where
    )


def tokens_for(name):
    """Of how many tokens the exact distribution is counted. A rule that stops early depends on tokens, not on how many
    there are, and has many outcomes: two are enough. What replaces a token is drawn from three in the others."""
    return 2 if not helpers.FULL and ("Confidence" in name or name == "costAware") else 3


@pytest.mark.parametrize("name", [name for name in METHODS if "cascade" not in name])
def test_texts_have_the_targets_probabilities(name):
    assert error(*METHODS[name], prefixes=[[1, 2, 0, 1, 2]], vocabulary=tokens_for(name)) < 1e-6


class Forgetful(UncachedModel):
    """A planted mistake: of every other row the tokens are not kept."""

    def forward(self, *given, **named):
        logits = super().forward(*given, **named)
        self.text[::2] = 0
        return logits


@pytest.mark.parametrize("kind, least, most", [(UncachedModel, 0, 1e-6), (Forgetful, 1e-3, 2)])
def test_so_they_have_without_a_kv_cache(kind, least, most):
    """The very loops of the other methods, with models that read the whole text in each forward."""
    target, draft = map(kind, small(2, 3))

    def speculative(prefixes):
        return specSampling(prefixes, target, ModelDrafter(draft), 3, 3, FREE)[0]

    assert least <= largest_error(speculative, target.model, 3) < most
    if not least:
        with pytest.raises(TypeError, match="reads no tree"):
            target.forward(torch.tensor([[1]]), torch.tensor([[0]]), Places.at(torch.tensor([0]), Tree.of("1")))
        assert largest_error(lambda prefixes: regrSampling(prefixes, target, 3, FREE)[0], target.model, 3) < most


# A cascade decides so much in a round that all of it can be counted only for two tokens and few guesses.
FEW = {
    "one guess inside, two outside": (partial(cascade, length=Fixed(1)), 2, 2, token_rule),
    "more and more inside": (partial(cascade, length=Additive(1)), 2, 1, token_rule),
    "block": (partial(cascade, verify=block_rule), 2, 1, block_rule),
    "guesses or none outside": (partial(cascade, length=Fixed(1)), 2, TargetConfidence(1, 0.6), token_rule),
    "of 4": (partial(cascade, length=Fixed(1)), 3, 1, token_rule),
}


@pytest.mark.parametrize("name", FEW)
def test_so_they_have_with_a_cascade(name):
    assert error(*FEW[name], vocabulary=2, prefixes=[[1, 0, 0]]) < 1e-6


def test_filters_and_penalties_reach_every_model_of_a_cascade():
    make, sampling = partial(cascade, length=Fixed(1)), Sampling(0.9, 0, 0.95, 1.3)
    assert error(make, 2, 1, token_rule, sampling=sampling, length=3) < 1e-6


@pytest.mark.parametrize(
    "name, mistake, options",
    [
        *((name, always_accept, {}) for name in ("additive", "targetConfidence", "costAware", "lookup", "lookupFirst")),
        ("one guess inside, two outside", always_accept, {"vocabulary": 2}),
        ("draftConfidence", drop_the_unsure, {}),
        ("block", block_without_what_may_follow, {"vocabulary": 2, "length": 4}),
    ],
)
def test_a_planted_mistake_in_a_rule_is_caught(name, mistake, options):
    make, count, gamma, _ = (METHODS | FEW)[name]
    options = {"length": 3, "vocabulary": tokens_for(name), "prefixes": [[1, 2, 0, 1, 2]]} | options
    assert error(make, count, gamma, mistake, **options) > (1e-3 if name == "block" else 1e-2)


def test_a_cascade_that_passes_on_its_drafts_distribution_is_caught(monkeypatch):
    """As a cascade that accepts against logits it has not verified."""
    whole = cascades.specSampling.advance

    def wrong(rows, target, drafter, *rest):
        if target.name == "gpt_neox-0":  # the outermost round is right
            return whole(rows, target, drafter, *rest)
        p, accepted = whole(rows, target, drafter, *rest)
        return p.roll(1, 1), accepted

    monkeypatch.setattr(cascades.specSampling, "advance", wrong)
    assert error(partial(cascade, length=Fixed(1)), 2, 1, token_rule, vocabulary=2, length=3) > 1e-3


def with_a_spread_q(self, rows, found, honest=LookupDrafter.guesses):
    guesses = honest(self, rows, found)
    return Guesses(guesses.drafts, torch.full_like(guesses.q, 1 / 3))


def with_the_drafts_q(self, rows, gammas, *given):
    found = self.lookup.find(rows, gammas)
    theirs, ours = self.drafter.draft(rows, gammas, *given), self.lookup.guesses(rows, found)
    width = min(theirs.drafts.shape[1], ours.drafts.shape[1])
    return Guesses(ours.drafts[:, :width], theirs.q[:, :width])


@pytest.mark.parametrize(
    "name, kind, part, wrong",
    [("lookup", LookupDrafter, "guesses", with_a_spread_q), ("lookupFirst", LookupFirst, "draft", with_the_drafts_q)],
)
def test_guesses_of_lookup_that_claim_another_distribution_are_caught(monkeypatch, name, kind, part, wrong):
    monkeypatch.setattr(kind, part, wrong)
    assert error(*METHODS[name], prefixes=[[1, 2, 0, 1, 2]], length=3) > 1e-2
