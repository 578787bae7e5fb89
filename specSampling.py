"""Speculative sampling: guess ahead with something cheap, score all guesses with one forward of the target, keep what
the target would have said (Leviathan et al., arXiv 2211.17192; Chen et al., arXiv 2302.01318)."""

import torch

from regrSampling import commit_one
from rows import Rows
from utils import Sampling, UserError, probabilities, seen_after
from verification import token_rule


@torch.inference_mode()
def specSampling(prefixes, target, drafter, max_len=200, gamma=4, sampling=Sampling(), end_of_text=None, generator=None,
                 callback=None):
    """Continue each of `prefixes` with `target`'s own distribution, faster.

    gamma: tokens guessed by `drafter` (see drafters.py) in a round; the other arguments, the two results and the errors
    are `regrSampling`'s. Rows advance by different amounts: each by what it accepted, and one token more.
    """
    if gamma < 1:
        raise UserError(f"gamma must be 1 or more, not {gamma}")
    rows = Rows(prefixes, max_len, [target, *drafter.models], end_of_text, callback)
    commit_one(rows, target.read_prompt(rows), sampling, generator)
    drafter.begin(rows)
    while rows.remaining:
        # Draft: x_1 ... x_gamma, and the distributions q they were drawn from. The last token of all needs no guess.
        drafts, q = drafter.draft(rows, min(gamma, rows.remaining - 1), sampling, generator)
        # Score: p before each draft token and after the last, in one forward of the target.
        block = torch.cat([rows.last(1), drafts], 1)
        logits = target.forward(block, rows.positions(-1, block.shape[1]))
        p = probabilities(logits, sampling, seen_after(rows.seen(target.vocabulary, sampling), block))
        # Verify and commit.
        accepted, token = token_rule(p, q, drafts, generator)
        rows.commit(drafts, accepted, token)
    return rows.tokens, rows.records
