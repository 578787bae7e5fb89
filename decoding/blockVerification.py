"""`block_rule`: a verification rule that judges the drafts together. It accepts at least as many on average."""

import torch
import torch.nn.functional as F
from torch import Tensor

from utils import pick, residual


def block_rule(p: Tensor, q: Tensor, drafts: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
    """Block verification (Sun et al., arXiv 2403.10444, Algorithm 2). Arguments and results are those of
    `verification.token_rule`.

    Let w_0 = 1 and w_i = min(1, w_{i-1} p(x_i) / q(x_i)). Draft i ends the accepted part with probability
    h_i = S_i / (S_i + 1 - w_i), where S_i is the sum of max(0, w_i p - q) over the vocabulary after draft i. The last i
    that passes counts. The token after it is drawn from norm(max(0, w_i p - q)).
    """
    p_x, q_x = (d[:, : drafts.shape[1]].gather(-1, drafts[..., None])[..., 0] for d in (p, q))
    weights = [torch.ones_like(p[:, 0, 0])]
    for ratio in (p_x / q_x.clamp(min=torch.finfo(q.dtype).tiny)).unbind(1):
        weights.append((weights[-1] * ratio).clamp(max=1))
    w = torch.stack(weights, 1)
    # Past the last draft q is 0, so S is w there and h is w, as the algorithm requires.
    weighted, q = w[..., None] * p, F.pad(q, (0, 0, 0, 1))
    s = (weighted - q).clamp_(min=0).sum(-1)
    # If p equals q so far and after, any choice is right.
    h = (s / (s + 1 - w)).masked_fill_(s + 1 - w == 0, 1.0)
    passed = (u[:, :-1] < h[:, 1:]) & (q_x > 0)
    order = torch.arange(1, drafts.shape[1] + 1, device=p.device)
    accepted = F.pad(passed * order, (1, 0)).amax(1)
    at = accepted[:, None, None].expand(-1, 1, p.shape[-1])
    return accepted, pick(residual(weighted.gather(1, at)[:, 0], q.gather(1, at)[:, 0]), u[:, -1])
