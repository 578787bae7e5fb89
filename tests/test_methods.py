"""Every lossless method: greedy equality, exact distributions, and a mistake planted in each.

With FULL=1 in the environment the distributions are tested with 200,000 draws instead of 60,000 (six minutes)."""

import helpers
import pytest
import torch
from test_specSampling import FEW, PROMPTS, VOCABULARY, near

import drafters
from drafters import CascadeDrafter, LookupDrafter, ModelDrafter
from draftLength import Additive, CostAware, DraftConfidence, Fixed, TargetConfidence
from regrSampling import regrSampling
from specSampling import specSampling
from utils import GREEDY, Sampling, draw, residual
from verification import block_rule, token_rule


def model(*models):
    return ModelDrafter(models[0])


def cascade(*models, verify=token_rule, length=None):
    """As deep as there are models: the last one guesses for the one before, and so on."""
    drafter = ModelDrafter(models[-1])
    for each in reversed(models[:-1]):
        drafter = CascadeDrafter(each, drafter, length or Fixed(2), verify)
    return drafter


def lookup(*models):
    return LookupDrafter(models[0].vocabulary, 2)


#  name: drafter of the smaller models, how many of them, draft-length rule, verification
METHODS = {
    "additive": (model, 1, lambda: Additive(1), token_rule),
    "draftConfidence": (model, 1, lambda: DraftConfidence(4, 0.4), token_rule),
    "targetConfidence": (model, 1, lambda: TargetConfidence(3, 0.4), token_rule),
    "costAware": (model, 1, lambda: CostAware(4), token_rule),
    "block": (model, 1, lambda: 3, block_rule),
    "block, draftConfidence": (model, 1, lambda: DraftConfidence(4, 0.4), block_rule),
    "lookup": (lookup, 1, lambda: 3, token_rule),
    "cascade of 3": (cascade, 2, lambda: 3, token_rule),
    "cascade of 4": (cascade, 3, lambda: 3, token_rule),
    "cascade, block": (lambda *m: cascade(*m, verify=block_rule), 2, lambda: 4, block_rule),
    "cascade, targetConfidence": (
        lambda *m: cascade(*m, length=Additive(1)),
        2,
        lambda: TargetConfidence(3, 0.4),
        token_rule,
    ),
}


@pytest.mark.parametrize("name", METHODS)
def test_greedy_rows_equal_plain_greedy(name):
    make, count, gamma, verify = METHODS[name]
    target = helpers.tiny()
    smaller = [near(target, noise=0.08 * (i + 1), seed=i) for i in range(count)]
    spec, records = specSampling(PROMPTS, target, make(*smaller), 40, gamma(), GREEDY, verify=verify)
    assert spec == regrSampling(PROMPTS, target, 40, GREEDY)[0]
    accepted = {a for r in records for a in r.accepted[1:]}
    assert max(accepted) >= (2 if "lookup" not in name else 0)
    for record in records:
        assert all(a <= d for a, d in zip(record.accepted, record.drafted)) and sum(record.committed) == 40


def p_value(make, count, gamma, verify, sampling=Sampling(1.0, 0, 1.0), draws=helpers.DRAWS, first=1):
    """Chi-square of three tokens of the speculative output from `first` on, two prefixes, the smaller p."""
    target, *smaller = (helpers.tiny(seed=i, vocabulary=VOCABULARY, layers=1, sharpness=2.0) for i in range(count + 1))

    def sample(prefixes, generator):
        return specSampling(
            prefixes, target, make(*smaller), first + 4, gamma(), sampling, None, generator, verify=verify
        )[0]

    return helpers.p_value(sample, target, [[1, 2, 3, 1, 2], [4]], first, 3, sampling, draws)


@pytest.mark.parametrize("name", METHODS)
def test_three_tokens_are_distributed_as_the_targets(name):
    assert p_value(*METHODS[name]) > 1e-4


def test_filters_and_penalties_reach_every_model_of_a_cascade():
    assert p_value(*METHODS["cascade of 3"], sampling=Sampling(0.9, 0, 0.9, 1.3)) > 1e-4


def drop_the_unsure(p, q, drafts, generator=None):
    """The mistake that invites itself: the token that was too improbable is not submitted."""
    q_x = q.gather(-1, drafts[..., None])[..., 0]
    return token_rule(p, q * (q_x >= 0.4)[..., None], drafts, generator)


def always_accept(p, q, drafts, generator=None):
    accepted, token = token_rule(p, q, drafts, generator)
    kept = (q.gather(-1, drafts[..., None]) > 0).sum((1, 2))
    return kept, torch.where(
        accepted == kept, token, draw(p.gather(1, kept[:, None, None].expand(-1, 1, p.shape[-1]))[:, 0], generator)
    )


def block_without_the_residuals(p, q, drafts, generator=None):
    """h_i = w_i: what the block rule would be if every draft were its block's last."""
    p_x, q_x = (d[:, : drafts.shape[1]].gather(-1, drafts[..., None])[..., 0] for d in (p, q))
    w = (p_x / q_x).cumprod(1).clamp(max=1) if drafts.shape[1] else p_x
    stands = torch.rand(drafts.shape, generator=generator) < w
    accepted = torch.nn.functional.pad(stands * torch.arange(1, drafts.shape[1] + 1), (1, 0)).amax(1)
    at = accepted[:, None, None].expand(-1, 1, p.shape[-1])
    q = torch.nn.functional.pad(q, (0, 0, 0, 1))
    return accepted, draw(residual(p.gather(1, at)[:, 0], q.gather(1, at)[:, 0]), generator)


@pytest.mark.parametrize("name", ["additive", "targetConfidence", "costAware", "lookup", "cascade of 3"])
def test_accepting_all_guesses_is_caught(name):
    make, count, gamma, _ = METHODS[name]
    assert p_value(make, count, gamma, always_accept, draws=FEW) < 1e-4


def test_dropping_the_guess_the_draft_was_unsure_of_is_caught():
    make, count, gamma, _ = METHODS["draftConfidence"]
    assert p_value(make, count, gamma, drop_the_unsure, draws=FEW) < 1e-4


def test_a_block_rule_that_forgets_what_may_follow_is_caught():
    make, count, gamma, _ = METHODS["block"]
    assert p_value(make, count, gamma, block_without_the_residuals, draws=FEW) < 1e-4


def test_a_cascade_that_passes_on_its_drafts_distribution_is_caught(monkeypatch):
    """As a cascade that accepts against logits it has not verified."""
    make, count, gamma, verify = METHODS["cascade of 3"]
    whole = drafters.specSampling.advance

    def wrong(rows, target, drafter, *rest):
        if target.name == "gpt_neox-0":  # the outermost round is right
            return whole(rows, target, drafter, *rest)
        p, accepted = whole(rows, target, drafter, *rest)
        return p.roll(1, 1), accepted

    monkeypatch.setattr(drafters.specSampling, "advance", wrong)
    assert p_value(make, count, gamma, verify, draws=FEW) < 1e-4


def test_guesses_of_lookup_that_claim_a_spread_distribution_are_caught(monkeypatch):
    make, count, gamma, verify = METHODS["lookup"]
    one_hot = torch.nn.functional.one_hot
    monkeypatch.setattr(torch.nn.functional, "one_hot", lambda *a: torch.full_like(one_hot(*a), 1) / VOCABULARY)
    assert p_value(make, count, gamma, verify, draws=FEW) < 1e-4
