"""Speculative sampling: guess ahead with something cheap, score all guesses with one forward of the target, keep what
the target would have said (Leviathan et al., arXiv 2211.17192; Chen et al., arXiv 2302.01318)."""

import torch

from decoding.draftLength import Fixed
from decoding.rounds import judge
from decoding.rows import Rows
from decoding.verification import token_rule
from decoding.watch import Watch
from regrSampling import first_token
from utils import Sampling, not_finite


@torch.inference_mode()
def specSampling(
    prefixes,
    target,
    drafter,
    max_len=200,
    gamma=4,
    sampling=Sampling(),
    end_of_text=None,
    generator=None,
    callback=None,
    verify=token_rule,
):
    """Continue each of `prefixes` with `target`'s own distribution, faster.

    drafter: what guesses (drafters.py). gamma: tokens guessed in a round, or a rule that chooses (draftLength.py).
    verify: how guesses are accepted, f(p, q, drafts, u) -> (accepted, token) as in verification.py: on a GPU it is
    recorded, so it must neither make the host wait nor keep anything, or say that it does. The other arguments, the two
    results and the errors are `regrSampling`'s. Rows advance by different amounts: each by what it accepted, and one
    token more.
    """
    length = Fixed(gamma) if isinstance(gamma, int) else gamma
    rows = Rows(prefixes, max_len, [target, *drafter.models], end_of_text, callback)
    first_token(rows, target, sampling, generator)
    drafter.begin(rows)
    length.begin(len(rows.tokens))
    while rows.remaining:
        advance(rows, target, drafter, length, sampling, verify, generator)
    return rows.tokens, rows.records


def advance(rows, target, drafter, length, sampling, verify, generator=None, behind=0):
    """One round: draft, score, verify, commit. Returns p `[B, n + 1, V]` and how many of the n drafts each row kept.

    behind: tokens before the last that `target` has not read either (a cascade's inner target misses some)."""
    watch = Watch(rows.device)
    # Draft: x_1 ... x_gamma, and the distributions q they were drawn from. A row's last token of all needs no guess,
    # and past its end there is no p: the block rule, which looks ahead, would be misled by what stands there.
    gammas = [max(0, min(gamma, left - 1)) for gamma, left in zip(length.gammas(), rows.left)]
    at_once = None if behind or length.stop or length.timed else getattr(drafter, "round_at_once", None)
    scored = at_once and at_once(target, rows, max(gammas), sampling, generator)  # p too, where one graph gives both
    drafts, q, p = scored or (*drafter.draft(rows, max(gammas), sampling, generator, length.stop), None)
    watch.mark()
    if min(gammas) < max(gammas):  # a row with fewer guesses than others has q = 0 beyond its own
        order = torch.arange(drafts.shape[1], device=rows.device)
        q = q * (order < torch.tensor(gammas, device=rows.device)[:, None])[..., None]
    # Score and verify: p before each draft token and after the last, in one forward of the target.
    u = torch.rand(len(drafts), drafts.shape[1] + 1, device=rows.device, generator=generator)
    if scored:
        accepted, token = verify(p, q, drafts, u)
    else:
        committed, positions = rows.last(1 + behind, drafts.shape[1])
        block, seen = torch.cat([committed, drafts], 1), rows.seen(target.vocabulary, sampling)
        p, accepted, token = judge(target, block, positions, q, u, sampling, verify, seen)
    # Commit.
    drafted, taken = rows.commit(drafts, accepted, token, q.gather(-1, drafts[..., None])[..., 0] > 0)
    # A guess from a q of nan never counts as one. Only where guesses are missing is it worth the host's time to look.
    if min(drafted.values()) < drafts.shape[1] and q.isnan().any():
        raise not_finite(drafter.models[0])
    # Learn: how long the next round's guess should be.
    length.learn(drafted, taken, lambda: p[torch.arange(len(p)), accepted, token].tolist(), watch.seconds)
    return p, accepted
