"""How guesses are accepted, so that what comes out is distributed exactly as the target's own tokens."""

import torch
import torch.nn.functional as F

from utils import draw, residual


def token_rule(p, q, drafts, generator=None):
    """Speculative sampling's rule, token by token (Leviathan et al., arXiv 2211.17192, Algorithm 1).

    p: float32 `[B, gamma + 1, V]`, the target's distribution before each draft token and after the last.
    q: float32 `[B, gamma, V]`, the distributions `drafts[B, gamma]` were drawn from.
    Returns `accepted[B]`, how many drafts stand, and `token[B]`, the token after them: drawn from norm(max(0, p - q))
    at the first rejection, from p after the last draft when all stand. (With gamma 0 that is plain sampling.)
    """
    p_x, q_x = (d[:, :drafts.shape[1]].gather(-1, drafts[..., None])[..., 0] for d in (p, q))
    u = torch.rand(drafts.shape, device=p.device, generator=generator)
    stands = u * q_x < p_x  # with probability min(1, p / q)
    accepted = stands.long().cumprod(1).sum(1)
    # Past the last draft q is 0, and the residual there is p itself: the bonus token needs no case of its own.
    q = F.pad(q, (0, 0, 0, 1))
    at = accepted[:, None, None].expand(-1, 1, p.shape[-1])
    return accepted, draw(residual(p.gather(1, at)[:, 0], q.gather(1, at)[:, 0]), generator)
