"""One round of verification, exactly: every draft and every decision of the rules, each with its probability."""

import mistakes
import pytest
import torch
from hypothesis import given, settings
from outcomes import at, every_outcome, joint, number, pairs, softmaxes

from decoding import verification
from decoding.verification import RULES, acceptance, block_rule, emitted, token_rule


def round_of(rule, p, q):
    """What `rule` makes of drafts from q: the distribution of the round's first gamma + 1 tokens, float64, of which p
    itself adds what the round leaves open, and the mean number of accepted drafts.

    p: gamma + 1 levels of a tree, q: gamma; where q is 0 nothing is guessed."""
    gamma, vocabulary = len(q), q[0].shape[1]

    def run(outcomes):
        drafts, given = torch.zeros(len(outcomes.weight), 0, dtype=torch.long), []
        for _ in range(gamma):
            given.append(at(q, drafts))
            guessed = given[-1].sum(1, keepdim=True) > 0
            drafts = torch.cat([drafts, outcomes.draw(given[-1].where(guessed, torch.tensor(1.0)))[:, None]], 1)
        wanted = torch.stack([at(p, drafts[:, :n]) for n in range(gamma + 1)], 1)
        return drafts, *rule(wanted, torch.stack(given, 1), drafts, torch.rand(len(drafts), gamma + 1))

    (drafts, accepted, token), weight = every_outcome(run)
    texts = torch.cat([drafts, token[:, None]], 1).scatter_(1, accepted[:, None], token[:, None])
    emitted = torch.zeros(vocabulary ** (gamma + 1), dtype=torch.float64)
    for n in range(gamma + 1):
        kept = accepted == n
        share = torch.zeros(vocabulary ** (n + 1), dtype=torch.float64)
        share.index_add_(0, number(texts[kept, : n + 1], vocabulary), weight[kept])
        emitted += joint(p, share)
    return emitted, (weight * accepted).sum().item()


def error(rule, p, q):
    """The largest difference between the probability of a text and the target's."""
    return (round_of(rule, p, q)[0] - joint(p)).abs().max().item()


@settings(max_examples=150, deadline=None, derandomize=True)
@given(pairs())
def test_both_rules_emit_the_targets_distribution_and_blocks_keep_more(trees):
    emitted, kept = zip(*(round_of(rule, *trees) for rule in (token_rule, block_rule)))
    for each in emitted:
        assert (each - joint(trees[0])).abs().max() < 1e-6
    assert kept[1] > kept[0] - 1e-6


def test_acceptance_is_the_overlap_of_p_and_q():
    p, q = softmaxes(gamma=1)
    assert round_of(token_rule, p, q)[1] == pytest.approx(torch.minimum(p[0], q[0]).sum().item(), abs=1e-6)
    p_x, q_x = torch.tensor([0.2, 0.2, 0.0, 0.3, 0.0]), torch.tensor([0.4, 0.1, 0.1, 0.0, 0.0])
    assert acceptance(p_x, q_x).tolist() == [0.5, 1, 0, 0, 0]  # Where q is 0 no guess was drawn.


def test_what_the_rule_is_said_to_emit_is_what_it_emits(monkeypatch):
    """`emitted` is the first token of a round of `token_rule`, right or wrong."""
    p, q = softmaxes(gamma=1)
    for wrong in (None, lambda p, q: p):
        if wrong:
            monkeypatch.setattr(verification, "residual", wrong)
        first = round_of(token_rule, p, q)[0].view(p[0].shape[1], -1).sum(1)
        torch.testing.assert_close(emitted(p[0].double(), q[0].double())[0], first, atol=1e-6, rtol=0)
        assert torch.allclose(first.float(), p[0][0], atol=1e-4) is (wrong is None)


OF_TOKENS = "always_accept", "replace_from_p", "unverified_last", "p_shifted", "drop_the_unsure"
OF_BLOCKS = "block_without_what_may_follow", "block_without_the_weights"


@pytest.mark.parametrize("name", [*OF_TOKENS, *OF_BLOCKS, *RULES])
def test_a_planted_mistake_is_caught(name, monkeypatch):
    """A wrong rule; or a residual that is p, in a right one, which is right without it."""
    mistake = RULES[name] if name in RULES else getattr(mistakes, name)
    if name in RULES:
        assert error(mistake, *softmaxes()) < 1e-6
        monkeypatch.setattr(verification, "residual", lambda p, q: p)
    assert error(mistake, *softmaxes()) > 1e-3


def test_a_synthetic_rule_leaves_p_where_a_row_has_no_guess():
    """The token that pads there may be the target's only one."""
    p, drafts = torch.eye(4)[torch.tensor([[1, 2, 3]])], torch.tensor([[1, 2]])
    q = torch.eye(4)[drafts]
    q[:, 1] = 0
    for u, wanted in ((0.4, (1, 2)), (0.6, (0, 1))):
        accepted, token = verification.synthetic(0.5)(p.clone(), q, drafts, torch.full((1, 3), u))
        assert (accepted.item(), token.item()) == wanted
        q = torch.eye(4)[drafts]  # A guess that is the target's only token is rejected at the rate 0, too.
        accepted, token = verification.synthetic(0.0)(torch.eye(4)[None, [1, 2, 3]], q, drafts, torch.full((1, 3), u))
        assert accepted.item() == 0 and token.item() < 4
