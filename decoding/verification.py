"""How guesses are accepted, so that what comes out is distributed exactly as the target's own tokens.

A rule is a function of its numbers alone, chance included. On a GPU it is recorded with the forward before it, and then
its Python code is not run again: a rule that makes the host wait for the device, or keeps something from call to call,
says so by an attribute `waits = True`, and is left out of recordings.
"""

import torch
import torch.nn.functional as F

from utils import kernels_for, pick, residual


def token_rule(p, q, drafts, u):
    """Speculative sampling's rule, token by token (Leviathan et al., arXiv 2211.17192, Algorithm 1).

    p: float32 `[B, gamma + 1, V]`, the target's distribution before each draft token and after the last.
    q: float32 `[B, gamma, V]`, the distributions `drafts[B, gamma]` were drawn from.
        A row with fewer guesses than others has q = 0 where it has none.
    u: float32 `[B, gamma + 1]`, drawn uniformly from [0, 1): one number for each draft, and one for the token after.
    Returns `accepted[B]`, how many drafts stand, and `token[B]`, the token after them: drawn from norm(max(0, p - q))
    at the first rejection, from p after the last draft when all stand. (With gamma 0 that is plain sampling.)
    """
    if by := kernels_for(p):  # the same in one call
        accepted, left = by.accept(p, q, drafts, u[:, :-1])
        return accepted, pick(left, u[:, -1])
    p_x, q_x = (d[:, : drafts.shape[1]].gather(-1, drafts[..., None])[..., 0] for d in (p, q))
    stands = (u[:, :-1] * q_x < p_x) & (q_x > 0)  # with probability min(1, p / q)
    accepted = stands.long().cumprod(1).sum(1)
    # Past the last draft q is 0, and the residual there is p itself: the bonus token needs no case of its own.
    q = F.pad(q, (0, 0, 0, 1))
    at = accepted[:, None, None].expand(-1, 1, p.shape[-1])
    return accepted, pick(residual(p.gather(1, at)[:, 0], q.gather(1, at)[:, 0]), u[:, -1])


def block_rule(p, q, drafts, u):
    """Block verification (Sun et al., arXiv 2403.10444, Algorithm 2): the drafts are judged together, which keeps at
    least as many on average. Arguments and results are `token_rule`'s.

    With w_0 = 1 and w_i = min(1, w_{i-1} p(x_i) / q(x_i)), draft i ends the accepted part with probability h_i =
    S_i / (S_i + 1 - w_i), where S_i sums max(0, w_i p - q) over the vocabulary after it; the last i that passes counts,
    and the token after it is drawn from norm(max(0, w_i p - q)).
    """
    if by := kernels_for(p):  # the same in one call
        accepted, left = by.accept_block(p, q, drafts, u[:, :-1])
        return accepted, pick(left, u[:, -1])
    p_x, q_x = (d[:, : drafts.shape[1]].gather(-1, drafts[..., None])[..., 0] for d in (p, q))
    w = [torch.ones_like(p[:, 0, 0])]
    for ratio in (p_x / q_x.clamp(min=torch.finfo(q.dtype).tiny)).unbind(1):
        w.append((w[-1] * ratio).clamp(max=1))
    w = torch.stack(w, 1)
    # Past the last draft q is 0, so S there is w and h is w, as the algorithm asks.
    weighted, q = w[..., None] * p, F.pad(q, (0, 0, 0, 1))
    s = (weighted - q).clamp_(min=0).sum(-1)
    # Where p equals q so far and after, any choice is right.
    h = (s / (s + 1 - w)).masked_fill_(s + 1 - w == 0, 1.0)
    stands = (u[:, :-1] < h[:, 1:]) & (q_x > 0)
    order = torch.arange(1, drafts.shape[1] + 1, device=p.device)
    accepted = F.pad(stands * order, (1, 0)).amax(1)
    at = accepted[:, None, None].expand(-1, 1, p.shape[-1])
    return accepted, pick(residual(weighted.gather(1, at)[:, 0], q.gather(1, at)[:, 0]), u[:, -1])


RULES = {"token": token_rule, "block": block_rule}
