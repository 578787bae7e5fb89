"""Verification rules with a planted mistake: a test of the emitted distribution must fail for each.

Arguments and results are those of decoding/verification.py's rules.
"""

import torch
import torch.nn.functional as F

from decoding.verification import block_rule, token_rule
from lossless.mistakes import always_accept, p_shifted, replace_from_p, unverified_last  # noqa: F401 - for tests
from utils import at_place, pick, residual


def drop_the_unsure(p, q, drafts, u):
    """An inviting mistake: a guess whose q is low is dropped and not verified."""
    q_x = q.gather(-1, drafts[..., None])[..., 0]
    return token_rule(p, q * (q_x >= 0.4)[..., None], drafts, u)


def block_without_what_may_follow(p, q, drafts, u):
    """h_i = w_i: the block rule as if every draft were the last of its block."""
    p_x, q_x = (d[:, : drafts.shape[1]].gather(-1, drafts[..., None])[..., 0] for d in (p, q))
    w = (p_x / q_x).cumprod(1).clamp(max=1) if drafts.shape[1] else p_x
    stands = u[:, :-1] < w
    accepted = F.pad(stands * torch.arange(1, drafts.shape[1] + 1), (1, 0)).amax(1)
    return accepted, pick(residual(at_place(p, accepted), at_place(F.pad(q, (0, 0, 0, 1)), accepted)), u[:, -1])


def block_without_the_weights(p, q, drafts, u):
    """Draws the token after the accepted part from norm(max(0, p - q)) instead of norm(max(0, w p - q))."""
    accepted, _ = block_rule(p, q, drafts, u)
    return accepted, pick(residual(at_place(p, accepted), at_place(F.pad(q, (0, 0, 0, 1)), accepted)), u[:, -1])
