"""One round of verification, exactly: 400,000 rows of the same round, with known p and q."""

import pytest
import torch
from scipy.stats import chisquare

import verification
from utils import draw
from verification import token_rule

ROWS, VOCABULARY, GAMMA = 400_000, 6, 3


def round_of(rule, seed=0):
    """The first two tokens that come out of a round whose p and q do not depend on the drafts, as pair counts, and the
    counts the target's distribution asks for. A row that kept no draft draws its second token in a round of its own."""
    generator = torch.Generator().manual_seed(seed)
    p = torch.randn(GAMMA + 1, VOCABULARY, generator=generator).mul(1.5).softmax(-1)
    q = torch.randn(GAMMA, VOCABULARY, generator=generator).mul(1.5).softmax(-1)
    wide_p, wide_q = p.expand(ROWS, -1, -1), q.expand(ROWS, -1, -1)
    drafts = draw(wide_q, generator)
    accepted, token = rule(wide_p, wide_q, drafts, generator)
    out = torch.cat([drafts, token[:, None]], 1).scatter_(1, accepted[:, None], token[:, None])
    following = draw(wide_p[:, 1], generator)
    second = torch.where(accepted >= 1, out[:, 1], following)
    counts = torch.bincount(out[:, 0] * VOCABULARY + second, minlength=VOCABULARY**2)
    wanted = (p[0, :, None] * p[1]).flatten().double()
    return accepted, counts, wanted / wanted.sum() * ROWS, p, q


def p_value(rule, seed=0):
    _, counts, wanted, *_ = round_of(rule, seed)
    return chisquare(counts, wanted).pvalue


@pytest.mark.parametrize("seed", range(3))
def test_the_token_rule_emits_the_targets_distribution(seed):
    assert p_value(token_rule, seed) > 1e-4


def test_acceptance_is_the_overlap_of_p_and_q():
    accepted, *_, p, q = round_of(token_rule)
    overlap = torch.minimum(p[:GAMMA], q).sum(-1).cumprod(0)
    for i in range(GAMMA):
        assert (accepted > i).float().mean().item() == pytest.approx(overlap[i].item(), abs=5e-3)


def always_accept(p, q, drafts, generator):
    return torch.full_like(drafts[:, 0], GAMMA), draw(p[:, -1], generator)


def shifted_p(p, q, drafts, generator):
    return token_rule(torch.cat([p[:, 1:], p[:, -1:]], 1), q, drafts, generator)


def shifted_q(p, q, drafts, generator):
    return token_rule(p, q.roll(1, 1), drafts, generator)


@pytest.mark.parametrize("mistake", [always_accept, shifted_p, shifted_q])
def test_a_planted_mistake_is_caught(mistake):
    assert p_value(mistake) < 1e-4


def test_replacing_from_p_instead_of_the_residual_is_caught(monkeypatch):
    monkeypatch.setattr(verification, "residual", lambda p, q: p)
    assert p_value(token_rule) < 1e-4


def test_greedy_accepts_agreement_and_replaces_the_first_disagreement():
    one_hot = torch.eye(VOCABULARY)
    p, drafts = one_hot[torch.tensor([[1, 2, 3, 4]])], torch.tensor([[1, 2, 5]])
    accepted, token = token_rule(p, one_hot[drafts], drafts)
    assert (accepted.item(), token.item()) == (2, 3)
    accepted, token = token_rule(p, p[:, :3], torch.tensor([[1, 2, 3]]))
    assert (accepted.item(), token.item()) == (3, 4)


def test_without_guesses_it_is_plain_sampling():
    p = torch.tensor([[[0.0, 1.0, 0.0]]])
    accepted, token = token_rule(p, torch.empty(1, 0, 3), torch.empty(1, 0, dtype=torch.long))
    assert (accepted.item(), token.item()) == (0, 1)
